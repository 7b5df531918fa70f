-- The heart: runs, attempts, steps, answers, bodies, sidecars, the installation's secret.
-- Bodies are bytea, never jsonb: jsonb refuses \u0000, reorders keys and drops duplicates.
-- The primary key of each table of a run starts with run_id, and every hot statement touches one run.

-- Time is the database's. A test session may set it: SET twiceshy.now = '2026-01-01T00:00:00Z'.
-- Declared volatile, as clock_timestamp() is, so that it is inlined: else its text is parsed at every call.
CREATE FUNCTION twiceshy.now() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(nullif(current_setting('twiceshy.now', true), '')::timestamptz, clock_timestamp())
$$;

-- What a column may hold is said by domains, which the server keeps ready. A CHECK of a table is parsed anew
-- by every INSERT and UPDATE of it (measured: half of the server's CPU time per step).
CREATE DOMAIN twiceshy.run_id AS text COLLATE "C" CHECK (VALUE ~ '^[A-Za-z0-9._~-]{1,200}$');
CREATE DOMAIN twiceshy.run_status AS text CHECK (VALUE IN (
    'queued', 'running', 'parked', 'done', 'failed', 'cancelled', 'ambiguous', 'diverged', 'over_budget'));
CREATE DOMAIN twiceshy.attempt_kind AS text CHECK (VALUE IN ('launcher', 'claim', 'group', 'named'));
CREATE DOMAIN twiceshy.outcome AS text CHECK (VALUE IN (
    'done', 'failed', 'died', 'stopped', 'interrupted', 'handed_over', 'cancelled'));
CREATE DOMAIN twiceshy.step_kind AS text CHECK (VALUE IN ('http', 'local', 'sleep', 'wait', 'value'));
CREATE DOMAIN twiceshy.effect AS text CHECK (VALUE IN ('read', 'repeatable', 'idempotent', 'at_most_once'));
CREATE DOMAIN twiceshy.step_state AS text CHECK (VALUE IN ('sent', 'answered', 'not_sent', 'ambiguous'));
CREATE DOMAIN twiceshy.finality AS text CHECK (VALUE IN ('final', 'provisional', 'doubtful'));
CREATE DOMAIN twiceshy.http_status AS int CHECK (VALUE BETWEEN 100 AND 999);
CREATE DOMAIN twiceshy.natural AS bigint CHECK (VALUE >= 0);
CREATE DOMAIN twiceshy.bytes_32 AS bytea CHECK (length(VALUE) = 32);
CREATE DOMAIN twiceshy.bytes_16 AS bytea CHECK (length(VALUE) = 16);

CREATE TABLE twiceshy.installation (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    secret     twiceshy.bytes_32 NOT NULL,
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
    id               twiceshy.run_id PRIMARY KEY,
    uuid             uuid NOT NULL DEFAULT gen_random_uuid(),
    agent            text NOT NULL DEFAULT '',
    status           twiceshy.run_status NOT NULL DEFAULT 'queued',
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
    ended_at         timestamptz
) WITH (fillfactor = 70);
CREATE INDEX run_status ON twiceshy.run (status, created_at);

-- A stopped run says why, and no other does. No CHECK: the counter's updates must not pay for it.
CREATE FUNCTION twiceshy.stops_with_a_message() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.status IN ('ambiguous', 'diverged', 'over_budget')) <> (NEW.stop_message IS NOT NULL) THEN
        RAISE check_violation USING MESSAGE = format(
            'run %s: status %s with%s a stop message', NEW.id, NEW.status,
            CASE WHEN NEW.stop_message IS NULL THEN 'out' ELSE '' END);
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER stops_with_a_message BEFORE INSERT OR UPDATE OF status, stop_message ON twiceshy.run
    FOR EACH ROW EXECUTE FUNCTION twiceshy.stops_with_a_message();

CREATE TABLE twiceshy.attempt (
    run_id     text COLLATE "C" NOT NULL,
    n          int NOT NULL,
    token_hash bytea NOT NULL,
    kind       twiceshy.attempt_kind NOT NULL,
    host       text NOT NULL,
    folder     text NOT NULL,
    -- kind 'group': the client's process group and the first process of it that spoke.
    process    text,
    -- The one sidecar process that this attempt lives with, set by its first request.
    sidecar    text,
    started_at timestamptz NOT NULL DEFAULT twiceshy.now(),
    ended_at   timestamptz,
    outcome    twiceshy.outcome,
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
    kind          twiceshy.step_kind NOT NULL DEFAULT 'http',
    effect        twiceshy.effect NOT NULL,
    state         twiceshy.step_state NOT NULL,
    explicit      boolean NOT NULL,
    fingerprint   twiceshy.bytes_32 NOT NULL,
    occurrence    int NOT NULL,
    secondary     twiceshy.bytes_16 NOT NULL,
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
    PRIMARY KEY (run_id, key)
) WITH (fillfactor = 90);

CREATE TABLE twiceshy.answer (
    run_id      text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    n           int NOT NULL,
    recorded    bigint NOT NULL,
    -- The exchange that brought it: a COMMIT of unknown fate is repeated by it.
    exchange    uuid,
    attempt     int NOT NULL,
    status      twiceshy.http_status NOT NULL,
    reason      bytea NOT NULL,
    headers     bytea NOT NULL,
    -- Small bodies stand here, large ones in pieces in twiceshy.body under body_id.
    body        bytea,
    body_id     uuid,
    size        twiceshy.natural NOT NULL,
    -- false: the upstream's body was cut, and was delivered so.
    whole       boolean NOT NULL,
    finality    twiceshy.finality NOT NULL,
    -- true: an answer of the sidecar's own (502, 504), or what a person said.
    own         boolean NOT NULL,
    -- The provider's count of tokens, where its dialect is known.
    tokens      bigint NOT NULL DEFAULT 0,
    recorded_at timestamptz NOT NULL DEFAULT twiceshy.now(),
    PRIMARY KEY (run_id, key, n)
);
-- The few that a failed attempt turns into a question.
CREATE INDEX answer_doubtful ON twiceshy.answer (run_id) WHERE finality = 'doubtful';

-- Pieces are written and read whole, and most large bodies are compressed already.
CREATE TABLE twiceshy.body (
    run_id text COLLATE "C" NOT NULL,
    id     uuid NOT NULL,
    part   int NOT NULL,
    data   bytea NOT NULL,
    PRIMARY KEY (run_id, id, part)
);
ALTER TABLE twiceshy.body ALTER COLUMN data SET STORAGE EXTERNAL;

-- pglz takes some four times as long as writing the bytes does, and the one writer of a sidecar would wait for
-- it. lz4 (14 and newer, where built in) takes less than it saves; where it is missing bodies are not compressed.
DO $$
BEGIN
    EXECUTE 'ALTER TABLE twiceshy.step ALTER COLUMN request_body SET COMPRESSION lz4';
    EXECUTE 'ALTER TABLE twiceshy.answer ALTER COLUMN body SET COMPRESSION lz4';
EXCEPTION WHEN syntax_error OR feature_not_supported OR invalid_parameter_value THEN
    ALTER TABLE twiceshy.step ALTER COLUMN request_body SET STORAGE EXTERNAL;
    ALTER TABLE twiceshy.answer ALTER COLUMN body SET STORAGE EXTERNAL;
END
$$;
