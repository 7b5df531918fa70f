-- Group commit: entries of many runs, one call, one round trip, one commit.
--
-- All changes of a run and of its steps are made under the lock of its row, so that a claim and an intent
-- never both win. The parts below are called by twiceshy.write, which holds that lock; each gets the run's
-- counter and says which numbers it took from it.

-- One entry, as runtime.rows makes it. kind says which fields matter; the order is that of rows.ENTRY.
CREATE TYPE twiceshy.entry AS (
    kind         text,
    run_id       text,
    key          text,
    exchange     uuid,
    token_hash   bytea,
    sidecar      text,
    attempt      int,
    place        int,
    replaces     uuid,
    effect       text,
    explicit     boolean,
    fingerprint  bytea,
    occurrence   int,
    secondary    bytea,
    method       text,
    url          text,
    wire_key     text,
    request_head bytea,
    request_body bytea,
    rules        bytea,
    status       int,
    reason       bytea,
    headers      bytea,
    body         bytea,
    body_id      uuid,
    size         bigint,
    whole        boolean,
    finality     text,
    own          boolean,
    tokens       bigint,
    becomes      text,
    message      text,
    evidence     text
);

-- An ambiguous step of the run was settled: the next one still open becomes the run's stop, else the run is
-- queued. The caller has locked the run.
CREATE FUNCTION twiceshy.settled(run text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    open record;
BEGIN
    SELECT s.key, s.method, s.url, s.evidence INTO open
    FROM twiceshy.step s JOIN twiceshy.run u ON u.id = s.run_id
    WHERE s.run_id = run AND s.state = 'ambiguous'
    ORDER BY s.key <> u.stop_step, s.begun LIMIT 1;
    IF FOUND THEN
        UPDATE twiceshy.run u
        SET stop_step = open.key, changed_at = twiceshy.now(),
            stop_message = coalesce(open.evidence, 'the outcome of ' || open.method || ' ' || open.url || ' is unknown')
        WHERE u.id = run AND u.status = 'ambiguous' AND u.stop_step IS DISTINCT FROM open.key;
    ELSE
        UPDATE twiceshy.run u
        SET status = 'queued', stop_step = NULL, stop_message = NULL, changed_at = twiceshy.now()
        WHERE u.id = run AND u.status = 'ambiguous';
    END IF;
    RETURN (SELECT u.status FROM twiceshy.run u WHERE u.id = run);
END
$$;

-- Appends an answer to its step's list, or puts it in the place of the one that it replaces.
CREATE FUNCTION twiceshy.write_answer_row(e twiceshy.entry, place int, recorded bigint, at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF length(e.body) <> e.size OR e.body IS NOT NULL AND e.body_id IS NOT NULL THEN
        RAISE check_violation USING MESSAGE = format(
            'answer of %s bytes: its body has %s bytes%s', e.size, length(e.body),
            CASE WHEN e.body_id IS NOT NULL THEN ' and stands in pieces too' ELSE '' END);
    END IF;
    INSERT INTO twiceshy.answer (
        run_id, key, n, recorded, exchange, attempt, status, reason, headers, body, body_id, size, whole,
        finality, own, tokens, recorded_at)
    VALUES (
        e.run_id, e.key, place, recorded, e.exchange, e.attempt, e.status, e.reason, e.headers, e.body, e.body_id,
        e.size, e.whole, e.finality, e.own, e.tokens, at)
    ON CONFLICT ON CONSTRAINT answer_pkey DO UPDATE SET
        recorded = excluded.recorded, exchange = excluded.exchange, attempt = excluded.attempt,
        status = excluded.status, reason = excluded.reason, headers = excluded.headers, body = excluded.body,
        body_id = excluded.body_id, size = excluded.size, whole = excluded.whole, finality = excluded.finality,
        own = excluded.own, tokens = excluded.tokens, recorded_at = excluded.recorded_at;
END
$$;

-- A new step in the state that is given; false: the step is there already.
CREATE FUNCTION twiceshy.write_step_row(e twiceshy.entry, state text, attempt int, begun bigint, at timestamptz)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO twiceshy.step (
        run_id, key, begun, attempt, effect, state, explicit, fingerprint, occurrence, secondary, method, url,
        exchange, sidecar, place, wire_key, request_head, request_body, rules, begun_at, sent_at)
    VALUES (
        e.run_id, e.key, begun, attempt, e.effect, state, e.explicit, e.fingerprint, e.occurrence, e.secondary,
        e.method, e.url, e.exchange, e.sidecar, e.place, e.wire_key, e.request_head, e.request_body, e.rules, at, at)
    ON CONFLICT ON CONSTRAINT step_pkey DO NOTHING;
    RETURN FOUND;
END
$$;

-- Intent: the step becomes sent. Its first bytes, class and wire key stay what they were.
CREATE FUNCTION twiceshy.write_intent(
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
    SELECT s.state, s.exchange, s.sidecar, s.begun, s.begun_at INTO old
    FROM twiceshy.step s WHERE s.run_id = e.run_id AND s.key = e.key;
    SELECT a.n, a.finality INTO last
    FROM twiceshy.answer a WHERE a.run_id = e.run_id AND a.key = e.key ORDER BY a.n DESC LIMIT 1;
    begun := old.begun;
    first_sent := old.begun_at;
    outcome := 'begun';
    IF old.state = 'sent' AND old.exchange = e.exchange THEN
        RETURN;  -- committed before
    ELSIF e.replaces IS NOT NULL THEN
        -- Only what a dead sidecar had, or what this one has no more in its memory.
        IF old.state = 'sent' AND old.exchange = e.replaces AND (old.sidecar = e.sidecar OR NOT EXISTS (
            SELECT FROM twiceshy.sidecar c WHERE c.id = old.sidecar AND c.ended_at IS NULL AND c.expires_at >= at))
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

-- Answer: guarded by its exchange, not by the lease. settled: a late one, which ended a doubt.
CREATE FUNCTION twiceshy.write_answer(
    e twiceshy.entry, counter bigint, at timestamptz,
    OUT outcome text, OUT begun bigint, OUT recorded bigint, OUT settled boolean
) LANGUAGE plpgsql AS $$
DECLARE
    place int;
BEGIN
    outcome := 'recorded';
    settled := false;
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

-- Read: step and answer at once. The first record wins; only a provisional one of an earlier attempt gives up
-- its place.
CREATE FUNCTION twiceshy.write_read(
    e twiceshy.entry, attempt int, counter bigint, at timestamptz,
    OUT outcome text, OUT begun bigint, OUT recorded bigint
) LANGUAGE plpgsql AS $$
DECLARE
    old  record;
    last record;
BEGIN
    outcome := 'recorded';
    IF e.place = 0 AND twiceshy.write_step_row(e, 'answered', attempt, counter + 1, at) THEN
        begun := counter + 1;
        recorded := counter + 2;
        PERFORM twiceshy.write_answer_row(e, 0, recorded, at);
        RETURN;
    END IF;
    SELECT s.state, s.effect, s.begun INTO old FROM twiceshy.step s WHERE s.run_id = e.run_id AND s.key = e.key;
    begun := old.begun;
    SELECT a.recorded INTO recorded
    FROM twiceshy.answer a WHERE a.run_id = e.run_id AND a.key = e.key AND a.exchange = e.exchange;
    IF FOUND THEN
        RETURN;  -- committed before
    END IF;
    SELECT a.n, a.finality, a.attempt INTO last
    FROM twiceshy.answer a WHERE a.run_id = e.run_id AND a.key = e.key ORDER BY a.n DESC LIMIT 1;
    IF old.state = 'answered' AND old.effect = 'read' AND (
        e.place = last.n + 1 OR e.place = last.n AND last.finality = 'provisional' AND last.attempt < e.attempt)
    THEN
        recorded := counter + 1;
        PERFORM twiceshy.write_answer_row(e, e.place, recorded, at);
    ELSE
        outcome := 'conflict';
    END IF;
END
$$;

-- Writes entries in their order and says of each, in that order, what became of it. They come sorted by run,
-- and runs are locked in that order, so that two writers never wait for each other.
--
-- What is not as an entry supposes changes nothing and is answered: fenced (another token), elsewhere (another
-- sidecar), stopped (the run is not running), conflict (the step has moved on). Values that no column takes
-- raise, and the caller repeats the others. An entry that was committed before, under the same exchange, is
-- answered as it was then.
--
-- lock_timeout: a session that forgot its lock on one run must not hold up all. No sequential scans: a plan
-- made while a table was small would stay.
CREATE FUNCTION twiceshy.write(
    entries          twiceshy.entry[],
    OUT outcome      text,
    OUT begun        bigint,
    OUT recorded     bigint,
    OUT first_sent   timestamptz,
    OUT at           timestamptz,
    OUT other        text,
    OUT status       text,
    OUT stop_step    text,
    OUT stop_message text
) RETURNS SETOF record
LANGUAGE plpgsql
SET lock_timeout = '500ms'
SET enable_seqscan = off
SET plan_cache_mode = force_generic_plan
AS $$
<<batch>>
DECLARE
    e       twiceshy.entry;
    done    record;
    -- The locked run.
    locked  text;
    token   bytea;
    owner   text;
    attempt int;
    counter bigint;
    newest  bigint;
    counted bigint;
BEGIN
    at := twiceshy.now();
    FOREACH e IN ARRAY entries LOOP
        begun := NULL;
        recorded := NULL;
        first_sent := NULL;
        other := NULL;

        IF e.run_id IS DISTINCT FROM locked THEN
            IF counter <> counted THEN
                UPDATE twiceshy.run u SET counter = batch.counter, newest = batch.newest WHERE u.id = locked;
            END IF;
            SELECT u.status, u.token_hash, u.sidecar, u.attempt, u.counter, u.newest, u.stop_step, u.stop_message
            INTO status, token, owner, attempt, counter, newest, stop_step, stop_message
            FROM twiceshy.run u WHERE u.id = e.run_id FOR NO KEY UPDATE;
            locked := e.run_id;
            counted := counter;
        END IF;

        IF e.kind = 'answer' THEN
            done := twiceshy.write_answer(e, counter, at);
            outcome := done.outcome;
            begun := done.begun;
            recorded := done.recorded;
            IF done.settled AND status = 'ambiguous' THEN
                status := twiceshy.settled(locked);
                SELECT u.stop_step, u.stop_message INTO stop_step, stop_message FROM twiceshy.run u WHERE u.id = locked;
            END IF;

        ELSIF e.kind = 'put_back' THEN
            UPDATE twiceshy.step s SET state = 'not_sent'
            WHERE s.run_id = locked AND s.key = e.key AND s.exchange = e.exchange AND s.state IN ('sent', 'not_sent');
            outcome := CASE WHEN FOUND THEN 'recorded' ELSE 'conflict' END;

        ELSE
            outcome := CASE
                WHEN token IS NULL OR token IS DISTINCT FROM e.token_hash THEN 'fenced'
                WHEN status <> 'running' THEN 'stopped'
                WHEN owner <> e.sidecar THEN 'elsewhere'
                ELSE 'holds' END;
            IF outcome = 'elsewhere' THEN
                other := owner;
            ELSIF outcome = 'holds' AND owner IS NULL THEN
                owner := e.sidecar;
                UPDATE twiceshy.run u SET sidecar = owner WHERE u.id = locked;
                UPDATE twiceshy.attempt t SET sidecar = owner WHERE t.run_id = locked AND t.n = attempt;
            END IF;

            IF e.kind = 'stop' THEN
                -- What became of an exchange is recorded whoever has the run by now; the run stops for its holder.
                UPDATE twiceshy.step s SET state = 'ambiguous', evidence = concat_ws(E'\n', s.evidence, e.evidence)
                WHERE s.run_id = locked AND s.key = e.key AND s.exchange = e.exchange AND s.state = 'sent'
                  AND (outcome = 'holds' OR s.sidecar = e.sidecar);
                IF outcome = 'holds' AND (FOUND OR e.exchange IS NULL) THEN
                    status := e.becomes;
                    stop_step := e.key;
                    stop_message := e.message;
                    UPDATE twiceshy.run u
                    SET status = e.becomes, stop_step = e.key, stop_message = e.message, changed_at = at
                    WHERE u.id = locked;
                    outcome := 'recorded';
                ELSIF outcome = 'holds' THEN
                    outcome := 'conflict';
                ELSIF outcome = 'stopped' AND (status, stop_step, stop_message) = (e.becomes, e.key, e.message) THEN
                    outcome := 'recorded';  -- committed before
                END IF;
            ELSIF outcome = 'holds' AND e.kind = 'intent' THEN
                done := twiceshy.write_intent(e, attempt, counter, at);
                outcome := done.outcome;
                begun := done.begun;
                first_sent := done.first_sent;
            ELSIF outcome = 'holds' AND e.kind = 'read' THEN
                done := twiceshy.write_read(e, attempt, counter, at);
                outcome := done.outcome;
                begun := done.begun;
                recorded := done.recorded;
            END IF;
        END IF;

        counter := greatest(counter, begun, recorded);
        newest := greatest(newest, begun);
        RETURN NEXT;
    END LOOP;
    IF counter <> counted THEN
        UPDATE twiceshy.run u SET counter = batch.counter, newest = batch.newest WHERE u.id = locked;
    END IF;
END
$$;
