-- Steps that are no HTTP request, events, and parking.

-- What a step of the sidecar's own waits for. subject: the event's name, or that of the local step. deadline: fixed
-- when the step is first recorded; whoever asks again waits for the rest only.
ALTER TABLE twiceshy.step ADD COLUMN subject text, ADD COLUMN deadline timestamptz;

-- Until when a parked run waits (NULL: for an event only), and for which events.
ALTER TABLE twiceshy.run ADD COLUMN wake_at timestamptz, ADD COLUMN wake_on text[];
CREATE INDEX run_wakes ON twiceshy.run (wake_at) WHERE status = 'parked';

ALTER DOMAIN twiceshy.outcome DROP CONSTRAINT outcome_check;
ALTER DOMAIN twiceshy.outcome ADD CONSTRAINT outcome_check CHECK (VALUE IN (
    'done', 'failed', 'died', 'stopped', 'interrupted', 'handed_over', 'cancelled', 'parked'));

-- A message to a run. It may come before anybody waits for it, and is taken once.
CREATE TABLE twiceshy.event (
    run_id      text COLLATE "C" NOT NULL,
    name        text COLLATE "C" NOT NULL,
    id          text COLLATE "C" NOT NULL,
    -- From the run's counter: the order in which they came.
    sent        bigint NOT NULL,
    payload     bytea NOT NULL,
    at          timestamptz NOT NULL,
    -- The key of the step that took it.
    consumed_by text COLLATE "C",
    PRIMARY KEY (run_id, name, id)
);

-- step_kind: NULL for HTTP. seconds: the deadline counted from the first record; else until. event: the id of the one
-- that an answer takes.
ALTER TYPE twiceshy.entry
    ADD ATTRIBUTE step_kind text, ADD ATTRIBUTE subject text, ADD ATTRIBUTE seconds float8,
    ADD ATTRIBUTE until timestamptz, ADD ATTRIBUTE event text;

-- A new step in the state that is given; false: the step is there already.
CREATE OR REPLACE FUNCTION twiceshy.write_step_row(
    e twiceshy.entry, state text, attempt int, begun bigint, at timestamptz
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO twiceshy.step (
        run_id, key, begun, attempt, kind, effect, state, explicit, fingerprint, occurrence, secondary, method, url,
        exchange, sidecar, place, wire_key, request_head, request_body, rules, begun_at, sent_at, subject, deadline)
    VALUES (
        e.run_id, e.key, begun, attempt, coalesce(e.step_kind, 'http'), e.effect, state, e.explicit, e.fingerprint,
        e.occurrence, e.secondary, e.method, e.url, e.exchange, e.sidecar, e.place, e.wire_key, e.request_head,
        e.request_body, e.rules, at, at, e.subject, coalesce(e.until, at + make_interval(secs => e.seconds)))
    ON CONFLICT ON CONSTRAINT step_pkey DO NOTHING;
    RETURN FOUND;
END
$$;

-- Intent: the step becomes sent. Its first bytes, class, wire key and deadline stay what they were.
CREATE OR REPLACE FUNCTION twiceshy.write_intent(
    e twiceshy.entry, attempt int, counter bigint, at timestamptz,
    OUT outcome text, OUT begun bigint, OUT first_sent timestamptz
) LANGUAGE plpgsql AS $$
DECLARE
    old  record;
    last record;
BEGIN
    IF e.replaces IS NULL AND e.place = 0 AND twiceshy.write_step_row(e, 'sent', attempt, counter + 1, at) THEN
        outcome := 'begun';
        begun := counter + 1;
        first_sent := at;
        RETURN;
    END IF;
    SELECT s.state, s.kind, s.exchange, s.sidecar, s.begun, s.begun_at INTO old
    FROM twiceshy.step s WHERE s.run_id = e.run_id AND s.key = e.key;
    SELECT a.n, a.finality INTO last
    FROM twiceshy.answer a WHERE a.run_id = e.run_id AND a.key = e.key ORDER BY a.n DESC LIMIT 1;
    begun := old.begun;
    first_sent := old.begun_at;
    outcome := 'begun';
    IF old.state = 'sent' AND old.exchange = e.exchange THEN
        RETURN;  -- committed before
    ELSIF e.replaces IS NOT NULL THEN
        -- Only what a dead sidecar had, or what this one has no more in its memory. What never leaves the house is
        -- its attempt's, and goes over to the next one.
        IF old.state = 'sent' AND old.exchange = e.replaces AND (
            old.sidecar = e.sidecar OR old.kind <> 'http' OR NOT EXISTS (
                SELECT FROM twiceshy.sidecar c
                WHERE c.id = old.sidecar AND c.ended_at IS NULL AND c.expires_at >= at))
        THEN
            outcome := 'begun';
        ELSE
            outcome := 'conflict';
        END IF;
    -- A settled step is never asked again, however stale the asker's view of it.
    ELSIF old.state = 'not_sent' AND e.place <= coalesce(last.n, -1) + 1
       OR old.state = 'answered' AND last.finality = 'provisional' AND e.place IN (last.n, last.n + 1)
    THEN
        outcome := 'begun';
    ELSE
        outcome := 'conflict';
    END IF;
    IF outcome = 'begun' THEN
        UPDATE twiceshy.step s
        SET state = 'sent', exchange = e.exchange, sidecar = e.sidecar, place = e.place, sent_at = at
        WHERE s.run_id = e.run_id AND s.key = e.key;
    END IF;
END
$$;

-- Answer: guarded by its exchange, not by the lease. settled: a late one, which ended a doubt. One that takes an event
-- is recorded with that, or not at all.
CREATE OR REPLACE FUNCTION twiceshy.write_answer(
    e twiceshy.entry, counter bigint, at timestamptz,
    OUT outcome text, OUT begun bigint, OUT recorded bigint, OUT settled boolean
) LANGUAGE plpgsql AS $$
DECLARE
    place int;
BEGIN
    outcome := 'recorded';
    settled := false;
    IF e.event IS NOT NULL THEN
        UPDATE twiceshy.event v SET consumed_by = e.key
        FROM twiceshy.step s
        WHERE s.run_id = e.run_id AND s.key = e.key AND s.exchange = e.exchange AND s.state = 'sent'
          AND v.run_id = e.run_id AND v.name = s.subject AND v.id = e.event AND v.consumed_by IS NULL;
        IF NOT FOUND THEN
            SELECT a.recorded INTO recorded
            FROM twiceshy.answer a WHERE a.run_id = e.run_id AND a.key = e.key AND a.exchange = e.exchange;
            IF NOT FOUND THEN
                outcome := 'conflict';
            END IF;
            RETURN;
        END IF;
    END IF;
    UPDATE twiceshy.step s SET state = e.becomes
    WHERE s.run_id = e.run_id AND s.key = e.key AND s.exchange = e.exchange AND s.state = 'sent'
    RETURNING s.place, s.begun INTO place, begun;
    IF NOT FOUND THEN
        SELECT a.recorded INTO recorded
        FROM twiceshy.answer a WHERE a.run_id = e.run_id AND a.key = e.key AND a.exchange = e.exchange;
        IF FOUND THEN
            RETURN;  -- committed before
        END IF;
        -- It settles what its own exchange left open; where a key makes all exchanges of a step one effect,
        -- what any of them left open.
        UPDATE twiceshy.step s SET state = e.becomes
        WHERE s.run_id = e.run_id AND s.key = e.key
          AND (s.exchange = e.exchange AND s.state IN ('ambiguous', 'not_sent')
               OR s.effect <> 'at_most_once' AND s.state = 'ambiguous')
        RETURNING s.place, s.begun INTO place, begun;
        settled := FOUND;
        IF NOT settled THEN
            outcome := 'conflict';
            UPDATE twiceshy.step s
            SET evidence = concat_ws(E'\n', s.evidence, format(
                'exchange %s, which had lost the step, ended with %s (%s bytes)', e.exchange, e.status, e.size))
            WHERE s.run_id = e.run_id AND s.key = e.key AND strpos(coalesce(s.evidence, ''), e.exchange::text) = 0;
            RETURN;
        END IF;
    END IF;
    recorded := counter + 1;
    PERFORM twiceshy.write_answer_row(e, place, recorded, at);
END
$$;

-- An event for a run, and its waking. outcome: sent; known (it was sent before); other (its id was, with another
-- payload); no_run; ended.
CREATE FUNCTION twiceshy.send_event(run text, event_name text, event_id text, body bytea, OUT outcome text)
LANGUAGE plpgsql AS $$
DECLARE
    u   record;
    old bytea;
BEGIN
    SELECT r.status, r.wake_on, r.counter INTO u FROM twiceshy.run r WHERE r.id = run FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        outcome := 'no_run';
        RETURN;
    END IF;
    SELECT v.payload INTO old FROM twiceshy.event v WHERE v.run_id = run AND v.name = event_name AND v.id = event_id;
    IF FOUND THEN
        outcome := CASE WHEN old = body THEN 'known' ELSE 'other' END;
        RETURN;
    END IF;
    IF u.status IN ('done', 'cancelled') THEN
        outcome := 'ended';
        RETURN;
    END IF;
    INSERT INTO twiceshy.event (run_id, name, id, sent, payload, at)
    VALUES (run, event_name, event_id, u.counter + 1, body, twiceshy.now());
    UPDATE twiceshy.run r SET counter = u.counter + 1 WHERE r.id = run;
    IF u.status = 'parked' AND event_name = ANY(u.wake_on) THEN
        UPDATE twiceshy.run r SET status = 'queued', wake_at = NULL, wake_on = NULL, changed_at = twiceshy.now()
        WHERE r.id = run;
    END IF;
    outcome := 'sent';
END
$$;

-- The attempt gives its place up until one of the sleeps and waits that it is held by (their keys) is due. outcome:
-- parked; due (one of them is, or is over); refused (the fence does not hold). Events come under the same lock, so
-- none is missed in between.
CREATE FUNCTION twiceshy.park(run text, token bytea, owner text, held text[], OUT outcome text, OUT until timestamptz)
LANGUAGE plpgsql AS $$
DECLARE
    u     record;
    names text[];
    open  int;
    at    timestamptz;
BEGIN
    SELECT r.status, r.token_hash, r.sidecar, r.attempt INTO u FROM twiceshy.run r WHERE r.id = run FOR NO KEY UPDATE;
    at := twiceshy.now();
    IF NOT FOUND OR u.token_hash IS DISTINCT FROM token OR u.status <> 'running' OR u.sidecar IS DISTINCT FROM owner THEN
        outcome := 'refused';
        RETURN;
    END IF;
    SELECT min(s.deadline), array_agg(DISTINCT s.subject) FILTER (WHERE s.kind = 'wait'), count(*)
    INTO until, names, open
    FROM twiceshy.step s
    WHERE s.run_id = run AND s.key = ANY(held) AND s.kind IN ('sleep', 'wait') AND s.state = 'sent';
    IF open = 0 OR open <> cardinality(held) OR until <= at OR EXISTS (
        SELECT FROM twiceshy.event v WHERE v.run_id = run AND v.name = ANY(names) AND v.consumed_by IS NULL)
    THEN
        outcome := 'due';
        RETURN;
    END IF;
    UPDATE twiceshy.run r SET status = 'parked', wake_at = until, wake_on = names, changed_at = at WHERE r.id = run;
    UPDATE twiceshy.attempt t SET ended_at = at, outcome = 'parked'
    WHERE t.run_id = run AND t.n = u.attempt AND t.ended_at IS NULL;
    outcome := 'parked';
END
$$;
