-- Approvals: waits that a person ends.

ALTER DOMAIN twiceshy.step_kind DROP CONSTRAINT step_kind_check;
ALTER DOMAIN twiceshy.step_kind ADD CONSTRAINT step_kind_check
    CHECK (VALUE IN ('http', 'local', 'sleep', 'wait', 'value', 'approval', 'start', 'child'));

CREATE DOMAIN twiceshy.decision AS text CHECK (VALUE IN ('approve', 'decline', 'timeout'));

-- What became of a step that waits for a person: the first that is written down counts, be it a decision or that none
-- came in time. No event is a decision, whatever its name.
CREATE TABLE twiceshy.approval (
    run_id     text COLLATE "C" NOT NULL,
    -- The step's key.
    id         text COLLATE "C" NOT NULL,
    name       text COLLATE "C" NOT NULL,
    asked_at   timestamptz NOT NULL,
    deadline   timestamptz,
    decision   twiceshy.decision,
    decided_by text,
    comment    text,
    at         timestamptz,
    PRIMARY KEY (run_id, id)
);
CREATE INDEX approval_open ON twiceshy.approval (asked_at, run_id, id) WHERE decision IS NULL;

-- A new step in the state that is given; false: the step is there already.
CREATE OR REPLACE FUNCTION twiceshy.write_step_row(
    e twiceshy.entry, state text, attempt int, begun bigint, at timestamptz
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    due timestamptz := coalesce(e.until, at + make_interval(secs => e.seconds));
BEGIN
    INSERT INTO twiceshy.step (
        run_id, key, begun, attempt, kind, effect, state, explicit, fingerprint, occurrence, secondary, method, url,
        exchange, sidecar, place, wire_key, request_head, request_body, rules, begun_at, sent_at, subject, deadline)
    VALUES (
        e.run_id, e.key, begun, attempt, coalesce(e.step_kind, 'http'), e.effect, state, e.explicit, e.fingerprint,
        e.occurrence, e.secondary, e.method, e.url, e.exchange, e.sidecar, e.place, e.wire_key, e.request_head,
        e.request_body, e.rules, at, at, e.subject, due)
    ON CONFLICT ON CONSTRAINT step_pkey DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF e.step_kind = 'approval' THEN
        INSERT INTO twiceshy.approval (run_id, id, name, asked_at, deadline)
        VALUES (e.run_id, e.key, e.subject, at, due);
    END IF;
    RETURN true;
END
$$;

-- Answer: guarded by its exchange, not by the lease. settled: a late one, which ended a doubt. One that takes an event,
-- or says that nobody decided in time, is recorded with that, or not at all.
CREATE OR REPLACE FUNCTION twiceshy.write_answer(
    e twiceshy.entry, counter bigint, at timestamptz,
    OUT outcome text, OUT begun bigint, OUT recorded bigint, OUT settled boolean
) LANGUAGE plpgsql AS $$
DECLARE
    place int;
BEGIN
    outcome := 'recorded';
    settled := false;
    IF e.event IS NOT NULL OR e.step_kind = 'approval' THEN
        IF e.event IS NOT NULL THEN
            UPDATE twiceshy.event v SET consumed_by = e.key
            FROM twiceshy.step s
            WHERE s.run_id = e.run_id AND s.key = e.key AND s.exchange = e.exchange AND s.state = 'sent'
              AND v.run_id = e.run_id AND v.name = s.subject AND v.id = e.event AND v.consumed_by IS NULL;
        ELSE
            UPDATE twiceshy.approval p SET decision = 'timeout', at = write_answer.at
            FROM twiceshy.step s
            WHERE s.run_id = e.run_id AND s.key = e.key AND s.exchange = e.exchange AND s.state = 'sent'
              AND p.run_id = e.run_id AND p.id = e.key AND p.decision IS NULL;
        END IF;
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

-- Child runs, and runs that another one continues.

ALTER TABLE twiceshy.run
    -- The run that started it.
    ADD COLUMN parent twiceshy.run_id,
    -- A run that continues as another is done, and makes a chain with it. first_run: the first of the chain (NULL: it
    -- is that itself). Who names any of them means the newest.
    ADD COLUMN first_run twiceshy.run_id,
    ADD COLUMN continued_from twiceshy.run_id,
    ADD COLUMN continued_as twiceshy.run_id;
CREATE INDEX run_parent ON twiceshy.run (parent) WHERE parent IS NOT NULL;
CREATE INDEX run_chain ON twiceshy.run (first_run) WHERE first_run IS NOT NULL;
CREATE INDEX run_newest ON twiceshy.run (first_run) WHERE first_run IS NOT NULL AND continued_as IS NULL;

-- The newest run of the chain that a run is of; NULL: there is no such run.
CREATE FUNCTION twiceshy.newest(run text) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT coalesce((
        SELECT n.id FROM twiceshy.run n WHERE n.first_run = coalesce(u.first_run, u.id) AND n.continued_as IS NULL
    ), u.id)
    FROM twiceshy.run u WHERE u.id = run
$$;

-- Children that have ended (as a chain has with its last run), and whose parent has not been looked at since. Who ends
-- a run need not lock another one for it.
CREATE TABLE twiceshy.child_end (
    parent text COLLATE "C" NOT NULL,
    child  text COLLATE "C" NOT NULL,
    PRIMARY KEY (parent, child)
);

CREATE FUNCTION twiceshy.tells_its_parent() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- A row that is there already, of an end before this one, is locked: so nobody has it done with before this is seen.
    INSERT INTO twiceshy.child_end (parent, child) VALUES (NEW.parent, coalesce(NEW.first_run, NEW.id))
    ON CONFLICT ON CONSTRAINT child_end_pkey DO UPDATE SET child = excluded.child;
    RETURN NULL;
END
$$;
CREATE TRIGGER tells_its_parent AFTER UPDATE OF status ON twiceshy.run FOR EACH ROW
    WHEN (NEW.parent IS NOT NULL AND NEW.continued_as IS NULL AND NEW.status <> OLD.status
          AND NEW.status IN ('done', 'failed', 'cancelled'))
    EXECUTE FUNCTION twiceshy.tells_its_parent();

-- Parked runs whose child has ended are queued; their ids. A row goes only under the lock of the parent: one that parks
-- later sees the child's end by itself. What somebody has locked is left for the next look.
CREATE FUNCTION twiceshy.wake_parents() RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE
    e      record;
    u      record;
    target text;
BEGIN
    FOR e IN SELECT c.parent, c.child FROM twiceshy.child_end c ORDER BY c.parent LIMIT 100 FOR UPDATE SKIP LOCKED LOOP
        target := twiceshy.newest(e.parent);
        IF target IS NOT NULL THEN
            SELECT r.status, r.wake_on, r.continued_as INTO u
            FROM twiceshy.run r WHERE r.id = target FOR NO KEY UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND OR u.continued_as IS NOT NULL;
            IF u.status = 'parked' AND 'run:' || e.child = ANY(u.wake_on) THEN
                UPDATE twiceshy.run r
                SET status = 'queued', wake_at = NULL, wake_on = NULL, changed_at = twiceshy.now()
                WHERE r.id = target;
                RETURN NEXT target;
            END IF;
        END IF;
        DELETE FROM twiceshy.child_end c WHERE c.parent = e.parent AND c.child = e.child;
    END LOOP;
END
$$;

-- A run for workers, under an id that is its step's alone, started by a run that is running under its fence. Asked for
-- again it changes nothing. False: the fence does not hold. Cancelling locks the parent too: it finds the child, or
-- nothing is started any more.
CREATE FUNCTION twiceshy.start_child(
    run text, token bytea, owner text, child text, child_agent text, given bytea, rank int
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    u record;
BEGIN
    SELECT r.status, r.token_hash, r.sidecar, r.priority INTO u FROM twiceshy.run r WHERE r.id = run FOR NO KEY UPDATE;
    IF NOT FOUND OR u.token_hash IS DISTINCT FROM token OR u.status <> 'running' OR u.sidecar <> owner THEN
        RETURN false;
    END IF;
    INSERT INTO twiceshy.run (id, agent, input, priority, for_workers, parent)
    VALUES (child, child_agent, given, coalesce(rank, u.priority), true, run)
    ON CONFLICT DO NOTHING;
    RETURN true;
END
$$;

-- What a step waits for, as run.wake_on has it. Neither is the name of any event.
CREATE FUNCTION twiceshy.awaited(kind text, subject text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE kind
        WHEN 'wait' THEN subject
        WHEN 'approval' THEN 'approval:' || subject
        WHEN 'child' THEN 'run:' || subject
    END
$$;

-- The attempt gives its place up until one of the waits that it is held by (their keys) is due. outcome: parked; due
-- (one of them is, or is over); refused (the fence does not hold). Events and decisions come under the same lock, and
-- the end of a child is told once the lock is free, so none is missed in between.
CREATE OR REPLACE FUNCTION twiceshy.park(
    run text, token bytea, owner text, held text[], OUT outcome text, OUT until timestamptz
) LANGUAGE plpgsql AS $$
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
    SELECT min(s.deadline), array_agg(DISTINCT twiceshy.awaited(s.kind, s.subject)) FILTER (WHERE s.kind <> 'sleep'),
           count(*)
    INTO until, names, open
    FROM twiceshy.step s
    WHERE s.run_id = run AND s.key = ANY(held) AND s.kind IN ('sleep', 'wait', 'approval', 'child') AND s.state = 'sent';
    IF open = 0 OR open <> cardinality(held) OR until <= at OR EXISTS (
        SELECT FROM twiceshy.event v WHERE v.run_id = run AND v.name = ANY(names) AND v.consumed_by IS NULL
    ) OR EXISTS (
        SELECT FROM twiceshy.approval p WHERE p.run_id = run AND p.id = ANY(held) AND p.decision IS NOT NULL
    ) OR EXISTS (
        SELECT FROM twiceshy.step s JOIN twiceshy.run n ON n.id = twiceshy.newest(s.subject)
        WHERE s.run_id = run AND s.key = ANY(held) AND s.kind = 'child' AND n.status IN ('done', 'failed', 'cancelled'))
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

-- A run is done and goes on as another one, in one transaction: exactly one, however often it is asked for. The new one
-- has what nobody has read yet, is labelled and started as the old one was, and counts on from its numbers. The token
-- stays, so that who has it hears where the run went. outcome: continued (as whom: other), refused (the fence does not
-- hold).
CREATE FUNCTION twiceshy.continue_as_new(
    run text, token bytea, owner text, successor text, given bytea, OUT outcome text, OUT other text
) LANGUAGE plpgsql AS $$
DECLARE
    u  twiceshy.run%ROWTYPE;
    at timestamptz;
BEGIN
    SELECT r.* INTO u FROM twiceshy.run r WHERE r.id = run FOR NO KEY UPDATE;
    at := twiceshy.now();
    IF NOT FOUND OR u.token_hash IS DISTINCT FROM token THEN
        outcome := 'refused';
        RETURN;
    ELSIF u.continued_as IS NOT NULL THEN
        outcome := 'continued';
        other := u.continued_as;
        RETURN;
    ELSIF u.status <> 'running' OR u.sidecar <> owner THEN
        outcome := 'refused';
        RETURN;
    END IF;
    INSERT INTO twiceshy.run (
        id, agent, input, priority, for_workers, tokened, counter, parent, first_run, continued_from, created_at)
    VALUES (
        successor, u.agent, given, u.priority, u.for_workers, u.tokened, u.counter, u.parent,
        coalesce(u.first_run, u.id), u.id, at);
    INSERT INTO twiceshy.attribute (run_id, name, value, created_at)
    SELECT successor, a.name, a.value, at FROM twiceshy.attribute a WHERE a.run_id = run;
    UPDATE twiceshy.event v SET run_id = successor WHERE v.run_id = run AND v.consumed_by IS NULL;
    UPDATE twiceshy.run r
    SET status = 'done', continued_as = successor, error = NULL, ended_at = at, changed_at = at
    WHERE r.id = run;
    UPDATE twiceshy.attempt t SET ended_at = at, outcome = 'done'
    WHERE t.run_id = run AND t.n = u.attempt AND t.ended_at IS NULL;
    outcome := 'continued';
    other := successor;
END
$$;

-- An event for a run, or for the newest that continues it, and its waking. An id is sent once to all of them. outcome:
-- sent; known (it was sent before); other (its id was, with another payload); no_run; ended. woken: the run that is
-- queued now.
DROP FUNCTION twiceshy.send_event(text, text, text, bytea);
CREATE FUNCTION twiceshy.send_event(
    run text, event_name text, event_id text, body bytea, OUT outcome text, OUT woken text
) LANGUAGE plpgsql AS $$
DECLARE
    target text := run;
    u      record;
    old    bytea;
BEGIN
    LOOP
        SELECT r.status, r.wake_on, r.counter, r.first_run, r.continued_as INTO u
        FROM twiceshy.run r WHERE r.id = target FOR NO KEY UPDATE;
        IF NOT FOUND THEN
            outcome := 'no_run';
            RETURN;
        END IF;
        EXIT WHEN u.continued_as IS NULL;
        target := twiceshy.newest(target);
    END LOOP;
    SELECT v.payload INTO old FROM twiceshy.event v WHERE v.run_id = target AND v.name = event_name AND v.id = event_id;
    IF NOT FOUND AND u.first_run IS NOT NULL THEN
        SELECT v.payload INTO old
        FROM (SELECT u.first_run::text UNION ALL SELECT r.id FROM twiceshy.run r WHERE r.first_run = u.first_run) c (id)
        JOIN twiceshy.event v ON v.run_id = c.id AND v.name = event_name AND v.id = event_id LIMIT 1;
    END IF;
    IF FOUND THEN
        outcome := CASE WHEN old = body THEN 'known' ELSE 'other' END;
        RETURN;
    END IF;
    IF u.status IN ('done', 'cancelled') THEN
        outcome := 'ended';
        RETURN;
    END IF;
    INSERT INTO twiceshy.event (run_id, name, id, sent, payload, at)
    VALUES (target, event_name, event_id, u.counter + 1, body, twiceshy.now());
    UPDATE twiceshy.run r SET counter = u.counter + 1 WHERE r.id = target;
    IF u.status = 'parked' AND event_name = ANY(u.wake_on) THEN
        UPDATE twiceshy.run r SET status = 'queued', wake_at = NULL, wake_on = NULL, changed_at = twiceshy.now()
        WHERE r.id = target;
        woken := target;
    END IF;
    outcome := 'sent';
END
$$;
