"""Child runs: started once, cancelled with their parent, and never forgotten by who waits for them."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from runtime import events, kin, runs, verbs
from runtime.database import connect
from runtime.entries import ChildEnd, Fenced, Own, Parked, Stopped
from runtime.errors import NotFound
from runtime.journal import Journal
from runtime.queue import CHANNEL
from runtime.step import Kind, RunStatus
from runtime.tokens import derived_id
from tests.database.samples import Scene, claim
from tests.database.test_events import begin, look


async def start(
    scene: Scene, child: str, agent: str = "other", given: bytes = b"1", priority: int | None = None
) -> Any:
    return await kin.start_child(scene.journal, scene.fence, child, agent, given, priority)


async def wake(journal: Journal) -> list[str]:
    async with journal.connection() as connection:
        return await events.wake(connection)


async def parent_of(journal: Journal, child: str = "child") -> Scene:
    """A run that waits for the end of a child, under the step "w", and the child's attempt is not begun."""
    scene = await claim(journal)
    assert await start(scene, child) is None
    return scene


async def park(scene: Scene, child: str) -> Parked | None:
    await begin(scene, Own(Kind.CHILD, child))
    return await scene.journal.park(scene.fence, ["w"])


async def test_a_child_is_started_once(journal: Journal) -> None:
    scene = await claim(journal)
    assert await asyncio.gather(*(start(scene, "c", priority=7) for _ in range(10))) == [None] * 10
    async with journal.connection() as connection:
        child = await runs.get_run(connection, "c")
    assert (child.agent, child.input, child.status, child.priority) == ("other", b"1", RunStatus.QUEUED, 7)
    assert child.for_workers
    assert child.parent == scene.run_id
    assert await kin.is_child(journal, scene.run_id, "c")
    stranger = await claim(journal)
    assert not await kin.is_child(journal, stranger.run_id, "c")
    assert not await kin.is_child(journal, scene.run_id, "nobody")


async def test_an_id_comes_of_the_run_and_its_step(journal: Journal) -> None:
    both = [await (await claim(journal)).call(runs.get_run) for _ in range(2)]
    ids = {derived_id(run.uuid, what) for run in both for what in ("child a", "child b")}
    assert len(ids) == 4
    assert all(runs.RUN_ID.fullmatch(each) for each in ids)


async def test_who_does_not_have_the_run_starts_nothing(journal: Journal) -> None:
    scene = await claim(journal)
    later = await scene.again()
    assert isinstance(await start(scene, "c1"), Fenced)
    await later.begin()
    assert isinstance(await start(Scene(journal, later.run_id, replace(later.fence, sidecar="x"), 2), "c2"), Fenced)
    stopped = await claim(journal)
    await stopped.call(verbs.cancel)
    assert isinstance(await start(stopped, "c3"), Stopped)
    async with journal.connection() as connection:
        for child in ("c1", "c2", "c3"):
            with pytest.raises(NotFound):
                await runs.get_run(connection, child)


async def test_its_end_is_what_is_waited_for(journal: Journal) -> None:
    for outcome, status in (("done", "done"), ("failed", "failed"), ("cancelled", "cancelled")):
        scene = await parent_of(journal, f"c-{outcome}")
        exchange = await begin(scene, Own(Kind.CHILD, f"c-{outcome}"))
        child = await claim(journal, f"c-{outcome}")
        assert (await look(scene, exchange)).came is None
        await child.call(runs.put_result, child.fence.token_hash, b'{"n":  1e400}')
        await child.end(outcome, final=True, error="why" if outcome == "failed" else None)
        found = (await look(scene, exchange)).came
        assert found == ChildEnd(RunStatus(status), b'{"n":  1e400}', "why" if outcome == "failed" else None)


async def test_a_parked_parent_wakes_when_its_child_has_ended(dsn: str, journal: Journal) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    connection = await connect(dsn, name="test")
    try:
        await connection.add_listener(CHANNEL, lambda *said: heard.put_nowait(said[-1]))
        scene = await parent_of(journal, "c")
        assert await heard.get() == "c"
        assert await park(scene, "c") == Parked(None)
        assert (await scene.call(runs.get_run)).wake_on == ["run:c"]
        child = await claim(journal, "c")
        assert await wake(journal) == []
        await child.end("failed", final=False)  # it is tried again
        child = await child.again()
        await child.write(child.stop(await child.begin()))  # ambiguous: it has not ended
        assert await wake(journal) == []
        assert await scene.status() is RunStatus.PARKED
        await child.call(verbs.cancel)
        assert await scene.status() is RunStatus.QUEUED
        assert await asyncio.wait_for(heard.get(), 10) == scene.run_id
    finally:
        await connection.close()


async def test_nothing_parks_on_a_child_that_has_ended(journal: Journal) -> None:
    scene = await parent_of(journal, "c")
    await (await claim(journal, "c")).end("done", 0)
    assert await park(scene, "c") is None
    assert await wake(journal) == []  # nobody is to be woken, and nothing is left to look at
    async with journal.connection() as connection:
        assert await connection.fetch("SELECT FROM twiceshy.child_end") == []


async def test_parking_and_the_end_of_the_child_at_the_same_instant(journal: Journal) -> None:
    met = set()
    for n in range(12):
        scene = await parent_of(journal, f"c{n}")
        child = await claim(journal, f"c{n}")
        await begin(scene, Own(Kind.CHILD, f"c{n}"))
        parked, _, *_ = await asyncio.gather(
            scene.journal.park(scene.fence, ["w"]), child.end("done", 0), wake(journal), wake(journal)
        )
        await wake(journal)
        # Either the child's end came first and nothing parks, or it wakes what has parked.
        assert await scene.status() is (RunStatus.RUNNING if parked is None else RunStatus.QUEUED)
        met.add(parked)
    assert met


async def test_a_child_that_ends_again_while_its_first_end_is_looked_at(dsn: str, journal: Journal) -> None:
    """It failed, was tried again, and ends while that it failed is being told."""
    scene = await parent_of(journal, "c")
    child = await claim(journal, "c")
    await child.end("failed", final=True)
    await child.call(verbs.retry)
    await claim(journal, "c")
    await begin(scene, Own(Kind.CHILD, "c"))
    connection = await connect(dsn, name="test")
    try:
        async with connection.transaction():
            await connection.execute("UPDATE twiceshy.run SET status = 'done' WHERE id = 'c'")
            assert await wake(journal) == []
            assert await scene.journal.park(scene.fence, ["w"]) == Parked(None)
    finally:
        await connection.close()
    assert await wake(journal) == [scene.run_id]


async def test_a_row_that_somebody_has_locked_is_left_for_the_next_look(journal: Journal) -> None:
    scene = await parent_of(journal, "c")
    assert await park(scene, "c") == Parked(None)
    await (await claim(journal, "c")).end("done", 0)
    async with journal.connection() as connection, connection.transaction():
        await connection.execute("SELECT FROM twiceshy.run WHERE id = $1 FOR UPDATE", scene.run_id)
        assert await wake(journal) == []
    assert await wake(journal) == [scene.run_id]


async def test_cancelling_a_parent_cancels_all_below_it(journal: Journal) -> None:
    scene = await parent_of(journal, "child")
    await start(scene, "finished")
    await (await claim(journal, "finished")).end("done", 0)
    child = await claim(journal, "child")
    for grandchild in ("parked", "queued"):
        await start(child, grandchild)
    parked = await claim(journal, "parked")
    await begin(parked, Own(Kind.WAIT, "go"))
    assert await parked.journal.park(parked.fence, ["w"]) == Parked(None)
    assert await park(scene, "child") == Parked(None)
    stranger = await claim(journal)
    assert await scene.call(verbs.cancel) is RunStatus.PARKED
    async with journal.connection() as connection:
        found = {each.id: each.status for each in await runs.list_runs(connection)}
    assert found.pop(stranger.run_id) is RunStatus.RUNNING
    assert found.pop("finished") is RunStatus.DONE
    assert set(found.values()) == {RunStatus.CANCELLED}
    assert len(found) == 4
    assert await wake(journal) == []


async def test_a_child_that_starts_while_its_parent_is_cancelled(journal: Journal) -> None:
    for n in range(8):
        scene = await claim(journal)
        began, _ = await asyncio.gather(start(scene, f"c{n}"), scene.call(verbs.cancel))
        async with journal.connection() as connection:
            found = await connection.fetchval("SELECT status FROM twiceshy.run WHERE id = $1", f"c{n}")
        assert found == ("cancelled" if began is None else None)
