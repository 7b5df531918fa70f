-- The heart: runs, attempts, steps, answers, bodies, sidecars, the installation's secret.
-- Bodies are bytea, never jsonb: jsonb refuses \u0000, reorders keys and drops duplicates.
-- The primary key of each table of a run starts with run_id, and every hot statement touches one run.

-- Time is the database's. A test session may set it: SET twiceshy.now = '2026-01-01T00:00:00Z'.
CREATE FUNCTION twiceshy.now() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT coalesce(nullif(current_setting('twiceshy.now', true), '')::timestamptz, clock_timestamp())
$$;

CREATE TABLE twiceshy.installation (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    secret     bytea NOT NULL CHECK (length(secret) = 32),
    created_at timestamptz NOT NULL DEFAULT twiceshy.now()
);

-- A sidecar process. Its id is new at every process start. Dead: ended_at is set, or the lease is over.
CREATE TABLE twiceshy.sidecar (
    id         text PRIMARY KEY,
    host       text NOT NULL,
    folder     text NOT NULL,
    pid        int NOT NULL,
    address    text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT twiceshy.now(),
    expires_at timestamptz NOT NULL,
    ended_at   timestamptz
);
-- A successor ends its predecessors of the same folder.
CREATE INDEX sidecar_living ON twiceshy.sidecar (host, folder) WHERE ended_at IS NULL;

-- Ids sort by their bytes: every writer locks runs in this order, so that no two wait for each other.
CREATE TABLE twiceshy.run (
    id               text COLLATE "C" PRIMARY KEY CHECK (id ~ '^[A-Za-z0-9._~-]{1,200}$'),
    uuid             uuid NOT NULL DEFAULT gen_random_uuid(),
    agent            text NOT NULL DEFAULT '',
    status           text NOT NULL DEFAULT 'queued' CHECK (status IN (
                         'queued', 'running', 'parked', 'done', 'failed', 'cancelled',
                         'ambiguous', 'diverged', 'over_budget')),
    input            bytea,
    result           bytea,
    error            text,
    -- The lease of the current attempt. token_hash NULL: nobody may act for this run now. sidecar: the one
    -- process that this attempt lives with (as in its attempt row), NULL until its first request. They stand
    -- here so that the whole fence is one row: who locks it, decides.
    attempt          int NOT NULL DEFAULT 0,
    token_hash       bytea,
    sidecar          text,
    lease_expires_at timestamptz,
    -- step.begun and answer.recorded come from here, so that their order is known.
    counter          bigint NOT NULL DEFAULT 0,
    -- step.begun of the newest step: what tells whether an attempt made progress.
    newest           bigint NOT NULL DEFAULT 0,
    -- Once a token was handed out, a request without one is refused.
    tokened          boolean NOT NULL DEFAULT false,
    -- Consecutive attempts that ended in death or failure with no new step.
    barren           int NOT NULL DEFAULT 0,
    -- Why a person is needed, while status is one of the stopped ones (kept on the step too).
    stop_step        text,
    stop_message     text,
    created_at       timestamptz NOT NULL DEFAULT twiceshy.now(),
    changed_at       timestamptz NOT NULL DEFAULT twiceshy.now(),
    ended_at         timestamptz,
    CHECK ((status IN ('ambiguous', 'diverged', 'over_budget')) = (stop_message IS NOT NULL))
) WITH (fillfactor = 70);
CREATE INDEX run_status ON twiceshy.run (status, created_at);

CREATE TABLE twiceshy.attempt (
    run_id     text COLLATE "C" NOT NULL,
    n          int NOT NULL,
    token_hash bytea NOT NULL,
    kind       text NOT NULL CHECK (kind IN ('launcher', 'claim', 'group', 'named')),
    host       text NOT NULL,
    folder     text NOT NULL,
    -- kind 'group': the client's process group and the first process of it that spoke.
    process    text,
    -- The one sidecar process that this attempt lives with, set by its first request.
    sidecar    text,
    started_at timestamptz NOT NULL DEFAULT twiceshy.now(),
    ended_at   timestamptz,
    outcome    text CHECK (outcome IN ('done', 'failed', 'died', 'stopped', 'interrupted', 'handed_over', 'cancelled')),
    exit_code  int,
    -- counter of the run when the attempt was claimed: a step with begun > this one is new in it.
    counter_at bigint NOT NULL,
    -- What the attempt did, as its sidecar saw it: JSON, see runtime.tape. Information, never a decision.
    tape       bytea,
    PRIMARY KEY (run_id, n)
);

-- No index but the primary key: the one small update of a step (sent -> answered) stays on its page (HOT).
CREATE TABLE twiceshy.step (
    run_id        text COLLATE "C" NOT NULL,
    key           text COLLATE "C" NOT NULL,
    begun         bigint NOT NULL,
    attempt       int NOT NULL,
    kind          text NOT NULL DEFAULT 'http' CHECK (kind IN ('http', 'local', 'sleep', 'wait', 'value')),
    effect        text NOT NULL CHECK (effect IN ('read', 'repeatable', 'idempotent', 'at_most_once')),
    state         text NOT NULL CHECK (state IN ('sent', 'answered', 'not_sent', 'ambiguous')),
    explicit      boolean NOT NULL,
    fingerprint   bytea NOT NULL,
    occurrence    int NOT NULL,
    secondary     bytea NOT NULL,
    method        text NOT NULL,
    url           text NOT NULL,
    -- The exchange that may move a sent step, the sidecar that has it, and the place its answer takes. They
    -- stay when the step has moved on: a COMMIT of unknown fate is repeated by the exchange's id, and an
    -- answer that comes late settles the step that its own exchange left ambiguous.
    exchange      uuid NOT NULL,
    sidecar       text NOT NULL,
    place         int NOT NULL DEFAULT 0,
    wire_key      text,
    -- What went first, byte for byte after injection, without credentials: head as JSON, then the body.
    request_head  bytea NOT NULL,
    request_body  bytea NOT NULL,
    rules         bytea NOT NULL,
    begun_at      timestamptz NOT NULL DEFAULT twiceshy.now(),
    sent_at       timestamptz NOT NULL DEFAULT twiceshy.now(),
    -- What is known of an outcome that was lost, in words.
    evidence      text,
    PRIMARY KEY (run_id, key),
    CHECK (length(fingerprint) = 32 AND length(secondary) = 16 AND occurrence >= 0 AND place >= 0)
) WITH (fillfactor = 80);

CREATE TABLE twiceshy.answer (
    run_id      text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    n           int NOT NULL,
    recorded    bigint NOT NULL,
    -- The exchange that brought it: a COMMIT of unknown fate is repeated by it.
    exchange    uuid,
    attempt     int NOT NULL,
    status      int NOT NULL CHECK (status BETWEEN 100 AND 999),
    reason      bytea NOT NULL,
    headers     bytea NOT NULL,
    -- Small bodies stand here, large ones in pieces in twiceshy.body under body_id.
    body        bytea,
    body_id     uuid,
    size        bigint NOT NULL,
    -- false: the upstream's body was cut, and was delivered so.
    whole       boolean NOT NULL,
    finality    text NOT NULL CHECK (finality IN ('final', 'provisional', 'doubtful')),
    -- true: an answer of the sidecar's own (502, 504), or what a person said.
    own         boolean NOT NULL,
    -- The provider's count of tokens, where its dialect is known.
    tokens      bigint NOT NULL DEFAULT 0,
    recorded_at timestamptz NOT NULL DEFAULT twiceshy.now(),
    PRIMARY KEY (run_id, key, n),
    CHECK (n >= 0 AND size >= 0),
    CHECK (body IS NULL OR (body_id IS NULL AND length(body) = size))
);
-- The few that a failed attempt turns into a question.
CREATE INDEX answer_doubtful ON twiceshy.answer (run_id) WHERE finality = 'doubtful';

-- Pieces are written and read whole, and most large bodies are compressed already.
CREATE TABLE twiceshy.body (
    run_id text COLLATE "C" NOT NULL,
    id     uuid NOT NULL,
    part   int NOT NULL CHECK (part >= 0),
    data   bytea NOT NULL,
    PRIMARY KEY (run_id, id, part)
);
ALTER TABLE twiceshy.body ALTER COLUMN data SET STORAGE EXTERNAL;

-- pglz takes about 10 ms per MB, and the one writer of a sidecar would wait for it; lz4 (14+, where built in) does not.
DO $$
BEGIN
    EXECUTE 'ALTER TABLE twiceshy.step ALTER COLUMN request_body SET COMPRESSION lz4';
    EXECUTE 'ALTER TABLE twiceshy.answer ALTER COLUMN body SET COMPRESSION lz4';
EXCEPTION WHEN syntax_error OR feature_not_supported OR invalid_parameter_value THEN
    NULL;
END
$$;
