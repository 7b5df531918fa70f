-- Every statement that Python sends, each under its name and one line of what it is for.
-- What must be one round trip and one transaction stands as a function in migrations/.

-- migration_lock: one process migrates at a time; let go at the transaction's end
SELECT pg_advisory_xact_lock(8461279530427);

-- migration_schema_stands: whether our schema is there
SELECT true FROM pg_namespace WHERE nspname = 'twiceshy';

-- migration_schema: all we own stands in one schema
CREATE SCHEMA twiceshy;

-- migration_table_stands: whether the list of applied migrations is there
SELECT to_regclass('twiceshy.migration') IS NOT NULL;

-- migration_table: which migrations were applied
CREATE TABLE twiceshy.migration (name text PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now());

-- durability: settings without which a commit may be lost with the machine
SELECT s.name, s.setting FROM pg_settings s
WHERE s.name IN ('fsync', 'full_page_writes', 'synchronous_commit') AND s.setting = 'off' ORDER BY s.name;

-- migrations: the applied ones
SELECT name FROM twiceshy.migration;

-- migration_applied: one more
INSERT INTO twiceshy.migration (name) VALUES ($1);

-- installation: the secret, made once
INSERT INTO twiceshy.installation (secret) VALUES ($1) ON CONFLICT DO NOTHING;

-- now: the database's time
SELECT twiceshy.now();

-- write: a batch of entries, committed together (migrations/002_write.sql)
SELECT * FROM twiceshy.write($1::twiceshy.entry[]);

-- ---- a sidecar and its runs

-- bind: the first request of an attempt names the sidecar that it lives with
WITH bound AS (
    UPDATE twiceshy.run u SET sidecar = $3
    WHERE u.id = $1 AND u.token_hash = $2 AND u.status = 'running' AND (u.sidecar IS NULL OR u.sidecar = $3)
    RETURNING u.id, u.attempt
), named AS (
    UPDATE twiceshy.attempt t SET sidecar = $3 FROM bound b WHERE t.run_id = b.id AND t.n = b.attempt
)
SELECT b.attempt FROM bound b;

-- fences: where the runs of some fences stand
SELECT u.id, u.token_hash, u.status, u.sidecar, u.stop_step, u.stop_message, u.attempt, u.uuid, u.continued_as,
       extract(epoch FROM u.lease_expires_at - twiceshy.now())::float8 AS lease_left
FROM twiceshy.run u WHERE u.id = ANY($1::text[]);

-- extend: the leases whose fences hold last longer; a run that somebody has locked is left out
WITH held AS MATERIALIZED (
    SELECT u.id
    FROM unnest($1::text[], $2::bytea[], $3::text[]) f (id, token_hash, sidecar)
    JOIN twiceshy.run u ON u.id = f.id COLLATE "C"
    WHERE u.token_hash = f.token_hash AND u.status = 'running' AND u.sidecar = f.sidecar
    ORDER BY u.id FOR NO KEY UPDATE OF u SKIP LOCKED
)
UPDATE twiceshy.run u SET lease_expires_at = twiceshy.now() + make_interval(secs => $4)
FROM held h WHERE u.id = h.id RETURNING u.id;

-- load_run: a run as its sidecar needs it
SELECT u.uuid, u.agent, u.attempt, u.token_hash, u.status, u.stop_step, u.stop_message, u.sidecar,
       coalesce(u.retried_after = u.attempt - 1, false)
       OR EXISTS (SELECT FROM twiceshy.attempt t WHERE t.run_id = u.id AND t.n = u.attempt - 1 AND t.outcome = 'failed'
                  AND t.counter_at >= u.newest) AS last_failed_barren,
       EXISTS (SELECT FROM twiceshy.attempt t WHERE t.run_id = u.id AND t.n = u.attempt
               AND t.kind NOT IN ('claim', 'group', 'named')) AS owned,
       extract(epoch FROM u.lease_expires_at - twiceshy.now())::float8 AS lease_left,
       twiceshy.now() AS now, pg_postmaster_start_time() AS server_started
FROM twiceshy.run u WHERE u.id = $1;

-- load_steps: its steps, first bytes up to $2 bytes, and until when the sidecars that have exchanges live
SELECT s.key, s.begun, s.attempt, s.kind, s.effect, s.state, s.explicit, s.fingerprint, s.occurrence, s.secondary,
       s.method, s.url, s.exchange, s.sidecar, s.place, s.wire_key, s.request_head, s.rules, s.begun_at, s.subject,
       s.deadline, s.tries,
       CASE WHEN s.state <> 'answered' OR octet_length(s.request_body) <= $2 THEN s.request_body END AS request_body,
       CASE WHEN s.state = 'sent' THEN (
           SELECT c.expires_at FROM twiceshy.sidecar c WHERE c.id = s.sidecar AND c.ended_at IS NULL
       ) END AS sidecar_expires_at
FROM twiceshy.step s
WHERE s.run_id = $1 ORDER BY s.begun;

-- load_answers: their answers, bodies up to $2 bytes
SELECT a.key, a.n, a.recorded, a.attempt, a.status, a.reason, a.headers, a.body_id, a.size, a.whole, a.finality, a.own,
       a.tokens, a.body IS NOT NULL AS inline, CASE WHEN a.size <= $2 THEN a.body END AS body
FROM twiceshy.answer a WHERE a.run_id = $1 ORDER BY a.key, a.n;

-- recorded: what is recorded of some steps, bodies up to $3 bytes
SELECT a.key, a.n, a.recorded, a.attempt, a.status, a.reason, a.headers, a.body_id, a.size, a.whole, a.finality, a.own,
       a.tokens, a.body IS NOT NULL AS inline, CASE WHEN a.size <= $3 THEN a.body END AS body
FROM twiceshy.answer a WHERE a.run_id = $1 AND a.key = ANY($2::text[]);

-- first_request: what went first for a step
SELECT s.kind, s.request_head, s.request_body FROM twiceshy.step s WHERE s.run_id = $1 AND s.key = $2;

-- request_body: the first bytes of a step
SELECT s.request_body FROM twiceshy.step s WHERE s.run_id = $1 AND s.key = $2;

-- request_bodies: the first bytes of some steps
SELECT s.key, s.request_body FROM twiceshy.step s WHERE s.run_id = $1 AND s.key = ANY($2::text[]);

-- small_body: the body of an answer that stands in its row
SELECT a.body, a.size FROM twiceshy.answer a WHERE a.run_id = $1 AND a.key = $2 AND a.n = $3;

-- part_count: how many pieces a body has, and whether they are all there
SELECT count(*) AS parts, coalesce(max(b.part) + 1, 0) AS expected FROM twiceshy.body b WHERE b.run_id = $1 AND b.id = $2;

-- part: one piece of a body
SELECT b.data FROM twiceshy.body b WHERE b.run_id = $1 AND b.id = $2 AND b.part = $3;

-- put_part: one piece more; a repetition brings the same bytes
INSERT INTO twiceshy.body (run_id, id, part, data) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING;

-- drop_body: no answer names these pieces
DELETE FROM twiceshy.body b WHERE b.run_id = $1 AND b.id = $2;

-- save_tape: what an attempt did, as its sidecar saw it
UPDATE twiceshy.attempt t SET tape = $3, replayed = $4, joined = $5, calls_saved = $6, tokens_saved = $7
WHERE t.run_id = $1 AND t.n = $2;

-- about: what a run works on, and how long its history is
SELECT u.agent, u.input, u.continued_from, (SELECT count(*) FROM twiceshy.step s WHERE s.run_id = u.id) AS steps
FROM twiceshy.run u WHERE u.id = $1;

-- ---- sidecars

-- predecessors_end: a new sidecar has the lock of its folder, so those before it are dead
UPDATE twiceshy.sidecar c SET ended_at = twiceshy.now()
WHERE c.host = $1 AND c.folder = $2 AND c.ended_at IS NULL AND c.id <> $3;

-- register: a new sidecar process
INSERT INTO twiceshy.sidecar (id, host, folder, pid, address, expires_at)
VALUES ($1, $2, $3, $4, $5, twiceshy.now() + make_interval(secs => $6))
ON CONFLICT (id) DO UPDATE SET expires_at = excluded.expires_at;

-- secret: keys on the wire are derived from it
SELECT secret FROM twiceshy.installation;

-- heartbeat: a sidecar says that it lives
UPDATE twiceshy.sidecar c SET expires_at = twiceshy.now() + make_interval(secs => $2)
WHERE c.id = $1 AND c.ended_at IS NULL RETURNING c.id;

-- retire: a sidecar ends
UPDATE twiceshy.sidecar c SET ended_at = twiceshy.now() WHERE c.id = $1 AND c.ended_at IS NULL;

-- ---- runs: what launcher, command line and API do. Each verb first locks its run.

-- bounded: whoever falls asleep inside a transaction does not keep its locks
SELECT set_config('idle_in_transaction_session_timeout', '10s', true);

-- create_run: a run, if there is none of that name
INSERT INTO twiceshy.run (id, agent, input) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING;

-- lock_run: the run, which nobody else changes until this transaction ends
SELECT u.* FROM twiceshy.run u WHERE u.id = $1 FOR NO KEY UPDATE;

-- clock: what a lease is judged by, asked after the lock was got
SELECT twiceshy.now() AS now, pg_postmaster_start_time() AS server_started, s.backend_start AS connected
FROM pg_stat_activity s WHERE s.pid = pg_backend_pid();

-- attempt: one attempt
SELECT t.* FROM twiceshy.attempt t WHERE t.run_id = $1 AND t.n = $2;

-- attempts: all attempts of a run
SELECT t.* FROM twiceshy.attempt t WHERE t.run_id = $1 ORDER BY t.n;

-- attempt_ends: an attempt is over; the first end that is written down counts
UPDATE twiceshy.attempt t SET ended_at = twiceshy.now(), outcome = $3, exit_code = $4
WHERE t.run_id = $1 AND t.n = $2 AND t.ended_at IS NULL;

-- claim_attempt: a new attempt
INSERT INTO twiceshy.attempt (run_id, n, token_hash, kind, host, folder, process, counter_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8);

-- claim_run: and its lease
UPDATE twiceshy.run u
SET status = 'running', attempt = $2, token_hash = $3, sidecar = NULL, barren = $4, tokened = u.tokened OR $5,
    lease_expires_at = twiceshy.now() + make_interval(secs => $6), stop_step = NULL, stop_message = NULL,
    changed_at = twiceshy.now()
WHERE u.id = $1;

-- renew_run: the lease lasts longer, while the run is running under this token; none: it is not, or somebody has it locked
UPDATE twiceshy.run u SET lease_expires_at = twiceshy.now() + make_interval(secs => $3)
WHERE u.id = (
    SELECT r.id FROM twiceshy.run r WHERE r.id = $1 AND r.token_hash = $2 AND r.status = 'running'
    FOR NO KEY UPDATE SKIP LOCKED
) RETURNING u.id;

-- standing: how the run of this token stands
SELECT u.status FROM twiceshy.run u WHERE u.id = $1 AND u.token_hash = $2;

-- doubtful_steps: the steps whose last answer does not say whether the effect was made
SELECT s.key, s.method, s.url, a.status
FROM twiceshy.answer a JOIN twiceshy.step s ON s.run_id = a.run_id AND s.key = a.key
WHERE a.run_id = $1 AND a.finality = 'doubtful' AND s.state = 'answered' AND NOT EXISTS (
    SELECT FROM twiceshy.answer later WHERE later.run_id = a.run_id AND later.key = a.key AND later.n > a.n)
ORDER BY s.begun;

-- doubt_step: the attempt failed after such an answer
UPDATE twiceshy.step s SET state = 'ambiguous', evidence = concat_ws(E'\n', s.evidence, $3::text)
WHERE s.run_id = $1 AND s.key = $2 AND s.state = 'answered';

-- end_run: what the run is after its attempt; the token is nobody's any more
UPDATE twiceshy.run u
SET status = $2::text, stop_step = $3, stop_message = $4, token_hash = NULL, sidecar = NULL, lease_expires_at = NULL,
    error = CASE $2::text WHEN 'done' THEN NULL ELSE coalesce($5, u.error) END,
    ended_at = CASE WHEN $2::text IN ('done', 'failed', 'cancelled') THEN twiceshy.now() END, changed_at = twiceshy.now(),
    not_before = coalesce(twiceshy.now() + make_interval(secs => $6), u.not_before)
WHERE u.id = $1;

-- put_result: the result of a run that is running under this token
UPDATE twiceshy.run u SET result = $3 WHERE u.id = $1 AND u.token_hash = $2 AND u.status = 'running' RETURNING u.id;

-- step: one step, with its last answer's place and finality, whether its last exchange brought it, and was acted on
SELECT s.key, s.state, s.place, s.method, s.url, a.n AS last_n, a.finality AS last_finality,
    a.exchange = s.exchange AS last_is_newest,
    EXISTS (
        SELECT FROM twiceshy.step t WHERE t.run_id = s.run_id AND t.begun > a.recorded AND t.effect <> 'read'
    ) AS acted_on
FROM twiceshy.step s LEFT JOIN LATERAL (
    SELECT a.n, a.finality, a.exchange, a.recorded FROM twiceshy.answer a WHERE a.run_id = s.run_id AND a.key = s.key ORDER BY a.n DESC LIMIT 1
) a ON true
WHERE s.run_id = $1 AND s.key = $2;

-- settle_step: a person has said what happened
UPDATE twiceshy.step s SET state = $3, evidence = concat_ws(E'\n', s.evidence, $4::text)
WHERE s.run_id = $1 AND s.key = $2 AND s.state = 'ambiguous';

-- settle_answer: the answer in doubt is the outcome
UPDATE twiceshy.answer a SET finality = 'final' WHERE a.run_id = $1 AND a.key = $2 AND a.n = $3;

-- own_answer: what a person says that the answer was
INSERT INTO twiceshy.answer (run_id, key, n, recorded, attempt, status, reason, headers, body, size, whole, finality, own)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, length($9::bytea), true, 'final', true)
ON CONFLICT ON CONSTRAINT answer_pkey DO UPDATE SET
    recorded = excluded.recorded, exchange = NULL, attempt = excluded.attempt, status = excluded.status,
    reason = excluded.reason, headers = excluded.headers, body = excluded.body, body_id = NULL, size = excluded.size,
    whole = true, finality = 'final', own = true, tokens = 0, recorded_at = twiceshy.now();

-- count_run: the counter after an answer of one's own
UPDATE twiceshy.run u SET counter = $2 WHERE u.id = $1;

-- cancel_run: the run ends, and its attempt with it; the token stays, so that who has it hears why it is refused
WITH ended AS (
    UPDATE twiceshy.run u
    SET status = 'cancelled', stop_step = NULL, stop_message = NULL, wake_at = NULL, wake_on = NULL,
        ended_at = twiceshy.now(), changed_at = twiceshy.now()
    WHERE u.id = $1 RETURNING u.id, u.attempt
)
UPDATE twiceshy.attempt t SET ended_at = twiceshy.now(), outcome = 'cancelled'
FROM ended e WHERE t.run_id = e.id AND t.n = e.attempt AND t.ended_at IS NULL;

-- retry_run: an ended or stopped run is open again; what it is now, "settled" says
UPDATE twiceshy.run u
SET status = 'ambiguous', stop_step = NULL, stop_message = 'it is tried again', token_hash = NULL, sidecar = NULL,
    lease_expires_at = NULL, error = NULL, ended_at = NULL, barren = 0, not_before = twiceshy.now(),
    retried_after = u.attempt, changed_at = twiceshy.now()
WHERE u.id = $1;

-- unbuilt_ends: what came of local steps and of children with nothing begun after it but reads
SELECT s.key, s.kind, a.n, a.body
FROM twiceshy.step s JOIN LATERAL (
    SELECT b.n, b.body, b.recorded, b.finality FROM twiceshy.answer b
    WHERE b.run_id = s.run_id AND b.key = s.key ORDER BY b.n DESC LIMIT 1) a ON true
WHERE s.run_id = $1 AND s.kind IN ('local', 'child') AND s.state = 'answered' AND a.finality = 'final' AND NOT EXISTS (
    SELECT FROM twiceshy.step later
    WHERE later.run_id = s.run_id AND later.begun > a.recorded AND later.effect <> 'read')
ORDER BY s.begun;

-- reopen_end: an answer of a step is not its last word, and the step is tried anew
WITH reopened AS (
    UPDATE twiceshy.answer a SET finality = 'provisional' WHERE a.run_id = $1 AND a.key = $2 AND a.n = $3
    RETURNING a.run_id, a.key)
UPDATE twiceshy.step s SET tries = 0 FROM reopened r WHERE s.run_id = r.run_id AND s.key = r.key;

-- settled: the run after one of its ambiguous steps was settled
SELECT twiceshy.settled($1);

-- ---- forks (runtime/forks.py). Steps keep their numbers, and are of no attempt of the new run.

-- fork_steps: the steps of a run, and the last answer of each
SELECT s.key, s.begun, s.kind, s.effect, s.state, s.method, s.url, s.subject, a.finality, a.recorded
FROM twiceshy.step s LEFT JOIN LATERAL (
    SELECT a.finality, a.recorded FROM twiceshy.answer a WHERE a.run_id = s.run_id AND a.key = s.key
    ORDER BY a.n DESC LIMIT 1
) a ON true
WHERE s.run_id = $1 ORDER BY s.begun;

-- fork_run: a run like another one, if there is none of that name. Its uuid is new, and so are its keys
INSERT INTO twiceshy.run (id, agent, input, priority, for_workers, counter, newest)
SELECT $2, u.agent, u.input, u.priority, u.for_workers, $3, $4 FROM twiceshy.run u WHERE u.id = $1
ON CONFLICT DO NOTHING RETURNING id;

-- copy_steps: some steps of a run, for another one
INSERT INTO twiceshy.step (
    run_id, key, begun, attempt, kind, effect, state, explicit, fingerprint, occurrence, secondary, method, url, exchange,
    sidecar, place, wire_key, request_head, request_body, rules, begun_at, sent_at, evidence, subject, deadline, tries)
SELECT $2, s.key, s.begun, 0, s.kind, s.effect, s.state, s.explicit, s.fingerprint, s.occurrence, s.secondary, s.method,
       s.url, s.exchange, s.sidecar, s.place, s.wire_key, s.request_head, s.request_body, s.rules, s.begun_at, s.sent_at,
       s.evidence, s.subject, s.deadline, s.tries
FROM twiceshy.step s WHERE s.run_id = $1 AND s.key = ANY($3::text[]);

-- copy_answers: their answers. The last of each is the outcome: nothing of it is asked again
INSERT INTO twiceshy.answer (
    run_id, key, n, recorded, exchange, attempt, status, reason, headers, body, body_id, size, whole, finality, own,
    tokens, recorded_at)
SELECT $2, a.key, a.n, a.recorded, a.exchange, 0, a.status, a.reason, a.headers, a.body, a.body_id, a.size, a.whole,
       CASE WHEN EXISTS (
           SELECT FROM twiceshy.answer later WHERE later.run_id = a.run_id AND later.key = a.key AND later.n > a.n
       ) THEN a.finality ELSE 'final' END, a.own, a.tokens, a.recorded_at
FROM twiceshy.answer a WHERE a.run_id = $1 AND a.key = ANY($3::text[]);

-- copy_bodies: and their bodies
INSERT INTO twiceshy.body (run_id, id, part, data)
SELECT $2, b.id, b.part, b.data FROM twiceshy.body b
WHERE b.run_id = $1 AND b.id IN (
    SELECT a.body_id FROM twiceshy.answer a WHERE a.run_id = $1 AND a.key = ANY($3::text[]));

-- copy_events: the events that they took
INSERT INTO twiceshy.event (run_id, name, id, sent, payload, at, consumed_by)
SELECT $2, v.name, v.id, v.sent, v.payload, v.at, v.consumed_by
FROM twiceshy.event v WHERE v.run_id = $1 AND v.consumed_by = ANY($3::text[]);

-- copy_approvals: what was decided for them
INSERT INTO twiceshy.approval (run_id, id, name, asked_at, deadline, decision, decided_by, comment, at)
SELECT $2, p.id, p.name, p.asked_at, p.deadline, p.decision, p.decided_by, p.comment, p.at
FROM twiceshy.approval p WHERE p.run_id = $1 AND p.id = ANY($3::text[]);

-- copy_attributes: what was said of a run
INSERT INTO twiceshy.attribute (run_id, name, value, created_at)
SELECT $2, t.name, t.value, u.created_at
FROM twiceshy.attribute t JOIN twiceshy.run u ON u.id = $2 WHERE t.run_id = $1;

-- ---- the queue

-- start_once: a start under a key; none: the key was used
INSERT INTO twiceshy.start (key, run_id, digest) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING RETURNING run_id;

-- started: what was started under a key
SELECT s.run_id, s.digest FROM twiceshy.start s WHERE s.key = $1;

-- forget_starts: keys whose runs, and whatever continued them, have long ended; some at a time
DELETE FROM twiceshy.start s WHERE s.key = ANY(ARRAY(
    SELECT o.key FROM twiceshy.start o
    WHERE o.at < (SELECT twiceshy.now()) - make_interval(secs => $1) AND coalesce(
        (SELECT coalesce(u.ended_at, 'infinity') FROM twiceshy.run u WHERE u.id = twiceshy.newest(o.run_id)), '-infinity'
    ) < (SELECT twiceshy.now()) - make_interval(secs => $1)
    ORDER BY o.at LIMIT $2 FOR UPDATE SKIP LOCKED))
RETURNING s.key;

-- enqueue: a run for workers, if there is none of that name
INSERT INTO twiceshy.run (id, agent, input, priority, for_workers) VALUES ($1, $2, $3, $4, true)
ON CONFLICT DO NOTHING RETURNING id;

-- add_attributes: what is said of a new run
INSERT INTO twiceshy.attribute (run_id, name, value, created_at)
SELECT u.id, t.name, t.value, u.created_at
FROM twiceshy.run u, unnest($2::text[], $3::text[]) t (name, value) WHERE u.id = $1;

-- hint: whoever listens need not wait for its next look
SELECT pg_notify('twiceshy_queue', $1);

-- next_queued: the run that some agents' worker does next; one that somebody else is taking is passed over
SELECT u.id, u.agent FROM twiceshy.run u
WHERE u.status = 'queued' AND u.for_workers AND u.agent = ANY($1::text[]) AND u.not_before <= (SELECT twiceshy.now())
ORDER BY u.priority DESC, u.not_before LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED;

-- next_silent: a run that workers do, and whose lease is over
SELECT u.*, t.kind, t.host, t.folder, t.counter_at
FROM twiceshy.run u JOIN twiceshy.attempt t ON t.run_id = u.id AND t.n = u.attempt
WHERE u.status = 'running' AND u.for_workers AND u.lease_expires_at < (SELECT twiceshy.now())
ORDER BY u.lease_expires_at LIMIT 1 FOR NO KEY UPDATE OF u SKIP LOCKED;

-- next_of_the_dead: a run whose attempt is one of some workers on this host
SELECT u.*, t.kind, t.host, t.folder, t.counter_at
FROM twiceshy.run u JOIN twiceshy.attempt t ON t.run_id = u.id AND t.n = u.attempt
WHERE u.status = 'running' AND u.for_workers AND t.kind = 'worker' AND t.host = $1 AND t.folder = $2
  AND t.process = ANY($3::text[])
LIMIT 1 FOR NO KEY UPDATE OF u SKIP LOCKED;

-- any_of_the_dead: whether there is such a run, free or just being taken
SELECT EXISTS (
    SELECT FROM twiceshy.run u JOIN twiceshy.attempt t ON t.run_id = u.id AND t.n = u.attempt
    WHERE u.status = 'running' AND u.for_workers AND t.kind = 'worker' AND t.host = $1 AND t.folder = $2
      AND t.process = $3);

-- ---- waits

-- send_event: an event for a run (migrations/007_chain.sql)
SELECT * FROM twiceshy.send_event($1, $2, $3, $4);

-- park: an attempt gives its place up until something that it waits for is due (migrations/007_chain.sql)
SELECT * FROM twiceshy.park($1, $2, $3, $4::text[]);

-- save_progress: how far a local step has come, said by who has its permit; none: somebody else has, or it is over
UPDATE twiceshy.step s SET progress = coalesce($5, s.progress) FROM twiceshy.run u
WHERE s.run_id = $1 AND s.key = $2 AND s.exchange = $3 AND s.kind = 'local' AND s.state = 'sent'
  AND u.id = $1 AND u.token_hash = $4 AND u.status = 'running'
RETURNING s.key;

-- progress: how far a local step has come
SELECT s.progress FROM twiceshy.step s WHERE s.run_id = $1 AND s.key = $2;

-- wake: parked runs whose time has come are queued again; those that wait for an event are by who sends it
WITH due AS MATERIALIZED (
    SELECT u.id FROM twiceshy.run u WHERE u.status = 'parked' AND u.wake_at <= (SELECT twiceshy.now())
    ORDER BY u.wake_at LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE twiceshy.run u SET status = 'queued', wake_at = NULL, wake_on = NULL, changed_at = twiceshy.now()
FROM due d WHERE u.id = d.id RETURNING u.id;

-- waiting: some steps that wait under their exchanges: the deadline, how far it is, and the event that is theirs to
-- take, or what was decided, or how the child ended
WITH open AS MATERIALIZED (
    SELECT s.run_id, s.key, s.exchange, s.kind, s.subject, s.deadline, twiceshy.now() AS now,
           row_number() OVER (PARTITION BY s.run_id, s.kind, s.subject ORDER BY s.begun) - 1 AS ahead
    FROM unnest($1::text[], $2::text[], $3::uuid[]) w (run_id, key, exchange)
    JOIN twiceshy.step s ON s.run_id = w.run_id COLLATE "C" AND s.key = w.key COLLATE "C" AND s.exchange = w.exchange
    WHERE s.state = 'sent'
)
SELECT o.exchange, o.key, o.subject AS name, o.deadline, extract(epoch FROM o.deadline - o.now)::float8 AS left,
       e.id, e.payload, e.at, p.decision, p.decided_by, p.comment, p.at AS decided_at, c.status, c.result, c.error
FROM open o
LEFT JOIN twiceshy.run c
    ON o.kind = 'child' AND c.id = twiceshy.newest(o.subject) AND c.status IN ('done', 'failed', 'cancelled')
LEFT JOIN twiceshy.approval p
    ON o.kind = 'approval' AND p.run_id = o.run_id AND p.id = o.key AND p.decision <> 'timeout'
LEFT JOIN LATERAL (
    SELECT v.id, v.payload, v.at FROM twiceshy.event v
    WHERE o.kind = 'wait' AND v.run_id = o.run_id AND v.name = o.subject COLLATE "C" AND v.consumed_by IS NULL
      AND (o.deadline IS NULL OR v.at <= o.deadline)
    ORDER BY v.sent LIMIT 1 OFFSET o.ahead
) e ON true;

-- wake_parents: parked runs whose child has ended are queued (migrations/007_chain.sql)
SELECT twiceshy.wake_parents() AS id;

-- wake_run: a parked run is queued: something that it waits for is here
UPDATE twiceshy.run u SET status = 'queued', wake_at = NULL, wake_on = NULL, changed_at = twiceshy.now()
WHERE u.id = $1;

-- start_child: a run that another one starts, once (migrations/007_chain.sql)
SELECT twiceshy.start_child($1, $2, $3, $4, $5, $6, $7);

-- is_child: whether a run, the first of its chain, was started by this one or by one that this continues
SELECT true FROM twiceshy.run c
WHERE c.id = $2 AND c.first_run IS NULL
  AND (SELECT coalesce(p.first_run, p.id) FROM twiceshy.run p WHERE p.id = c.parent)
    = (SELECT coalesce(u.first_run, u.id) FROM twiceshy.run u WHERE u.id = $1);

-- children: those of a run, and of the runs that it continues or that continue it, that have not ended
SELECT c.id
FROM twiceshy.run u
JOIN LATERAL (
    SELECT u.id UNION SELECT u.first_run WHERE u.first_run IS NOT NULL
    UNION SELECT r.id FROM twiceshy.run r WHERE r.first_run = coalesce(u.first_run, u.id)
) p (id) ON true
JOIN twiceshy.run c ON c.parent = p.id
WHERE u.id = $1 AND c.status NOT IN ('done', 'failed', 'cancelled') ORDER BY c.id;

-- continue_as_new: a run is done, and goes on as another one (migrations/007_chain.sql)
SELECT * FROM twiceshy.continue_as_new($1, $2, $3, $4, $5);

-- successor: as whom the run of this token goes on
SELECT u.continued_as FROM twiceshy.run u WHERE u.id = $1 AND u.token_hash = $2;

-- newest: the newest run of a chain (migrations/007_chain.sql)
SELECT twiceshy.newest($1);

-- approvals_named: of the approvals of a run the one with this id, and those of this name
SELECT p.id AS key, p.name, p.decision, p.decided_by, p.comment, p.at AS decided_at, p.deadline
FROM twiceshy.approval p WHERE p.run_id = $1 AND (p.id = $2 OR p.name = $2) ORDER BY p.asked_at, p.id;

-- decide: an approval, if nobody has and it is not too late
UPDATE twiceshy.approval p SET decision = $3, decided_by = $4, comment = $5, at = twiceshy.now()
WHERE p.run_id = $1 AND p.id = $2 AND p.decision IS NULL AND (p.deadline IS NULL OR p.deadline >= twiceshy.now())
RETURNING p.at;

-- open_approvals: those that can be decided, the oldest first; of one run and one name or of any, behind a place
SELECT p.run_id, p.id, p.name, p.asked_at, p.deadline, s.request_body
FROM twiceshy.approval p
JOIN twiceshy.run u ON u.id = p.run_id
JOIN twiceshy.step s ON s.run_id = p.run_id AND s.key = p.id
WHERE p.decision IS NULL AND (p.deadline IS NULL OR p.deadline >= (SELECT twiceshy.now()))
  AND u.status NOT IN ('done', 'failed', 'cancelled')
  AND ($1::text IS NULL OR p.run_id = $1) AND ($2::text IS NULL OR p.name = $2)
  AND ($4::timestamptz IS NULL OR (p.asked_at, p.run_id, p.id) > ($4, $5::text, $6::text))
ORDER BY p.asked_at, p.run_id, p.id LIMIT $3;

-- ---- for people

-- run: one run
SELECT u.*, extract(epoch FROM u.lease_expires_at - twiceshy.now())::float8 AS lease_left,
       (SELECT json_object_agg(a.name, a.value)::text FROM twiceshy.attribute a WHERE a.run_id = u.id) AS attributes
FROM twiceshy.run u WHERE u.id = $1;

-- custom_plans: what is asked in this transaction is planned for the values that it is asked with
SELECT set_config('plan_cache_mode', 'force_custom_plan', true);

-- run_line: one run, without input and result
SELECT u.id, u.uuid, u.agent, u.status, NULL::bytea AS input, NULL::bytea AS result, u.error, u.attempt, u.sidecar, u.counter,
       u.newest, u.tokened, u.barren, u.for_workers, u.priority, u.not_before, u.stop_step, u.stop_message, u.created_at,
       u.changed_at, u.ended_at, u.wake_at, u.wake_on, u.parent, u.continued_from, u.continued_as,
       extract(epoch FROM u.lease_expires_at - twiceshy.now())::float8 AS lease_left,
       (SELECT json_object_agg(a.name, a.value)::text FROM twiceshy.attribute a WHERE a.run_id = u.id) AS attributes
FROM twiceshy.run u WHERE u.id = $1;

-- runs: the newest runs behind a place in the list, of one status, agent, span of time, or of any
SELECT u.id, u.uuid, u.agent, u.status, NULL::bytea AS input, NULL::bytea AS result, u.error, u.attempt, u.sidecar, u.counter,
       u.newest, u.tokened, u.barren, u.for_workers, u.priority, u.not_before, u.stop_step, u.stop_message, u.created_at,
       u.changed_at, u.ended_at, u.wake_at, u.wake_on, u.parent, u.continued_from, u.continued_as,
       extract(epoch FROM u.lease_expires_at - twiceshy.now())::float8 AS lease_left,
       (SELECT json_object_agg(a.name, a.value)::text FROM twiceshy.attribute a WHERE a.run_id = u.id) AS attributes
FROM twiceshy.run u
WHERE ($1::text IS NULL OR u.status = $1) AND ($2::text IS NULL OR u.agent = $2)
  AND ($3::timestamptz IS NULL OR u.created_at >= $3) AND ($4::timestamptz IS NULL OR u.created_at < $4)
  AND ($5::timestamptz IS NULL OR (u.created_at, u.id) < ($5, $6::text COLLATE "C"))
ORDER BY u.created_at DESC, u.id DESC LIMIT $7;

-- runs_of_attributes: the same, of those that have all of some attributes; found by the first of these
SELECT u.id, u.uuid, u.agent, u.status, NULL::bytea AS input, NULL::bytea AS result, u.error, u.attempt, u.sidecar, u.counter,
       u.newest, u.tokened, u.barren, u.for_workers, u.priority, u.not_before, u.stop_step, u.stop_message, u.created_at,
       u.changed_at, u.ended_at, u.wake_at, u.wake_on, u.parent, u.continued_from, u.continued_as,
       extract(epoch FROM u.lease_expires_at - twiceshy.now())::float8 AS lease_left,
       (SELECT json_object_agg(a.name, a.value)::text FROM twiceshy.attribute a WHERE a.run_id = u.id) AS attributes
FROM twiceshy.attribute w JOIN twiceshy.run u ON u.id = w.run_id
WHERE w.name = ($8::text[])[1] AND w.value = ($9::text[])[1]
  AND ($3::timestamptz IS NULL OR w.created_at >= $3) AND ($4::timestamptz IS NULL OR w.created_at < $4)
  AND ($5::timestamptz IS NULL OR (w.created_at, w.run_id) < ($5, $6::text COLLATE "C"))
  AND ($1::text IS NULL OR u.status = $1) AND ($2::text IS NULL OR u.agent = $2)
  AND NOT EXISTS (
    SELECT FROM unnest($8::text[], $9::text[]) t (name, value) WHERE NOT EXISTS (
        SELECT FROM twiceshy.attribute b WHERE b.run_id = w.run_id AND b.name = t.name AND b.value = t.value))
ORDER BY w.created_at DESC, w.run_id DESC LIMIT $7;

-- steps: the steps of a run, with the statuses of their answers, and how local steps and children ended
SELECT s.key, s.begun, s.attempt, s.kind, s.effect, s.state, s.method, s.url, s.wire_key, s.sidecar, s.begun_at,
       s.sent_at, s.subject, s.deadline, s.evidence, coalesce(a.statuses, '{}') AS statuses, a.finality,
       coalesce(a.tokens, 0) AS tokens,
       CASE WHEN s.kind IN ('local', 'child') AND s.state = 'answered' THEN (
           SELECT CASE WHEN octet_length(b.body) <= 16384 THEN b.body END FROM twiceshy.answer b
           WHERE b.run_id = s.run_id AND b.key = s.key ORDER BY b.n DESC LIMIT 1
       ) END AS "end"
FROM twiceshy.step s LEFT JOIN (
    SELECT a.key, array_agg(a.status ORDER BY a.n) AS statuses, (array_agg(a.finality ORDER BY a.n DESC))[1] AS finality,
           sum(a.tokens)::bigint AS tokens
    FROM twiceshy.answer a WHERE a.run_id = $1 GROUP BY a.key
) a ON a.key = s.key
WHERE s.run_id = $1 ORDER BY s.begun;

-- open_exchanges: how many exchanges of a run living sidecars still have
SELECT count(*) FROM twiceshy.step s JOIN twiceshy.sidecar c ON c.id = s.sidecar
WHERE s.run_id = $1 AND s.kind = 'http' AND s.state = 'sent' AND c.ended_at IS NULL AND c.expires_at >= twiceshy.now();

-- ---- the API

-- make_key: a new key of the API
INSERT INTO twiceshy.api_key (id, digest) VALUES ($1, $2);

-- api_key: what is kept of a key of the API
SELECT k.digest FROM twiceshy.api_key k WHERE k.id = $1;

-- watched: how some runs stand that somebody waits for
SELECT u.id, u.status, u.counter, u.attempt, u.changed_at FROM twiceshy.run u WHERE u.id = ANY($1::text[]);

-- events: some events of a run behind a place, in the order in which they came
SELECT v.name, v.id, v.payload, v.at, v.consumed_by, v.sent FROM twiceshy.event v
WHERE v.run_id = $1 AND v.sent > $2 ORDER BY v.sent LIMIT $3;

-- alive: whether the tables can be read
SELECT true FROM twiceshy.installation;

-- journal: some steps of a run behind a place, in the order in which they began
SELECT * FROM (
    SELECT s.key, s.begun, row_number() OVER (ORDER BY s.begun) AS n, s.attempt, s.kind, s.effect, s.state, s.method, s.url,
           s.subject, s.begun_at, s.deadline, s.evidence
    FROM twiceshy.step s WHERE s.run_id = $1
) s WHERE s.begun > $2 ORDER BY s.begun LIMIT $3;

-- journal_answers: the answers of some steps, with the beginnings of their bodies
SELECT a.key, a.n, a.attempt, a.status, a.headers, a.size, a.whole, a.finality, a.own, a.tokens, a.recorded_at,
       substring(coalesce(a.body, (
           SELECT b.data FROM twiceshy.body b WHERE b.run_id = a.run_id AND b.id = a.body_id AND b.part = 0
       )) FROM 1 FOR $3) AS beginning
FROM twiceshy.answer a WHERE a.run_id = $1 AND a.key = ANY($2::text[]) ORDER BY a.key, a.n;

-- tail: what a run's counter has counted since a place: steps begun, answers recorded, events sent
SELECT t.place, t.what, t.key, t.attempt, t.kind, t.name, t.method, t.url, t.effect, t.status, t.finality, t.tokens, t.at
FROM (
    SELECT s.begun AS place, 'step' AS what, s.key, s.attempt, s.kind::text AS kind, s.subject AS name, s.method, s.url,
           s.effect::text AS effect, NULL::int AS status, NULL AS finality, NULL::bigint AS tokens, s.begun_at AS at
    FROM twiceshy.step s WHERE s.run_id = $1 AND s.begun > $2
    UNION ALL
    SELECT a.recorded, 'answer', a.key, a.attempt, NULL, NULL, NULL, NULL, NULL, a.status::int, a.finality::text, a.tokens,
           a.recorded_at
    FROM twiceshy.answer a WHERE a.run_id = $1 AND a.recorded > $2
    UNION ALL
    SELECT v.sent, 'event', v.id, NULL, NULL, v.name, NULL, NULL, NULL, NULL, NULL, NULL, v.at
    FROM twiceshy.event v WHERE v.run_id = $1 AND v.sent > $2
) t ORDER BY t.place LIMIT $3;

-- patient: how long a count may take, in this transaction
SELECT set_config('statement_timeout', $1, true);

-- stats_of_runs: how many runs stand how
SELECT u.status, count(*) AS n FROM twiceshy.run u
WHERE $1::timestamptz IS NULL OR u.created_at >= $1 GROUP BY u.status;

-- stats_of_attempts: what attempts did, and how many took up what an attempt before them had left
SELECT count(*) AS attempts, coalesce(sum(t.replayed), 0)::bigint AS replayed, coalesce(sum(t.joined), 0)::bigint AS joined,
       coalesce(sum(t.calls_saved), 0)::bigint AS calls_saved, coalesce(sum(t.tokens_saved), 0)::bigint AS tokens_saved,
       count(b.n) AS recoveries
FROM twiceshy.attempt t LEFT JOIN twiceshy.attempt b
    ON b.run_id = t.run_id AND b.n = t.n - 1 AND b.outcome IN ('died', 'failed', 'interrupted', 'handed_over')
WHERE $1::timestamptz IS NULL OR t.started_at >= $1;

-- stats_of_answers: how many answers of models there were, and what they took
SELECT count(*) AS calls, coalesce(sum(a.tokens), 0)::bigint AS tokens FROM twiceshy.answer a
WHERE a.tokens > 0 AND ($1::timestamptz IS NULL OR a.recorded_at >= $1);
