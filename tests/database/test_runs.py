"""What a launcher, a person and the command line do with a run."""

import asyncio
from typing import Any

import asyncpg
import pytest

from proxy import cli_runs
from runtime import runs
from runtime.database import connect
from runtime.entries import Conflict, Own, Recorded
from runtime.errors import NotFound, NotNow, UsageError
from runtime.journal import Journal
from runtime.step import Effect, Finality, Kind, RunStatus, State
from tests.database.samples import DOUBTFUL, PROVISIONAL, Scene, answer


async def test_a_run_is_made_once(journal: Journal) -> None:
    async with journal.connection() as connection:
        assert await runs.create(connection, "mine", agent="grocery", input=b'{"a": "\\u0000"}') == "mine"
        assert await runs.create(connection, "mine", agent="other") == "mine"
        row = await runs.get_run(connection, "mine")
        assert (row.agent, row.status, row.input) == ("grocery", RunStatus.QUEUED, b'{"a": "\\u0000"}')
        made = await runs.create(connection, None)
        assert made.startswith("r")
        assert len(made) == 21
        assert made == made.lower()
        for bad in ("", "a b", "a:b", "é", "x" * 201, "a\n"):
            with pytest.raises(UsageError):
                await runs.create(connection, bad)
        with pytest.raises(NotFound):
            await runs.get_run(connection, "yours")
        with pytest.raises(NotFound):
            await runs.claim(connection, "yours", kind="claim", host="h", folder="f", lease=1.0)
        assert [row.id for row in await runs.list_runs(connection)] == [made, "mine"]
        assert await runs.list_runs(connection, status=RunStatus.DONE) == []
    about = await journal.about("mine")
    assert about is not None
    assert about["input"] == b'{"a": "\\u0000"}'


def test_tokens_are_long_and_fit_a_proxys_address() -> None:
    tokens = {runs.new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == 43 and runs.RUN_ID.fullmatch(token) for token in tokens)
    assert len(runs.hash_token("x")) == 32


async def test_only_claimed_runs_are_tokened(journal: Journal) -> None:
    for kind, tokened in (("launcher", True), ("claim", True), ("group", False), ("named", False)):
        async with journal.connection() as connection:
            run_id = await runs.create(connection, None)
            await runs.claim(connection, run_id, kind=kind, host="h", folder="f", lease=30.0, process="1 2 3")
            assert (await runs.get_run(connection, run_id)).tokened is tokened
            last = await runs.last_attempt(connection, run_id)
            assert last is not None
            assert (last.kind, last.process) == (kind, "1 2 3")


# ---- how an attempt ends


@pytest.mark.parametrize(
    ("outcome", "final", "expected"),
    [
        ("done", False, RunStatus.DONE),
        ("failed", False, RunStatus.QUEUED),
        ("died", False, RunStatus.QUEUED),
        ("failed", True, RunStatus.FAILED),
        ("interrupted", True, RunStatus.QUEUED),
        ("handed_over", False, RunStatus.QUEUED),
        ("cancelled", False, RunStatus.CANCELLED),
    ],
)
async def test_an_outcome_decides_of_a_running_run(
    scene: Scene, outcome: str, final: bool, expected: RunStatus
) -> None:
    await scene.step()
    assert await scene.end(outcome, 7, final=final, error="words") is expected
    # The reply was lost: asked again, it says the same.
    assert await scene.end(outcome, 7, final=final, error="words") is expected
    row = await scene.call(runs.get_run)
    assert row.status is expected
    assert (row.ended_at is not None) is expected.ended
    assert row.error == (None if outcome == "done" else "words")
    assert (row.sidecar, row.lease_left) == (None, None)
    attempt = (await scene.call(runs.attempts))[0]
    assert (attempt.outcome, attempt.exit_code) == (outcome, 7)
    assert attempt.ended_at is not None


async def test_the_end_of_a_fenced_attempt_changes_nothing(scene: Scene) -> None:
    after = await scene.again()
    assert await scene.end("done", 0) is None
    assert await scene.status() is RunStatus.RUNNING
    assert await after.end("done", 0) is RunStatus.DONE
    assert await scene.end("failed", 1) is None


async def test_a_stopped_run_stays_stopped_whatever_its_agent_says(scene: Scene) -> None:
    await scene.write(scene.stop(key="s"))
    assert not await scene.journal.put_result(scene.fence, b"1")
    assert await scene.call(runs.renew, scene.fence.token_hash, 30.0) is RunStatus.AMBIGUOUS
    assert await scene.end("done", 0) is RunStatus.AMBIGUOUS
    row = await scene.call(runs.get_run)
    assert (row.status, row.stop_step, row.stop_message) == (RunStatus.AMBIGUOUS, "s", "nobody knows")
    assert (await scene.call(runs.attempts))[0].outcome == "stopped"


async def test_a_result_is_kept_while_the_run_runs(scene: Scene) -> None:
    assert await scene.journal.put_result(scene.fence, b'{"sum": 1e400}')
    await scene.end("done", 0)
    assert not await scene.journal.put_result(scene.fence, b"late")
    assert (await scene.call(runs.get_run)).result == b'{"sum": 1e400}'


# ---- attempts that get nowhere


async def test_barren_counts_deaths_and_failures_without_a_new_step(scene: Scene) -> None:
    async def next_(outcome: str | None) -> int:
        nonlocal scene
        if outcome is not None:
            await scene.end(outcome)
        scene = await scene.again()
        return int((await scene.call(runs.get_run)).barren)

    assert await next_("failed") == 1
    assert await next_(None) == 2  # nobody ended it: it died
    assert await next_("interrupted") == 2
    assert await next_("handed_over") == 2
    assert await next_("failed") == 3
    rows = await scene.journal.load(scene.run_id)
    assert rows is not None
    assert rows.last_failed_barren
    await scene.step(facts=PROVISIONAL)
    assert await next_("failed") == 0
    # The same step, asked once more, is no new one.
    again = await scene.begin(place=0)
    await scene.record(again, PROVISIONAL)
    assert await next_("died") == 1
    assert await scene.write(scene.read()) == Recorded(5, 4)
    assert await next_("died") == 0
    rows = await scene.journal.load(scene.run_id)
    assert rows is not None
    assert not rows.last_failed_barren


async def test_an_attempt_sent_home_by_a_stop_does_not_count(scene: Scene) -> None:
    exchange = await scene.begin()
    await scene.write(scene.stop(exchange))
    await scene.call(runs.resolve, "k", "assume_done")
    # Its launcher has not come round to end it.
    after = await scene.again()
    assert [attempt.outcome for attempt in await scene.call(runs.attempts)] == ["stopped", None]
    assert (await scene.call(runs.get_run)).barren == 0
    assert after.n == 2


# ---- doubt


@pytest.mark.parametrize("final", [False, True])
async def test_a_failure_after_a_doubtful_answer_needs_a_person(scene: Scene, final: bool) -> None:
    await scene.step("fine")
    await scene.step("doubt", facts=DOUBTFUL)
    await scene.step("more", facts=DOUBTFUL)
    assert await scene.end("failed", final=final) is RunStatus.AMBIGUOUS
    assert await scene.end("failed", final=final) is RunStatus.AMBIGUOUS
    row = await scene.call(runs.get_run)
    assert row.stop_step == "doubt"
    assert "500" in (row.stop_message or "")
    assert [await scene.state(key) for key in ("fine", "doubt", "more")] == [
        State.ANSWERED, State.AMBIGUOUS, State.AMBIGUOUS,
    ]  # fmt: skip
    assert await scene.call(runs.resolve, "doubt", "assume_done") is RunStatus.AMBIGUOUS
    row = await scene.call(runs.get_run)
    assert row.stop_step == "more"
    assert "500" in (row.stop_message or "")
    assert await scene.call(runs.resolve, "more", "send_again") is RunStatus.QUEUED
    lines = {step.key: step for step in await scene.call(runs.steps)}
    assert (lines["doubt"].state, lines["doubt"].finality) == (State.ANSWERED, Finality.FINAL)
    assert (lines["more"].state, lines["more"].finality) == (State.NOT_SENT, Finality.DOUBTFUL)
    # Settled is settled: the next failure does not raise it again.
    after = await scene.again()
    assert await after.end("failed") is RunStatus.QUEUED


async def test_a_doubt_that_was_answered_since_is_none(scene: Scene) -> None:
    await scene.step(facts=DOUBTFUL)
    await scene.end("failed")
    await scene.call(runs.resolve, "k", "send_again")
    after = await scene.again()
    exchange = await after.begin(place=0)
    await after.record(exchange)
    assert await after.end("failed") is RunStatus.QUEUED
    assert await scene.statuses() == [200]


async def test_done_and_interrupted_leave_doubts_alone(scene: Scene) -> None:
    await scene.step(facts=DOUBTFUL)
    assert await scene.end("interrupted") is RunStatus.QUEUED
    after = await scene.again()
    assert await after.end("done", 0) is RunStatus.DONE


async def test_a_step_is_shown_with_the_error_that_it_failed_by(scene: Scene) -> None:
    for key, kind, said in (
        ("http", Kind.HTTP, b'{"error": "not ours to read"}'),
        ("done", Kind.LOCAL, b'{"output": {"error": 1}}'),
        ("failed", Kind.LOCAL, b'{"error": "no paper"}'),
        ("raised", Kind.LOCAL, b'{"error": {"type": "ValueError", "message": "no pen"}}'),
        ("odd", Kind.LOCAL, b'{"error": {"code": 7}}'),
        ("child", Kind.CHILD, b'{"run": "r", "status": "failed", "result": null, "error": "no ink"}'),
        ("fine", Kind.CHILD, b'{"run": "r", "status": "done", "result": null, "error": null}'),
    ):
        exchange = await scene.begin(key, own=None if kind is Kind.HTTP else Own(kind, key))
        await scene.record(exchange, answer(said), key)
    assert {step.key: step.error for step in await scene.call(runs.steps)} == {
        "http": None, "done": None, "failed": "no paper", "raised": "ValueError: no pen", "odd": '{"code": 7}',
        "child": "failed: no ink", "fine": None,
    }  # fmt: skip


# ---- resolve


async def test_assume_done_gives_the_answer_to_replay(scene: Scene) -> None:
    exchange = await scene.begin(effect=Effect.AT_MOST_ONCE)
    with pytest.raises(NotNow, match="sent, not ambiguous"):
        await scene.call(runs.resolve, "k", "assume_done")
    await scene.write(scene.stop(exchange))
    with pytest.raises(NotFound):
        await scene.call(runs.resolve, "other", "assume_done")
    with pytest.raises(UsageError):
        await scene.call(runs.resolve, "k", "forget_it")
    status = await scene.call(runs.resolve, "k", "assume_done", status=201, headers=((b"X", b"y"),), body=b'{"id": 1}')
    assert status is RunStatus.QUEUED
    rows = await scene.journal.load(scene.run_id)
    assert rows is not None
    last = rows.steps[0].answers[0]
    assert (last.facts.status, last.facts.reason, last.facts.body) == (201, b"Created", b'{"id": 1}')
    assert (last.facts.own, last.facts.finality, last.recorded) == (True, Finality.FINAL, 2)
    with pytest.raises(NotNow):
        await scene.call(runs.resolve, "k", "assume_done")
    # What truly came, too late, is kept as evidence.
    assert await scene.write(scene.answer(exchange)) == Conflict()
    line = (await scene.call(runs.steps))[0]
    assert str(exchange) in (line.evidence or "")
    assert line.statuses == (201,)


@pytest.mark.parametrize(
    ("given", "acted", "statuses"),
    [
        ({}, False, [200]),
        ({"status": 202, "explicit": True}, False, [202]),
        ({"status": 202}, True, [500]),
        ({"status": 202, "explicit": True}, True, [202]),
        ({}, True, [500]),
    ],
)
async def test_assume_done_takes_the_place_of_an_answer_in_doubt(
    scene: Scene, given: dict[str, Any], acted: bool, statuses: list[int]
) -> None:
    """An agent that fails at a 500 would fail at it for ever. One that went on after it walks as it did."""
    await scene.step("k", facts=DOUBTFUL)
    if acted:
        await scene.step("later")
    await scene.end("failed")
    assert await scene.call(runs.resolve, "k", "assume_done", **given) is RunStatus.QUEUED
    assert await scene.statuses() == statuses
    assert {line.key: line for line in await scene.call(runs.steps)}["k"].finality is Finality.FINAL
    after = await scene.again()
    assert await after.end("failed") is RunStatus.QUEUED


async def test_assume_done_stands_where_the_lost_answer_would(scene: Scene) -> None:
    await scene.step(facts=PROVISIONAL)
    exchange = await scene.begin(place=1)
    await scene.write(scene.stop(exchange))
    await scene.call(runs.resolve, "k", "assume_done")
    assert await scene.statuses() == [503, 200]


async def test_an_old_doubt_is_not_the_outcome_of_what_was_sent_after_it(scene: Scene) -> None:
    await scene.step(facts=DOUBTFUL)
    await scene.end("failed")
    await scene.call(runs.resolve, "k", "send_again")
    after = await scene.again()
    second = await after.begin(place=0)
    await after.write(after.stop(second))
    assert await scene.call(runs.resolve, "k", "assume_done", status=201) is RunStatus.QUEUED
    assert await scene.statuses() == [201]


async def test_send_again_goes_out_when_the_next_attempt_asks(scene: Scene) -> None:
    exchange = await scene.begin()
    await scene.write(scene.stop(exchange))
    assert await scene.call(runs.resolve, "k", "send_again") is RunStatus.QUEUED
    # The launcher of the attempt that was stopped comes round late.
    assert await scene.end("stopped") is RunStatus.QUEUED
    after = await scene.again()
    second = await after.begin()
    await after.record(second)
    assert await scene.write(scene.answer(exchange)) == Conflict()


async def test_a_step_is_named_by_its_key_its_number_or_how_an_open_one_begins(scene: Scene) -> None:
    await scene.step("one")
    exchange = await scene.begin("two")
    await scene.write(scene.stop(exchange, "two"))
    for given in ("two", "2", "tw"):
        assert await scene.call(cli_runs._step, given) == "two"
    assert await scene.call(cli_runs._step, "1") == "one"
    for given in ("3", "0", "on"):
        with pytest.raises(NotFound):
            await scene.call(cli_runs._step, given)


# ---- transactions


async def test_a_cancelled_verb_leaves_its_connection_outside_a_transaction(dsn: str) -> None:
    connection = await connect(dsn, name="test")
    try:
        run_id = await runs.create(connection, None)
        for ticks in range(40):
            verb = runs.claim(connection, run_id, kind="claim", host="h", folder="f", lease=0.001)
            task = asyncio.ensure_future(verb)
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            assert not connection.is_in_transaction()
            assert await connection.fetchval("SELECT 1") == 1
        row = await runs.get_run(connection, run_id)
        assert len(await runs.attempts(connection, run_id)) == row.attempt
    finally:
        await connection.close()


async def test_who_sleeps_inside_a_transaction_loses_it(dsn: str) -> None:
    from runtime.database import transaction

    connection = await connect(dsn, name="test")
    try:
        async with transaction(connection):
            limit = await connection.fetchval("SELECT current_setting('idle_in_transaction_session_timeout')")
        assert limit == "10s"
        assert await connection.fetchval("SELECT current_setting('idle_in_transaction_session_timeout')") != "10s"
        with pytest.raises(asyncpg.PostgresError):
            async with transaction(connection):
                await connection.execute("SELECT 1 / 0")
        assert not connection.is_in_transaction()
    finally:
        await connection.close()
