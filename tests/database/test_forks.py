"""A fork has what the other run had before a step: nothing of it is asked again, and nothing else is there."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from runtime import events, queue, runs, verbs
from runtime.entries import Answer, Own
from runtime.errors import NotFound, NotNow, Taken, UsageError
from runtime.forks import ForkStep, divide
from runtime.journal import Journal
from runtime.step import Effect, Finality, Kind, RunStatus, State
from tests.database.samples import DOUBTFUL, PROVISIONAL, Scene, answer, claim


def step(n: int, **more: Any) -> ForkStep:
    given: dict[str, Any] = {
        "n": n, "key": f"k{n}", "shown": "POST /", "begun": 10 * n, "effect": Effect.AT_MOST_ONCE,
        "state": State.ANSWERED, "finality": Finality.FINAL, "recorded": 10 * n + 1,
    }  # fmt: skip
    return ForkStep(**given | more)


def test_every_place_between_steps() -> None:
    steps = [step(1), step(2), step(3)]
    for before in range(1, 5):
        replayed, sent = divide("r", steps, before)
        assert (len(replayed), [*replayed, *sent]) == (before - 1, steps)
    for before in (-1, 0, 5):
        with pytest.raises(UsageError, match="1 to 4"):
            divide("r", steps, before)


@pytest.mark.parametrize("open_", [
    {"state": State.SENT, "finality": None}, {"state": State.AMBIGUOUS}, {"state": State.NOT_SENT},
    {"finality": Finality.PROVISIONAL}, {"finality": Finality.DOUBTFUL},
])  # fmt: skip
def test_what_is_open_is_not_replayed(open_: dict[str, Any]) -> None:
    steps = [step(1), step(2, recorded=99, **open_), step(3)]
    divide("r", steps, 2)
    for before in (3, 4):
        with pytest.raises(NotNow, match="--before 2"):
            divide("r", steps, before)


def test_what_was_gone_on_from_is_history() -> None:
    failed = step(1, finality=Finality.DOUBTFUL)
    divide("r", [failed, step(2)], 3)
    with pytest.raises(NotNow):
        divide("r", [failed, step(2)], 2)
    with pytest.raises(NotNow):
        divide("r", [failed, step(2, effect=Effect.READ)], 3)


async def fork(scene: Scene, before: int, **more: Any) -> Scene:
    made = await scene.call(verbs.fork, before=before, **more)
    return await claim(scene.journal, made.run)


def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: {name: value for name, value in row.items() if name not in names}


async def table(scene: Scene, name: str, order: str) -> list[dict[str, Any]]:
    async with scene.journal.connection() as connection:
        rows = await connection.fetch(f"SELECT * FROM twiceshy.{name} WHERE run_id = $1 ORDER BY {order}", scene.run_id)
        return [dict(row) for row in rows]


async def test_all_of_a_step_is_copied(journal: Journal, scene: Scene) -> None:
    body = await scene.begin("large")
    name = uuid4()
    for part in range(3):
        await journal.put_part(scene.run_id, name, part, bytes([part]) * 100)
    await scene.record(body, answer(None, body_id=name, size=300), "large")
    await events_for(scene, "go", "stop")
    wait = await scene.begin("wait", Effect.REPEATABLE, own=Own(Kind.WAIT, "go"))
    await scene.write(Answer(scene.run_id, "wait", wait, scene.n, answer(), event="go-1"))
    approval = await scene.begin(
        "ok", Effect.REPEATABLE, own=Own(Kind.APPROVAL, "pay", until=datetime(2030, 1, 1, tzinfo=UTC))
    )
    await scene.record(approval, answer(), "ok")
    first = await scene.begin("twice")
    await scene.record(first, PROVISIONAL, "twice")
    await scene.record(await scene.begin("twice", place=1), DOUBTFUL, "twice")
    await scene.step("last")
    await scene.begin("open")

    forked = await fork(scene, 6)
    gone = without("run_id", "attempt")
    for name_, order in (
        ("step", "begun"),
        ("answer", "key, n"),
        ("approval", "id"),
        ("event", "id"),
        ("body", "part"),
    ):
        theirs, ours = await table(scene, name_, order), await table(forked, name_, order)
        if name_ == "step":
            theirs = theirs[:-1]
        if name_ == "event":
            theirs = [row for row in theirs if row["consumed_by"]]
        assert ours
        if name_ == "answer":
            for row in theirs:
                if (row["key"], row["n"]) == ("twice", 1):
                    row["finality"] = "final"
        assert [*map(gone, ours)] == [*map(gone, theirs)], name_
        assert {row.get("attempt", 0) for row in ours} == {0}
    tape = await journal.load(forked.run_id)
    old = await journal.load(scene.run_id)
    assert tape is not None
    assert old is not None
    assert (tape.attempt, tape.last_failed_barren, tape.uuid != old.uuid) == (1, False, True)
    attempt = await forked.call(runs.last_attempt)
    assert attempt.counter_at == max(answer.recorded for step in tape.steps for answer in step.answers)
    await forked.step("more")
    assert (await forked.call(runs.get_run)).newest > attempt.counter_at


async def events_for(scene: Scene, *names: str) -> None:
    async with scene.journal.connection() as connection:
        for name in names:
            await events.send(connection, scene.run_id, name, b"{}", f"{name}-1", limit=1000)


async def test_the_run_is_taken_over(journal: Journal) -> None:
    async with journal.connection() as connection:
        started = await queue.start(
            connection, "refunds", b'{"n": 1}', run_id="source", priority=7, attributes={"tenant": "acme"}
        )
        assert started == "source"
    scene = await claim(journal, "source")
    await scene.step("k")
    with pytest.raises(Taken, match="run source is there already"):
        await scene.call(verbs.fork, before=1, run_id="source")
    preview = await scene.call(verbs.fork, before=2, preview=True)
    assert (preview.run, [each.key for each in preview.replayed], preview.sent) == (None, ["k"], ())
    made = await scene.call(verbs.fork, before=2, run_id="forked")
    assert made.run == "forked"
    async with journal.connection() as connection:
        row = await runs.get_run(connection, "forked")
        assert (row.status, row.agent, row.input, row.priority) == (RunStatus.QUEUED, "refunds", b'{"n": 1}', 7)
        attributes = await connection.fetch("SELECT name, value FROM twiceshy.attribute WHERE run_id = 'forked'")
        assert [tuple(each) for each in attributes] == [("tenant", "acme")]
        with pytest.raises(NotFound):
            await verbs.fork(connection, "nothing", before=1)
        job = await queue.claim_next(connection, ["refunds"], worker="w", host="h", folder="f", lease=30.0)
        assert job is not None
        assert job.claim.run_id == "forked"
