"""An approval is decided once, by a person or by the clock, whoever else decides at the same instant."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from runtime import approvals, events
from runtime.database import connect
from runtime.entries import Answer, Conflict, Decision, Own, Parked, Recorded, Verdict
from runtime.errors import Decided, NotFound, NotNow, UsageError
from runtime.journal import Journal
from runtime.queue import CHANNEL
from runtime.step import Kind, RunStatus
from tests.database.samples import Scene, answer, claim
from tests.database.test_events import begin, look, send

ASKED = Own(Kind.APPROVAL, "manager")


async def decide(scene: Scene, named: str = "w", decision: Verdict = "approve", **words: str) -> Decision:
    found = await scene.call(approvals.decide, named, decision, **words)
    assert isinstance(found, Decision)
    return found


async def time_out(scene: Scene, exchange: UUID, key: str = "w") -> Any:
    return await scene.write(Answer(scene.run_id, key, exchange, scene.n, answer(), timed_out=True))


async def take(scene: Scene, exchange: UUID, key: str = "w") -> Any:
    return await scene.write(Answer(scene.run_id, key, exchange, scene.n, answer()))


def over(**ago: int) -> Own:
    """An approval whose time is over."""
    return Own(Kind.APPROVAL, "manager", until=datetime.now(UTC) - timedelta(**(ago or {"hours": 1})))


async def test_the_first_decision_is_the_answer(scene: Scene) -> None:
    exchange = await begin(scene, ASKED)
    assert (await look(scene, exchange)).came is None
    decided = await decide(scene, by="ann", comment="fine\nby me")
    assert (decided.id, decided.name, decided.by, decided.comment) == ("w", "manager", "ann", "fine\nby me")
    assert (await look(scene, exchange)).came == decided
    for decision in ("approve", "decline"):
        with pytest.raises(Decided, match="approve, by ann") as caught:
            await decide(scene, "manager", decision)
        assert caught.value.first == decided
    assert isinstance(await take(scene, exchange), Recorded)
    with pytest.raises(Decided):
        await decide(scene, decision="decline")


async def test_forty_decide_at_once_and_the_next_wait_stays_open(journal: Journal) -> None:
    for _ in range(3):
        scene = await claim(journal)
        first, second = await begin(scene, ASKED, "first"), await begin(scene, ASKED, "second")
        verdicts: list[Verdict] = ["approve", "decline"]
        tries = await asyncio.gather(
            *(decide(scene, "first", each, by=f"{each}{n}") for n in range(20) for each in verdicts),
            return_exceptions=True,
        )
        [decided] = [each for each in tries if isinstance(each, Decision)]
        assert {each.first for each in tries if isinstance(each, Decided)} == {decided}
        assert len(tries) == 40
        assert (await look(scene, first, "first")).came == decided
        assert (await look(scene, second, "second")).came is None


async def test_a_decision_and_the_end_of_its_time_at_the_same_instant(journal: Journal) -> None:
    """What is recorded is what whoever decided was told, however they meet."""
    outcomes = set()
    for n in range(16):
        scene = await claim(journal)
        exchange = await begin(scene, ASKED)
        late, early = asyncio.ensure_future(time_out(scene, exchange)), asyncio.ensure_future(decide(scene))
        if n % 2:  # the writer is quicker than a connection from the pool is
            await asyncio.wait({early})
        both: tuple[Any, Any] = await asyncio.gather(late, early, return_exceptions=True)
        recorded, decided = both
        if isinstance(recorded, Recorded):
            assert isinstance(decided, NotNow)
            assert not isinstance(decided, Decided)
            assert isinstance(await time_out(scene, exchange), Recorded)  # the reply to that was lost: the same record
        else:
            assert isinstance(recorded, Conflict)
            assert (await look(scene, exchange)).came == decided
        outcomes.add(type(recorded))
    assert outcomes, "either may win"


async def test_after_its_time_nobody_decides(scene: Scene) -> None:
    exchange = await begin(scene, over())
    with pytest.raises(NotNow, match="not decided in time"):
        await decide(scene)
    assert isinstance(await time_out(scene, exchange), Recorded)
    with pytest.raises(NotNow, match="not decided in time"):
        await decide(scene)


async def test_a_name_is_enough_while_there_was_one_of_it(scene: Scene) -> None:
    with pytest.raises(NotFound, match="no approval 'manager'"):
        await decide(scene, "manager")
    exchange = await begin(scene, ASKED, "first")
    await begin(scene, Own(Kind.APPROVAL, "first"), "other")
    assert (await decide(scene, "first")).id == "first"  # an id goes before a name
    assert isinstance(await take(scene, exchange, "first"), Recorded)
    await begin(scene, ASKED, "second")
    with pytest.raises(NotNow, match="more than once; say which by its id: first, second"):
        await decide(scene, "manager")
    assert (await decide(scene, "second", "decline")).decision == "decline"


async def test_no_event_is_a_decision(scene: Scene) -> None:
    exchange = await begin(scene, ASKED)
    for name in ("manager", "w", "approval"):
        await send(scene, name, b'{"decision": "approve"}', "w")
    with pytest.raises(UsageError):
        await send(scene, "approval:manager", id="w")
    assert (await look(scene, exchange)).came is None
    assert await scene.journal.park(scene.fence, ["w"]) == Parked(None)
    await send(scene, "manager", b"{}", "again")
    assert await scene.status() is RunStatus.PARKED
    await decide(scene)
    assert await scene.status() is RunStatus.QUEUED


async def test_a_run_that_only_sleeps_is_not_woken(scene: Scene) -> None:
    """Who asked has given up waiting and sleeps: the decision is there when it asks again."""
    exchange = await begin(scene, ASKED)
    await begin(scene, Own(Kind.SLEEP, seconds=60.0), "s")
    assert isinstance(await scene.journal.park(scene.fence, ["s"]), Parked)
    decided = await decide(scene)
    assert await scene.status() is RunStatus.PARKED
    assert (await look(scene, exchange)).came == decided


async def test_no_decision_of_a_run_that_has_ended(journal: Journal) -> None:
    for outcome in ("done", "cancelled"):
        scene = await claim(journal)
        await begin(scene, ASKED)
        await scene.end(outcome, 0)
        with pytest.raises(NotNow, match=f"the run is {outcome}"):
            await decide(scene)
    async with journal.connection() as connection:
        with pytest.raises(NotFound):
            await approvals.decide(connection, "nobody", "w", "approve")
        assert await approvals.open_ones(connection) == []


async def test_what_is_no_decision_is_refused(scene: Scene) -> None:
    await begin(scene, ASKED)
    with pytest.raises(UsageError):
        await scene.call(approvals.decide, "w", "maybe")
    for words in ({"by": "x" * 201}, {"by": "a\0"}, {"comment": "\ud800"}, {"comment": "x" * 10_001}):
        with pytest.raises(UsageError):
            await decide(scene, **words)  # type: ignore[arg-type]
    await decide(scene, by="é", comment="")


async def test_the_open_ones_page_by_page(journal: Journal) -> None:
    scenes = [await claim(journal) for _ in range(3)]
    for n, scene in enumerate(scenes):
        for key in ("a", "b"):
            await begin(scene, Own(Kind.APPROVAL, f"name{n}", seconds=60.0), key)
    await begin(scenes[0], over(), "late")
    await decide(scenes[1], "a")
    await scenes[2].end("failed", final=True)
    async with journal.connection() as connection:
        found, place = [], None
        while page := await approvals.open_ones(connection, limit=2, behind=place):
            found += page
            place = page[-1].place
        assert [(each.run, each.id) for each in found] == [
            (scenes[0].run_id, "a"), (scenes[0].run_id, "b"), (scenes[1].run_id, "b"),
        ]  # fmt: skip
        assert found[0].deadline is not None
        assert (found[0].deadline - found[0].asked_at).total_seconds() == 60
        assert found[0].request is None
        named = await approvals.open_ones(connection, run=scenes[1].run_id, name="name1")
        assert named == found[2:]
        assert await approvals.open_ones(connection, name="other") == []


async def test_who_listens_is_told_of_a_run_that_wakes(dsn: str, scene: Scene) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    connection = await connect(dsn, name="test")
    try:
        await connection.add_listener(CHANNEL, lambda *said: heard.put_nowait(said[-1]))
        await begin(scene, ASKED)
        assert await scene.journal.park(scene.fence, ["w"]) == Parked(None)
        await decide(scene)
        assert await asyncio.wait_for(heard.get(), 10) == scene.run_id
        scene = await scene.again()
        await begin(scene, Own(Kind.WAIT, "go"), "e")
        assert await scene.journal.park(scene.fence, ["e"]) == Parked(None)
        await scene.call(events.send, "go", b"1", limit=10)
        assert await asyncio.wait_for(heard.get(), 10) == scene.run_id
    finally:
        await connection.close()
