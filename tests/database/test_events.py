"""Events are taken once, whenever they come; parking and waking miss none. No sidecar: the journal's own verbs."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from runtime import events, runs
from runtime.database import connect
from runtime.entries import Answer, Begun, Conflict, Event, Intent, Own, Parked, Recorded
from runtime.errors import NotFound, NotNow, UsageError
from runtime.journal import Journal
from runtime.step import Effect, Kind, RunStatus
from tests.database.samples import SIDECAR, Scene, answer, claim, facts, register


async def begin(scene: Scene, own: Own, key: str = "w", replaces: UUID | None = None) -> UUID:
    """A step of the sidecar's own is begun; its exchange."""
    step = facts(key, Effect.REPEATABLE, own=own, wire_key=None)
    intent = Intent(scene.fence, step, uuid4(), 0, replaces)
    outcome = await scene.write(intent)
    assert isinstance(outcome, Begun), outcome
    return intent.exchange


async def send(scene: Scene, name: str = "go", payload: bytes = b"{}", id: str | None = None) -> events.Sent:  # noqa: A002
    sent = await scene.call(events.send, name, payload, id, limit=1 << 20)
    assert isinstance(sent, events.Sent)
    return sent


async def look(scene: Scene, exchange: UUID, key: str = "w") -> Any:
    return (await scene.journal.waiting([(scene.run_id, key, exchange)])).get(exchange)


async def take(scene: Scene, exchange: UUID, event: str, key: str = "w") -> Any:
    return await scene.write(Answer(scene.run_id, key, exchange, scene.n, answer(), event=event))


WAIT = Own(Kind.WAIT, "go")


async def consumers(dsn: str, run_id: str) -> list[str | None]:
    connection = await connect(dsn, name="test")
    try:
        found = await connection.fetch("SELECT consumed_by FROM twiceshy.event WHERE run_id = $1 ORDER BY sent", run_id)
        return [row["consumed_by"] for row in found]
    finally:
        await connection.close()


async def test_an_event_is_taken_with_the_record_and_once(dsn: str, scene: Scene) -> None:
    await send(scene, payload=b'{"a":  "\\u0000", "a": 1e400}', id="one")
    first, second = await begin(scene, WAIT, "first"), await begin(scene, WAIT, "second")
    found = await scene.journal.waiting([(scene.run_id, "first", first), (scene.run_id, "second", second)])
    event = found[first].came
    assert isinstance(event, Event)
    assert (event.id, event.payload) == ("one", b'{"a":  "\\u0000", "a": 1e400}')
    assert found[second].came is None
    assert isinstance(await take(scene, first, "one", "first"), Recorded)
    # The reply to that was lost: it is the same record.
    assert isinstance(await take(scene, first, "one", "first"), Recorded)
    assert isinstance(await take(scene, second, "one", "second"), Conflict)
    assert await scene.state("second") == "sent"
    assert await consumers(dsn, scene.run_id) == ["first"]


async def test_waits_of_one_name_get_an_event_each_in_their_order(scene: Scene) -> None:
    exchanges = [await begin(scene, WAIT, f"w{n}") for n in range(3)]
    for n in range(3):
        await send(scene, id=f"e{n}")
    await send(scene, "other")
    found = await scene.journal.waiting([(scene.run_id, f"w{n}", each) for n, each in enumerate(exchanges)])
    assert [found[each].came.id for each in exchanges] == ["e0", "e1", "e2"]  # type: ignore[union-attr]


async def test_an_id_is_sent_once(dsn: str, scene: Scene) -> None:
    sent = await asyncio.gather(*(send(scene, id="same") for _ in range(10)))
    assert [each.id for each in sent] == ["same"] * 10
    assert sum(each.fresh for each in sent) == 1
    with pytest.raises(NotNow, match="another payload"):
        await send(scene, payload=b"[]", id="same")
    assert len({(await send(scene)).id for _ in range(3)}) == 3
    assert len(await consumers(dsn, scene.run_id)) == 4


async def test_one_wait_and_ten_senders_at_once(dsn: str, journal: Journal) -> None:
    for _ in range(10):
        scene = await claim(journal)
        exchange = await begin(scene, WAIT)
        await asyncio.gather(*(send(scene, id=f"e{n}") for n in range(10)))
        found = await look(scene, exchange)
        assert isinstance(await take(scene, exchange, found.came.id), Recorded)
        assert await look(scene, exchange) is None  # it waits no more
        assert sorted(map(str, await consumers(dsn, scene.run_id))) == ["None"] * 9 + ["w"]


async def test_what_is_no_name_or_no_json_is_refused(scene: Scene) -> None:
    for name in ("", "a b", "a/b", "../x", "é", "a\r\n", "x" * 201):
        with pytest.raises(UsageError):
            await send(scene, name)
        with pytest.raises(UsageError):
            await send(scene, id=name)
    for payload in (b"", b"{", b"NaN", b"\xff", b'"' + b"x" * (1 << 20) + b'"', b"[" * 300 + b"]" * 300):
        with pytest.raises(UsageError, match="payload of event go"):
            await send(scene, payload=payload)


async def test_a_run_that_is_not_there_or_has_ended_gets_no_event(journal: Journal, scene: Scene) -> None:
    async with journal.connection() as connection:
        with pytest.raises(NotFound):
            await events.send(connection, "nobody", "go", b"1", limit=10)
    await scene.end("done", 0)
    with pytest.raises(NotNow, match="has ended"):
        await send(scene)


# ---- deadlines


async def test_a_deadline_is_fixed_by_the_first_record(scene: Scene) -> None:
    first = await begin(scene, Own(Kind.SLEEP, seconds=100.0))
    found = await look(scene, first)
    assert 90 < found.left <= 100
    later = await scene.again()
    second = await begin(later, Own(Kind.SLEEP, seconds=100.0), replaces=first)
    assert (await look(later, second)).deadline == found.deadline
    assert await look(later, first) is None  # it has lost the step
    loaded = await scene.journal.load(scene.run_id)
    assert loaded is not None
    assert loaded.steps[0].facts.own == Own(Kind.SLEEP, until=found.deadline)


async def test_what_came_after_the_deadline_is_left_for_the_next_wait(scene: Scene) -> None:
    over = await begin(scene, Own(Kind.WAIT, "go", until=datetime.now(UTC) - timedelta(hours=1)))
    await send(scene)
    found = await look(scene, over)
    assert found.left < 0
    assert found.came is None
    assert (await look(scene, await begin(scene, WAIT, "next"), "next")).came is not None


async def test_a_living_sidecar_gives_up_what_never_left_the_house(journal: Journal, scene: Scene) -> None:
    first = await begin(scene, WAIT)
    await register(journal, "sidecar-2", folder="/other")
    later = await scene.again("sidecar-2")
    await send(scene, id="e")
    second = await begin(later, WAIT, replaces=first)
    assert isinstance(await take(scene, first, "e"), Conflict)
    assert isinstance(await take(later, second, "e"), Recorded)


# ---- parking


async def park(scene: Scene, *held: str) -> Parked | None:
    return await scene.journal.park(scene.fence, held)


async def test_a_parked_run_wakes_by_the_event_that_it_waits_for(scene: Scene) -> None:
    await begin(scene, WAIT)
    assert await park(scene, "w") == Parked(None)
    await send(scene, "other")
    assert await scene.status() is RunStatus.PARKED
    assert await scene.end("failed") is RunStatus.PARKED  # the agent swallowed the refusal
    assert [each.outcome for each in await scene.call(runs.attempts)] == ["parked"]
    await send(scene)
    assert await scene.status() is RunStatus.QUEUED
    assert (await scene.again()).n == 2


async def test_a_parked_run_wakes_by_its_earliest_deadline(journal: Journal, scene: Scene) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    await begin(scene, Own(Kind.WAIT, "go", until=at + timedelta(hours=1)), "long")
    await begin(scene, Own(Kind.SLEEP, until=at), "short")
    assert await park(scene, "long", "short") == Parked(at)
    row = await scene.call(runs.get_run)
    assert (row.wake_at, row.wake_on) == (at, ["go"])
    async with journal.connection() as connection:
        assert await events.wake(connection) == []
        async with connection.transaction():
            await connection.execute(
                "SELECT set_config('twiceshy.now', $1, true)", (at + timedelta(seconds=1)).isoformat()
            )
            assert await events.wake(connection) == [scene.run_id]
    row = await scene.call(runs.get_run)
    assert (row.status, row.wake_at, row.wake_on) == (RunStatus.QUEUED, None, None)


async def test_nothing_parks_on_what_is_due_or_is_not_open(scene: Scene) -> None:
    exchange = await begin(scene, WAIT)
    await begin(scene, Own(Kind.SLEEP, until=datetime.now(UTC) - timedelta(seconds=1)), "over")
    await begin(scene, Own(Kind.LOCAL, "work"), "local")
    assert await park(scene) is None
    assert await park(scene, "w", "over") is None
    assert await park(scene, "w", "local") is None
    assert await park(scene, "w", "nothing") is None
    await send(scene, id="e")
    assert await park(scene, "w") is None
    await take(scene, exchange, "e")
    assert await park(scene, "w") is None
    assert await scene.status() is RunStatus.RUNNING


async def test_only_the_attempt_itself_parks(scene: Scene) -> None:
    await begin(scene, WAIT)
    assert await scene.journal.park(scene.fence, ["w"]) is not None
    later = Scene(scene.journal, scene.run_id, scene.fence, 1)
    assert await later.journal.park(scene.fence, ["w"]) is None  # it is parked already
    await send(scene)
    await scene.again(SIDECAR)
    assert await park(scene, "w") is None


async def test_parking_and_an_event_at_the_same_instant(journal: Journal) -> None:
    for _ in range(20):
        scene = await claim(journal)
        await begin(scene, WAIT)
        parked, _ = await asyncio.gather(park(scene, "w"), send(scene))
        # Either the event came first and nothing parks, or it wakes what has parked.
        assert await scene.status() is (RunStatus.RUNNING if parked is None else RunStatus.QUEUED)
