"""The one writer: what it commits together, what fails alone, and what a lost connection changes (nothing)."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from runtime import runs
from runtime.database import Connection, connect
from runtime.entries import Begun, Bound, Conflict, Entry, PutBack, Recorded, Stopped
from runtime.errors import DatabaseAway, Unwritable
from runtime.journal import Journal
from runtime.step import State
from tests.database.samples import SETTINGS, Scene, Wire, answer, claim, opened, register

IMPATIENT = SETTINGS.model_copy(update={"database_wait": 0.3})


@pytest.fixture
async def other(dsn: str) -> AsyncIterator[Connection]:
    """Somebody else's connection."""
    connection = await connect(dsn, name="test")
    yield connection
    await connection.close()


@pytest.fixture
async def wire(dsn: str) -> AsyncIterator[Wire]:
    async with Wire(dsn) as wire:
        yield wire


async def until(condition: Callable[[], Awaitable[bool]], patience: float = 20.0) -> None:
    """Wait for *condition*, which nothing signals."""
    async with asyncio.timeout(patience):
        while not await condition():
            await asyncio.sleep(0.01)


# ---- together, and alone


async def test_what_waits_is_committed_together(journal: Journal, other: Connection) -> None:
    scenes = [await claim(journal) for _ in range(8)]
    entries = [scene.intent(f"k{n}") for n in range(8) for scene in scenes]
    assert all(isinstance(outcome, Begun) for outcome in await asyncio.gather(*map(journal.write, entries)))
    commits = await other.fetchval("SELECT count(DISTINCT xmin::text) FROM twiceshy.step")
    assert commits <= 3


@pytest.mark.parametrize(
    "poison",
    [
        {"url": "http://x/\x00"},
        {"method": "\ud800"},
        {"fingerprint": b"short"},
        {"occurrence": 1 << 40},
    ],
    ids=lambda poison: next(iter(poison)),
)
async def test_a_poisoned_entry_fails_alone(journal: Journal, poison: dict[str, Any]) -> None:
    scenes = [await claim(journal) for _ in range(8)]
    entries: list[Entry] = [scene.intent(f"k{n}") for n in range(8) for scene in scenes]
    bad = scenes[3].intent("bad")
    entries[29] = replace(bad, facts=replace(bad.facts, **poison))
    outcomes = await asyncio.gather(*map(journal.write, entries), return_exceptions=True)
    assert isinstance(outcomes.pop(29), Unwritable)
    assert len(outcomes) == 63
    assert all(isinstance(outcome, Begun) for outcome in outcomes)
    assert await scenes[3].state("bad") is None


async def test_a_poisoned_answer_leaves_its_step_sent(scene: Scene) -> None:
    exchange = await scene.begin()
    for bad in (
        answer(status=99),
        answer(size=5),
        answer(headers=((b"X", b"a\r\nB: c"),)),
        answer(headers=((b"X:Y", b"a"),)),
    ):
        with pytest.raises(Unwritable):
            await scene.write(scene.answer(exchange, bad))
    assert await scene.state() is State.SENT
    await scene.record(exchange)


async def test_many_kinds_at_once_keep_their_order(journal: Journal) -> None:
    """An answer and a stop, a stop and an intent: what was asked first is done first, within a run."""
    scene = await claim(journal)
    exchange, lost = await scene.begin("a"), await scene.begin("b")
    stop = scene.stop(lost, "b")
    entries: list[Entry] = [
        scene.answer(exchange, key="a"),
        stop,
        scene.intent("c"),
        PutBack(scene.run_id, "a", exchange),
    ]
    recorded, stopped, refused, conflict = await asyncio.gather(*map(journal.write, entries))
    assert recorded == Recorded(3, 1)
    assert stopped == Recorded(0)
    assert refused == Stopped(stop.status, stop.step, stop.message)
    assert conflict == Conflict()


async def test_large_entries_do_not_share_a_batch(journal: Journal) -> None:
    scenes = [await claim(journal) for _ in range(4)]
    body = random.Random(1).randbytes(6 << 20)
    intents = [scene.intent() for scene in scenes]
    entries = [replace(intent, facts=replace(intent.facts, request_body=body)) for intent in intents]
    assert all(isinstance(outcome, Begun) for outcome in await asyncio.gather(*map(journal.write, entries)))
    assert await journal.request_body(scenes[3].run_id, "k") == body


# ---- the connection is lost


async def test_a_commit_of_unknown_fate_is_repeated(dsn: str, wire: Wire) -> None:
    """The reply to each kind of entry is lost after Postgres has committed it."""
    async with opened(wire.dsn) as journal:
        await register(journal)
        scene = await claim(journal)

        async def lost(entry: Entry) -> Any:
            wire.lost.clear()
            wire.lose = lambda data: scene.run_id.encode() in data
            outcome = await journal.write(entry)
            assert wire.lost.is_set()
            return outcome

        intent = scene.intent("secret-of-step-k")
        assert isinstance(await lost(intent), Begun)
        key = intent.facts.key
        recorded = await lost(scene.answer(intent.exchange, key=key))
        assert isinstance(recorded, Recorded)
        assert recorded.recorded == 2
        assert await lost(scene.read()) == Recorded(4, 3)
        back = await scene.begin("back")
        assert await lost(PutBack(scene.run_id, "back", back)) == Recorded(0)
        gone = await scene.begin("gone")
        assert await lost(scene.stop(gone, "gone")) == Recorded(0)
        states = {step.key: (step.state, step.statuses) for step in await scene.call(runs.steps)}
        assert states == {
            key: (State.ANSWERED, (200,)),
            "r": (State.ANSWERED, (200,)),
            "back": (State.NOT_SENT, ()),
            "gone": (State.AMBIGUOUS, ()),
        }
        assert (await scene.call(runs.get_run)).counter == 6


async def test_backends_that_are_terminated_cost_nothing(journal: Journal, other: Connection) -> None:
    scenes = [await claim(journal) for _ in range(4)]
    written = 0

    async def work(scene: Scene) -> None:
        nonlocal written
        for n in range(15):
            await scene.step(f"k{n}")
            written += 1

    async def terminate() -> int:
        kills: Any = 0
        for milestone in range(1, 50, 5):
            while written < milestone:
                await asyncio.sleep(0)
            kills += await other.fetchval(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE application_name = 'twiceshy journal' AND datname = current_database()"
            )
        return int(kills)

    kills, *_ = await asyncio.gather(terminate(), *map(work, scenes))
    assert kills
    for scene in scenes:
        row = await scene.call(runs.get_run)
        assert (row.counter, row.newest) == (30, 29)
        assert {step.state for step in await scene.call(runs.steps)} == {State.ANSWERED}


async def test_postgres_away_is_said_to_who_may_still_hold_back(wire: Wire) -> None:
    async with opened(wire.dsn, IMPATIENT) as journal:
        await register(journal)
        scene = await claim(journal)
        exchange, back = await scene.begin(), await scene.begin("back")
        wire.refusing = True
        wire.cut()
        answered = asyncio.create_task(journal.write(scene.answer(exchange)))
        put_back = asyncio.create_task(journal.write(PutBack(scene.run_id, "back", back)))
        for entry in (scene.intent("new"), scene.read(), scene.stop()):
            with pytest.raises(DatabaseAway):
                await journal.write(entry)
        for question in (journal.bind(scene.fence), journal.load(scene.run_id)):
            with pytest.raises(DatabaseAway):
                await question
        assert not answered.done()
        wire.refusing = False
        assert isinstance(await answered, Recorded)
        assert await put_back == Recorded(0)
        await until(lambda: _idle(journal))
        assert {step.key for step in await scene.call(runs.steps)} == {"k", "back"}


async def _idle(journal: Journal) -> bool:
    return journal._writer._idle.is_set()


async def test_a_black_hole_is_left_behind(wire: Wire) -> None:
    async with opened(wire.dsn, IMPATIENT) as journal:
        await register(journal)
        scene = await claim(journal)
        exchange = await scene.begin()
        wire.silent = True
        answered = asyncio.create_task(journal.write(scene.answer(exchange)))
        with pytest.raises(DatabaseAway):
            await journal.write(scene.intent("new"))
        with pytest.raises(DatabaseAway):
            await journal.load(scene.run_id)
        wire.silent = False
        assert isinstance(await answered, Recorded)


async def test_an_intent_whose_caller_was_told_away_is_put_back(wire: Wire) -> None:
    """It was committed, the reply was lost, and the caller sent nothing."""
    async with opened(wire.dsn, IMPATIENT) as journal:
        await register(journal)
        scene = await claim(journal)
        intent = scene.intent("secret-of-step-k")

        def lose(data: bytes) -> bool:
            wire.refusing = found = b"secret-of-step-k" in data
            return found

        wire.lose = lose
        with pytest.raises(DatabaseAway):
            await journal.write(intent)
        assert wire.lost.is_set()
        wire.refusing = False
        await until(lambda: _idle(journal))
        assert await scene.state(intent.facts.key) is State.NOT_SENT


# ---- callers that are cancelled


async def test_an_entry_outlives_its_caller(journal: Journal, scene: Scene, other: Connection) -> None:
    one, two, three = [await scene.begin(key) for key in ("one", "two", "three")]
    async with other.transaction():
        await other.execute("SELECT FROM twiceshy.run FOR UPDATE")
        entries: list[Entry] = [
            scene.answer(one, key="one"), PutBack(scene.run_id, "two", two), scene.read(), scene.intent("tried"),
        ]  # fmt: skip
        tasks = [asyncio.create_task(journal.write(entry)) for entry in entries]
        await until(lambda: _waits_for_a_lock(other))
        late: list[Entry] = [scene.intent("never-tried"), scene.answer(three, key="three")]
        tasks += [asyncio.create_task(journal.write(entry)) for entry in late]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    await until(lambda: _idle(journal))
    states = {step.key: step.state for step in await scene.call(runs.steps)}
    # An intent without its caller is no step that somebody sent.
    assert states.pop("tried", State.NOT_SENT) is State.NOT_SENT
    assert states == {"one": State.ANSWERED, "two": State.NOT_SENT, "three": State.ANSWERED, "r": State.ANSWERED}


async def _waits_for_a_lock(other: Connection) -> bool:
    # Statistics are read once per transaction, unless one says so.
    await other.execute("SELECT pg_stat_clear_snapshot()")
    return bool(
        await other.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'twiceshy journal' "
            "AND datname = current_database() AND wait_event_type = 'Lock'"
        )
    )


async def test_an_intent_that_is_cancelled_while_it_is_committed_is_put_back(journal: Journal, scene: Scene) -> None:
    """At every moment of its way: never is a step left sent that nobody sent."""
    told = set()
    for ticks in range(30):
        task = asyncio.create_task(journal.write(scene.intent(f"k{ticks}")))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            told.add(f"k{ticks}")
    await until(lambda: _idle(journal))
    for step in await scene.call(runs.steps):
        assert step.state is (State.SENT if step.key in told else State.NOT_SENT)


async def test_connections_come_back_from_callers_that_are_cancelled(journal: Journal, scene: Scene) -> None:
    for ticks in range(20):
        task = asyncio.create_task(journal.load(scene.run_id))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
    await asyncio.gather(*(journal.load(scene.run_id) for _ in range(8)))
    assert journal._pool.get_size() <= 4


# ---- locks


async def test_a_locked_run_does_not_hold_up_the_others(journal: Journal, scene: Scene, other: Connection) -> None:
    free = [await claim(journal) for _ in range(5)]
    async with other.transaction():
        await other.execute("SELECT FROM twiceshy.run WHERE id = $1 FOR UPDATE", scene.run_id)
        blocked = [asyncio.create_task(journal.write(scene.intent(f"k{n}"))) for n in range(3)]
        for _ in range(2):
            await asyncio.gather(*(one.step(f"k{random.random()}") for one in free))
        assert not any(task.done() for task in blocked)
    assert all(isinstance(outcome, Begun) for outcome in await asyncio.gather(*blocked))


async def test_runs_are_locked_in_the_order_of_their_ids(journal: Journal, dsn: str, other: Connection) -> None:
    """So two writers never wait for each other; a renewal waits for nobody."""
    scenes = sorted([await claim(journal) for _ in range(12)], key=lambda scene: scene.run_id)
    ids = [scene.run_id for scene in scenes]
    for scene in scenes:
        await journal.bind(scene.fence)

    await other.execute("ALTER FUNCTION twiceshy.write(twiceshy.entry[]) SET lock_timeout = '1min'")
    async with other.transaction():
        await other.execute("SELECT FROM twiceshy.run WHERE id = $1 FOR UPDATE", ids[-1])
        writes = [asyncio.create_task(journal.write(scene.intent())) for scene in reversed(scenes)]
        await until(lambda: _waits_for_a_lock(other))
        async with journal.connection() as third:  # the last one is waited for: those before it are locked
            free = await third.fetch("SELECT id FROM twiceshy.run WHERE id = ANY($1) FOR UPDATE SKIP LOCKED", ids)
        assert not free
    assert all(isinstance(outcome, Begun) for outcome in await asyncio.gather(*writes))

    async with other.transaction():
        await other.execute("SELECT FROM twiceshy.run WHERE id = $1 FOR UPDATE", ids[-1])
        found = await journal.renew([scene.fence for scene in reversed(scenes)], extend=True)
        assert sorted(found) == ids
        assert all(isinstance(outcome, Bound) for outcome in found.values())


async def test_two_writers_of_the_same_runs(dsn: str, journal: Journal) -> None:
    scenes = [await claim(journal) for _ in range(20)]
    exchanges = {scene.run_id: await scene.begin() for scene in scenes}
    async with opened(dsn) as second:
        for _ in range(3):
            entries = [PutBack(run_id, "k", exchange) for run_id, exchange in exchanges.items()]
            orders = [random.sample(entries, len(entries)) for _ in range(2)]
            outcomes = await asyncio.gather(
                *(journal.write(entry) for entry in orders[0]), *(second.write(entry) for entry in orders[1])
            )
            assert set(outcomes) == {Recorded(0)}


# ---- the end, and poolers


async def test_what_waits_is_written_before_the_journal_closes(dsn: str) -> None:
    async with opened(dsn) as journal:
        await register(journal)
        scene = await claim(journal)
        exchange = await scene.begin()
        late = asyncio.create_task(journal.write(scene.answer(exchange)))
        await asyncio.sleep(0)
    assert isinstance(await late, Recorded)
    with pytest.raises(DatabaseAway):
        await journal.write(scene.intent("after"))


async def test_a_journal_that_cannot_write_closes_all_the_same(wire: Wire) -> None:
    async with opened(wire.dsn, SETTINGS.model_copy(update={"drain": 0.2})) as journal:
        await register(journal)
        scene = await claim(journal)
        exchange = await scene.begin()
        wire.refusing = True
        wire.cut()
        late = asyncio.create_task(journal.write(scene.answer(exchange)))
        await asyncio.sleep(0)
    with pytest.raises(DatabaseAway):
        await late


async def test_through_a_pooler(dsn: str) -> None:
    """No statement outlives its transaction: what PgBouncer needs in transaction mode."""
    async with opened(f"{dsn}?statement_cache_size=0") as journal:
        await register(journal)
        scene = await claim(journal)
        await scene.step()
        assert isinstance(await scene.write(scene.read()), Recorded)
        rows = await journal.load(scene.run_id)
        assert rows is not None
        assert [step.facts.key for step in rows.steps] == ["k", "r"]
        await journal.renew([scene.fence], extend=True)
        assert await journal.put_result(scene.fence, b"1")
        async with journal.connection() as connection:
            left = await connection.fetchval(
                "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%twiceshy.%'"
            )
        assert left == 0
