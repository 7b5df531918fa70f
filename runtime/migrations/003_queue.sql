-- The queue: runs that any worker may take, when, and in which order; idempotent starts; what a person said.

ALTER DOMAIN twiceshy.attempt_kind DROP CONSTRAINT attempt_kind_check;
ALTER DOMAIN twiceshy.attempt_kind ADD CONSTRAINT attempt_kind_check
    CHECK (VALUE IN ('launcher', 'worker', 'claim', 'group', 'named'));

ALTER TABLE twiceshy.run
    -- true: workers do it. The others wait for their own launcher, shell or supervisor.
    ADD COLUMN for_workers boolean NOT NULL DEFAULT false,
    ADD COLUMN priority int NOT NULL DEFAULT 0,
    -- From when on it may be claimed, and its place among those of its priority. An attempt that failed puts it
    -- behind all that wait by then: a run that fails again and again never keeps the others from their turn.
    ADD COLUMN not_before timestamptz NOT NULL DEFAULT twiceshy.now(),
    -- The attempt after which a person said "retry": what was answered last, and not finally, is tried again.
    ADD COLUMN retried_after int;

CREATE INDEX run_queue ON twiceshy.run (priority DESC, not_before) WHERE status = 'queued' AND for_workers;
CREATE INDEX run_held ON twiceshy.run (lease_expires_at) WHERE status = 'running' AND for_workers;
CREATE INDEX run_agent ON twiceshy.run (agent, created_at);

-- A start that was asked for under a key. It outlives its run, so that a late repetition starts nothing.
CREATE TABLE twiceshy.start (
    key    text COLLATE "C" PRIMARY KEY,
    run_id text COLLATE "C" NOT NULL,
    digest twiceshy.bytes_32 NOT NULL,
    at     timestamptz NOT NULL DEFAULT twiceshy.now()
);
