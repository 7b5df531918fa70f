"""A run that continues as another: exactly one, and whatever is meant for any of them arrives at the newest."""

import asyncio
from typing import Any

import pytest

from runtime import kin, queue, runs, verbs
from runtime.entries import ChildEnd, Fenced, Own, Parked, Recorded, Stopped
from runtime.errors import NotFound, NotNow
from runtime.journal import Journal
from runtime.step import Kind, RunStatus
from tests.database.samples import Scene, claim
from tests.database.test_children import start, wake
from tests.database.test_events import WAIT, begin, look, send, take


async def go_on(scene: Scene, as_whom: str, given: bytes | None = b"2") -> Any:
    return await kin.continue_as_new(scene.journal, scene.fence, as_whom, given)


async def run_of(journal: Journal, run_id: str) -> Any:
    async with journal.connection() as connection:
        return await runs.get_run(connection, run_id)


async def test_a_run_is_done_and_goes_on(journal: Journal) -> None:
    async with journal.connection() as connection:
        old = await queue.start(connection, "agent", b"1", priority=5, attributes={"team": "a"})
    scene = await claim(journal, old)
    await scene.step()
    assert await go_on(scene, "new") == "new"
    before, after = await run_of(journal, old), await run_of(journal, "new")
    assert (before.status, before.continued_as, before.input) == (RunStatus.DONE, "new", b"1")
    assert (after.status, after.continued_from, after.input) == (RunStatus.QUEUED, old, b"2")
    assert (after.agent, after.priority, after.for_workers, after.attributes) == ("agent", 5, True, {"team": "a"})
    assert [each.outcome for each in await scene.call(runs.attempts)] == ["done"]
    # The agent ends after it, however it does.
    assert await scene.end("failed") is RunStatus.DONE
    assert (await run_of(journal, old)).error is None
    assert [each.outcome for each in await scene.call(runs.attempts)] == ["done"]


async def test_however_often_it_is_asked_there_is_one_successor(journal: Journal) -> None:
    for n in range(4):
        scene = await claim(journal)
        told = await asyncio.gather(*(go_on(scene, f"new{n}-{k}") for k in range(10)))
        assert len(set(told)) == 1
        async with journal.connection() as connection:
            made = await connection.fetch("SELECT id FROM twiceshy.run WHERE continued_from = $1", scene.run_id)
        assert [row["id"] for row in made] == [told[0]]
        assert await kin.successor(journal, scene.run_id, scene.fence.token_hash) == told[0]
        assert await kin.successor(journal, scene.run_id, b"another") is None


async def test_who_does_not_have_the_run_does_not_continue_it(journal: Journal) -> None:
    scene = await claim(journal)
    await scene.again()
    assert isinstance(await go_on(scene, "new"), Fenced)
    cancelled = await claim(journal)
    await cancelled.call(verbs.cancel)
    assert isinstance(await go_on(cancelled, "new"), Stopped)
    with pytest.raises(NotFound):
        await run_of(journal, "new")
    # And who had it hears where it went.
    done = await claim(journal)
    await go_on(done, "new")
    told = (await journal.renew([done.fence], extend=False))[done.run_id]
    assert told == Stopped(RunStatus.DONE, None, None, "new")


async def test_what_is_unread_is_read_by_the_newest(journal: Journal) -> None:
    scene = await claim(journal)
    for n in range(3):
        await send(scene, id=f"e{n}")
    first = await begin(scene, WAIT)
    assert isinstance(await take(scene, first, "e0"), Recorded)
    await begin(scene, WAIT, "open")  # nobody is held by it any more
    await go_on(scene, "second")
    second = await claim(journal, "second")
    await go_on(second, "third")
    third = await claim(journal, "third")
    assert (await send(scene, id="e3")).fresh
    assert (await send(second, id="e4")).fresh
    for n in range(5):
        # Sent to any of them before: once.
        assert not any([(await send(each, id=f"e{n}")).fresh for each in (scene, second, third)])
    with pytest.raises(NotNow, match="another payload"):
        await send(third, payload=b"[]", id="e0")
    exchanges = [await begin(third, WAIT, f"w{n}") for n in range(5)]
    found = await journal.waiting([("third", f"w{n}", each) for n, each in enumerate(exchanges)])
    assert [found[each].came and found[each].came.id for each in exchanges] == ["e1", "e2", "e3", "e4", None]  # type: ignore[union-attr]
    await third.end("done", 0)
    with pytest.raises(NotNow, match="has ended"):
        await send(scene)


async def test_an_event_at_the_instant_of_continuing_is_not_lost(journal: Journal) -> None:
    for n in range(10):
        scene = await claim(journal)
        await asyncio.gather(go_on(scene, f"new{n}"), *(send(scene, id=f"e{k}") for k in range(5)))
        later = await claim(journal, f"new{n}")
        exchanges = [await begin(later, WAIT, f"w{k}") for k in range(5)]
        found = await journal.waiting([(later.run_id, f"w{k}", each) for k, each in enumerate(exchanges)])
        assert {found[each].came.id for each in exchanges} == {f"e{k}" for k in range(5)}  # type: ignore[union-attr]


async def test_an_event_for_an_old_one_wakes_the_newest(journal: Journal) -> None:
    scene = await claim(journal)
    await go_on(scene, "new")
    new = await claim(journal, "new")
    await begin(new, WAIT)
    assert await journal.park(new.fence, ["w"]) == Parked(None)
    await send(scene)
    assert await new.status() is RunStatus.QUEUED


async def test_cancelling_an_old_one_cancels_the_newest_and_all_children(journal: Journal) -> None:
    scene = await claim(journal)
    await start(scene, "child-of-the-old")
    await go_on(scene, "second")
    second = await claim(journal, "second")
    await start(second, "child-of-the-second")
    await go_on(second, "third")
    child = await claim(journal, "child-of-the-old")
    await go_on(child, "goes-on")
    assert await scene.call(verbs.cancel) is RunStatus.QUEUED
    for cancelled in ("third", "child-of-the-second", "goes-on"):
        assert (await run_of(journal, cancelled)).status is RunStatus.CANCELLED
    assert await scene.status() is RunStatus.DONE
    with pytest.raises(NotNow, match="it went on as run second"):
        await scene.call(verbs.retry)
    assert await scene.call(kin.newest) == "third"


async def test_cancelling_and_continuing_at_the_same_instant(journal: Journal) -> None:
    for n in range(8):
        scene = await claim(journal)
        await asyncio.gather(go_on(scene, f"new{n}"), scene.call(verbs.cancel))
        newest = await run_of(journal, await scene.call(kin.newest))
        assert newest.status is RunStatus.CANCELLED


async def test_who_waits_for_a_child_waits_for_the_end_of_its_chain(journal: Journal) -> None:
    scene = await claim(journal)
    await start(scene, "child")
    child = await claim(journal, "child")
    await go_on(child, "child-2")
    await go_on(scene, "parent-2")
    parent = await claim(journal, "parent-2")
    assert await kin.is_child(journal, "parent-2", "child")
    assert not await kin.is_child(journal, "parent-2", "child-2")  # it is known by its first
    exchange = await begin(parent, Own(Kind.CHILD, "child"))
    assert (await look(parent, exchange)).came is None
    assert await journal.park(parent.fence, ["w"]) == Parked(None)
    assert await wake(journal) == []
    last = await claim(journal, "child-2")
    await last.call(runs.put_result, last.fence.token_hash, b"7")
    await last.end("done", 0)
    assert await wake(journal) == ["parent-2"]
    again = await claim(journal, "parent-2")
    later = await begin(again, Own(Kind.CHILD, "child"), replaces=exchange)
    assert (await look(again, later)).came == ChildEnd(RunStatus.DONE, b"7", None)


async def test_events_are_counted_along_the_chain(journal: Journal) -> None:
    """An order of what came, and of what was done, also of what was carried over."""
    scene = await claim(journal)
    await scene.step()
    await send(scene, id="old")
    await go_on(scene, "new")
    new = await claim(journal, "new")
    await send(new, id="new")
    about = await journal.about("new")
    assert about is not None
    assert (about["steps"], about["continued_from"], about["input"]) == (0, scene.run_id, b"2")
    row = await run_of(journal, "new")
    assert row.counter > row.newest == 0
