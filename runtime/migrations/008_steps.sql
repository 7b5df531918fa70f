-- Local steps: how often they were permitted, and outputs that are recorded in the agent's own transaction.

-- How many permits were given for a local step. Each has an exchange of its own.
ALTER TABLE twiceshy.step ADD COLUMN tries int NOT NULL DEFAULT 1;

CREATE FUNCTION twiceshy.counts_tries() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.tries := OLD.tries + 1;
    RETURN NEW;
END
$$;
CREATE TRIGGER counts_tries BEFORE UPDATE OF exchange ON twiceshy.step FOR EACH ROW
    WHEN (NEW.kind = 'local' AND NEW.exchange <> OLD.exchange) EXECUTE FUNCTION twiceshy.counts_tries();

-- What came of an open local step, recorded in the transaction of whoever calls this: it is there when what else that
-- transaction wrote is, and not when that is not. output: JSON as text, which every driver can pass.
--
-- The run's row stays locked until that transaction ends: a claim waits for it, and finds the step recorded or not; who
-- was claimed over before raises here, and nothing of the transaction stays. So it is called last. Whoever falls asleep
-- behind it is woken: his connection is ended after 10 s.
--
-- Callable by a role that may do nothing else: the owner's rights, and no name that the caller's search_path leads astray.
-- The answer names no exchange: what is handed in to the sidecar besides is a second one, and does not count.
CREATE FUNCTION twiceshy.record_step(run text, token text, step text, output text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '10s'
SET standard_conforming_strings = on
AS $$
DECLARE
    -- Whoever may store larger ones says so: ALTER ROLE … SET twiceshy.payload_max = ….
    size_max constant bigint := coalesce(nullif(current_setting('twiceshy.payload_max', true), ''), '1048576');
    at     timestamptz;
    body   bytea;
    levels text;
    u      record;
    s      record;
BEGIN
    BEGIN
        output := coalesce(output, 'null')::json::text;
    EXCEPTION WHEN data_exception OR statement_too_complex THEN
        RAISE invalid_text_representation USING
            MESSAGE = format('step %s of run %s: its output is not JSON: %s', step, run, SQLERRM),
            HINT = 'Pass the text of one JSON value. Nothing was recorded.';
    END;
    body := convert_to('{"output": ' || output || '}', 'UTF8');
    IF length(body) > size_max THEN
        RAISE program_limit_exceeded USING
            MESSAGE = format('step %s of run %s: its output has %s bytes, more than twiceshy.payload_max (%s)',
                             step, run, length(body), size_max),
            HINT = 'Record where it lies, or SET twiceshy.payload_max. Nothing was recorded.';
    END IF;
    -- Brackets alone, a level taken off at a time: as runtime.payload has it, for readers in other languages.
    levels := regexp_replace(output, '"(\\.|[^"\\])*"|[^][{}"]+', '', 'g');
    FOR _ IN 1..200 LOOP
        EXIT WHEN levels = '';
        levels := regexp_replace(levels, '\[\]|\{\}', '', 'g');
    END LOOP;
    IF levels <> '' THEN
        RAISE program_limit_exceeded USING
            MESSAGE = format('step %s of run %s: its output is nested more than 200 deep', step, run),
            HINT = 'Nothing was recorded.';
    END IF;

    BEGIN
        SELECT r.status, r.token_hash, r.attempt, r.counter INTO u
        FROM twiceshy.run r WHERE r.id = run FOR NO KEY UPDATE;
    EXCEPTION WHEN lock_not_available THEN
        RAISE lock_not_available USING
            MESSAGE = format('step %s of run %s was not recorded: another transaction has had the run for 10 s', step, run),
            HINT = 'Do not keep a transaction open behind twiceshy.record_step. Try this one again.';
    END;
    at := twiceshy.now();
    IF u.token_hash IS NULL OR u.token_hash IS DISTINCT FROM sha256(convert_to(token, 'UTF8')) THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('step %s of run %s was not recorded: the token is not that of the run''s current attempt',
                             step, run),
            HINT = 'Another attempt took the run over, or there is no such run. Roll back; this process should end.';
    ELSIF u.status <> 'running' THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('step %s of run %s was not recorded: the run is %s', step, run, u.status),
            HINT = format('Roll back; this process should end. "twiceshy show %s" tells more.', run);
    END IF;

    SELECT t.kind, t.state, t.place INTO s FROM twiceshy.step t WHERE t.run_id = run AND t.key = step;
    IF s.kind IS NULL OR s.kind <> 'local' THEN
        RAISE no_data_found USING
            MESSAGE = format('run %s has no local step %s', run, step),
            HINT = 'POST http://twiceshy.internal/steps with "transaction": true gives the step''s name.';
    ELSIF s.state = 'answered' THEN
        RAISE unique_violation USING
            MESSAGE = format('step %s of run %s is recorded already', step, run),
            HINT = 'Roll back. GET http://twiceshy.internal/steps/STEP says what was recorded.';
    ELSIF s.state <> 'sent' THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('step %s of run %s was not recorded: it is %s', step, run, s.state),
            HINT = 'POST http://twiceshy.internal/steps gives the permit for it.';
    END IF;

    UPDATE twiceshy.step t SET state = 'answered' WHERE t.run_id = run AND t.key = step;
    INSERT INTO twiceshy.answer (
        run_id, key, n, recorded, attempt, status, reason, headers, body, size, whole, finality, own, recorded_at)
    VALUES (
        run, step, s.place, u.counter + 1, u.attempt, 200, 'OK',
        convert_to(format(E'Content-Type:application/json\r\nContent-Length:%s\r\n', length(body)), 'UTF8'),
        body, length(body), true, 'final', false, at);
    UPDATE twiceshy.run r SET counter = u.counter + 1 WHERE r.id = run;

    IF (SELECT p.setting::bigint NOT BETWEEN 1 AND 10000 FROM pg_settings p
        WHERE p.name = 'idle_in_transaction_session_timeout')
    THEN
        PERFORM set_config('idle_in_transaction_session_timeout', '10s', true);
    END IF;
END
$$;
REVOKE ALL ON FUNCTION twiceshy.record_step(text, text, text, text) FROM PUBLIC;
