"""Starts happen once, runs are claimed once and in their order, and a dead worker's runs come back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from runtime import queue, runs, verbs
from runtime.database import Connection, connect
from runtime.errors import Taken, UsageError
from runtime.step import RunStatus

ME: dict[str, Any] = {"worker": "w1", "host": "here", "folder": "/state", "lease": 30.0}
PLACE: dict[str, Any] = {"host": "here", "folder": "/state", "lease": 30.0, "backoff": 1.0}
#: Later than the server's start and any connection's by far.
TOMORROW = "SELECT set_config('twiceshy.now', (clock_timestamp() + make_interval(secs => $1))::text, false)"


@asynccontextmanager
async def many(dsn: str, number: int) -> AsyncIterator[list[Connection]]:
    async with AsyncExitStack() as stack:
        opened = [await connect(dsn, name="test") for _ in range(number)]
        for each in opened:
            stack.push_async_callback(each.close)
        yield opened


@pytest.fixture
async def conn(dsn: str) -> AsyncIterator[Connection]:
    async with many(dsn, 1) as [connection]:
        yield connection


async def take(conn: Connection, *agents: str, **more: Any) -> str | None:
    job = await queue.claim_next(conn, agents or ("a",), **ME | more)
    return None if job is None else job.claim.run_id


async def status(conn: Connection, run: str) -> RunStatus:
    return (await runs.get_run(conn, run)).status


async def at(conn: Connection, seconds: float) -> None:
    """It is so many seconds later, for this connection."""
    await conn.execute(TOMORROW, seconds)


# ---- starting


async def test_fifty_equal_starts_at_the_same_instant_are_one_run(dsn: str) -> None:
    async with many(dsn, 50) as connections:
        for key in ("first", "second"):
            work = [queue.start(each, "a", b"{}", key=key) for each in connections]
            assert len(set(await asyncio.gather(*work))) == 1
        assert len(await runs.list_runs(connections[0])) == 2


async def test_a_key_is_one_start_and_outlives_its_run(conn: Connection) -> None:
    run = await queue.start(conn, "a", b'{"n": 1}', key="k", priority=3)
    assert await queue.start(conn, "a", b'{"n": 1}', key="k", priority=3) == run
    others: list[dict[str, Any]] = [
        {"agent": "b"}, {"input": b'{"n": 2}'}, {"input": None}, {"priority": 4}, {"run_id": "mine"},
    ]  # fmt: skip
    same: dict[str, Any] = {"agent": "a", "input": b'{"n": 1}', "key": "k", "priority": 3}
    for other in others:
        with pytest.raises(Taken, match=f"'k' was used for another start .run {run}"):
            await queue.start(conn, **same | other)
    await conn.execute("DELETE FROM twiceshy.run")
    assert await queue.start(conn, "a", b'{"n": 1}', key="k", priority=3) == run
    assert await runs.list_runs(conn) == []


async def test_keys_are_forgotten_some_at_a_time_when_their_runs_ended_long_ago(
    conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "FORGOTTEN_AT_ONCE", 3)
    ended = [await queue.start(conn, "a", None, key=f"ended-{n}") for n in range(4)]
    late, living = [await queue.start(conn, "a", None, key=key) for key in ("late", "living")]
    gone = await queue.start(conn, "a", None, key="gone")
    await conn.execute("DELETE FROM twiceshy.run WHERE id = $1", gone)
    # It has ended, and goes on as another one.
    chain = await queue.start(conn, "a", None, key="chain")
    await conn.execute(
        "INSERT INTO twiceshy.run (id, agent, first_run, continued_from) VALUES ($1 || '-2', 'a', $1, $1)", chain
    )
    await conn.execute(
        "UPDATE twiceshy.run SET status = 'done', ended_at = twiceshy.now(), continued_as = $1 || '-2' WHERE id = $1",
        chain,
    )
    for run in ended:
        await verbs.cancel(conn, run)
    assert not await queue.forget_starts(conn, retention=100)
    await at(conn, 80)
    await verbs.cancel(conn, late)
    await at(conn, 101)
    assert [await queue.forget_starts(conn, retention=100) for _ in range(3)] == [True, False, False]
    left = await conn.fetch("SELECT key FROM twiceshy.start ORDER BY key")
    assert [row["key"] for row in left] == ["chain", "late", "living"]
    assert await queue.start(conn, "a", None, key="living") == living
    assert await queue.start(conn, "a", None, key="ended-0") != ended[0]


async def test_an_id_is_one_start_too(conn: Connection) -> None:
    assert await queue.start(conn, "a", None, run_id="mine") == "mine"
    assert await queue.start(conn, "a", None, run_id="mine") == "mine"
    with pytest.raises(Taken, match="run mine is there already"):
        await queue.start(conn, "a", b"1", run_id="mine", key="k")
    # Nothing of a refused start is left: its key is free.
    assert await queue.start(conn, "a", b"1", key="k") != "mine"
    await runs.create(conn, "theirs", agent="a")
    with pytest.raises(Taken):
        await queue.start(conn, "a", None, run_id="theirs")


@pytest.mark.parametrize(
    "bad",
    [{"key": ""}, {"key": "x" * 201}, {"key": "a\0"}, {"key": "\ud800"}, {"run_id": "a b"}, {"priority": 1 << 40}],
)
async def test_what_no_start_may_be_called(conn: Connection, bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        await queue.start(conn, "a", None, **bad)
    assert await runs.list_runs(conn) == []


# ---- taking


async def test_each_run_is_claimed_once_by_many_at_once(dsn: str) -> None:
    async with many(dsn, 20) as connections:
        started = {await queue.start(connections[0], "a", None) for _ in range(100)}

        async def work(connection: Connection) -> list[str]:
            taken = []
            while run := await take(connection):
                taken.append(run)
            return taken

        taken = await asyncio.gather(*map(work, connections))
        assert sorted(run for each in taken for run in each) == sorted(started)


async def test_the_order_is_that_of_priority_and_then_of_time(conn: Connection) -> None:
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 5)):
        await queue.start(conn, "a", None, run_id=name, priority=priority)
    assert [await take(conn) for _ in range(5)] == ["high", "first", "second", "low", None]


async def test_only_what_is_for_workers_and_of_the_agents_named(conn: Connection) -> None:
    await queue.start(conn, "b", None, run_id="b")
    await runs.create(conn, "at-a-terminal", agent="a")
    assert await take(conn) is None
    assert await take(conn, "a", "b") == "b"
    claimed = await runs.last_attempt(conn, "b")
    assert claimed is not None
    assert (claimed.kind, claimed.process, claimed.host) == ("worker", "w1", "here")
    assert (await runs.get_run(conn, "b")).tokened


async def test_a_failed_attempt_puts_its_run_behind_those_that_wait(conn: Connection) -> None:
    for name in ("fails", "waits"):
        await queue.start(conn, "a", None, run_id=name)
    job = await queue.claim_next(conn, ["a"], **ME)
    assert job is not None
    digest = runs.hash_token(job.claim.token)
    assert await runs.end_attempt(conn, "fails", digest, "died", -9, pause=0) is RunStatus.QUEUED
    assert [await take(conn), await take(conn)] == ["waits", "fails"]


async def test_a_pause_is_kept_and_an_interruption_keeps_its_place(conn: Connection) -> None:
    await queue.start(conn, "a", None, run_id="it")
    job = await queue.claim_next(conn, ["a"], **ME)
    assert job is not None
    await runs.end_attempt(conn, "it", runs.hash_token(job.claim.token), "failed", 1, pause=50)
    assert await take(conn) is None
    await at(conn, 49)
    assert await take(conn) is None
    await at(conn, 51)
    await queue.start(conn, "a", None, run_id="later")
    job = await queue.claim_next(conn, ["a"], **ME)
    assert job is not None
    assert job.claim.run_id == "it"
    await runs.end_attempt(conn, "it", runs.hash_token(job.claim.token), "interrupted", None)
    assert await take(conn) == "it"


# ---- giving back


async def test_a_silent_run_is_queued_again_when_its_lease_is_over(conn: Connection) -> None:
    await queue.start(conn, "a", None, run_id="it")
    await take(conn)
    assert await queue.requeue_silent(conn, lease=30.0, backoff=1.0) is None
    await at(conn, 29)
    assert await queue.requeue_silent(conn, lease=30.0, backoff=1.0) is None
    await at(conn, 100)
    assert await queue.requeue_silent(conn, lease=30.0, backoff=1.0) == "it"
    assert await queue.requeue_silent(conn, lease=30.0, backoff=1.0) is None
    row = await runs.get_run(conn, "it")
    assert (row.status, row.sidecar, row.lease_left) == (RunStatus.QUEUED, None, None)
    last = await runs.last_attempt(conn, "it")
    assert last is not None
    assert last.outcome == "died"
    job = await queue.claim_next(conn, ["a"], **ME)
    assert job is not None
    assert (job.claim.n, job.claim.barren) == (2, 1)


async def test_whoever_has_just_connected_judges_nobody_by_the_clock(dsn: str, conn: Connection) -> None:
    await queue.start(conn, "a", None, run_id="it")
    await take(conn, lease=0.05)
    until = await conn.fetchval("SELECT lease_expires_at FROM twiceshy.run")
    while await conn.fetchval("SELECT clock_timestamp()") <= until:
        await asyncio.sleep(0.01)
    assert await queue.requeue_silent(conn, lease=3600.0, backoff=1.0) is None
    assert await status(conn, "it") is RunStatus.RUNNING
    assert await queue.requeue_silent(conn, lease=0.01, backoff=1.0) == "it"


async def test_a_run_that_is_not_for_workers_is_left_to_its_launcher(conn: Connection) -> None:
    await runs.create(conn, "it", agent="a")
    await runs.claim(conn, "it", kind="launcher", host="here", folder="/state", lease=30.0)
    await at(conn, 1000)
    assert await queue.requeue_silent(conn, lease=30.0, backoff=1.0) is None
    assert await queue.requeue_of_dead(conn, ["w1"], **PLACE) is None


async def test_a_lock_proves_the_death_of_its_own_worker_at_once(conn: Connection) -> None:
    for name, worker, host in (("dead", "w1", "here"), ("alive", "w2", "here"), ("far", "w1", "there")):
        await queue.start(conn, "a", None, run_id=name)
        assert await take(conn, worker=worker, host=host) == name
    assert await queue.is_owner(conn, "w1", host="here", folder="/state")
    assert await queue.requeue_of_dead(conn, ["w1"], **PLACE | {"folder": "/other"}) is None
    assert await queue.requeue_of_dead(conn, ["w1"], **PLACE) == "dead"
    assert await queue.requeue_of_dead(conn, ["w1"], **PLACE) is None
    assert not await queue.is_owner(conn, "w1", host="here", folder="/state")
    assert [await status(conn, run) for run in ("dead", "alive", "far")] == ["queued", "running", "running"]


async def test_orphans_are_queued_once_by_many_at_once(dsn: str) -> None:
    async with many(dsn, 10) as connections:
        first = connections[0]
        started = {await queue.start(first, "a", None) for _ in range(50)}
        while await take(first):
            pass

        async def work(connection: Connection) -> list[str]:
            await at(connection, 100)
            found = []
            while run := await queue.requeue_silent(connection, lease=30.0, backoff=1.0):
                found.append(run)
            return found

        found = [run for each in await asyncio.gather(*map(work, connections)) for run in each]
        assert sorted(found) == sorted(started)


async def test_deaths_without_a_new_step_make_the_pause_longer(conn: Connection) -> None:
    await queue.start(conn, "a", None, run_id="it")
    now, pauses = 0.0, []
    for _ in range(4):
        assert await take(conn) == "it"
        now += 100
        await at(conn, now)
        await queue.requeue_silent(conn, lease=30.0, backoff=8.0)
        row = await runs.get_run(conn, "it")
        pauses.append((row.not_before - row.changed_at).total_seconds())
        now += 100
        await at(conn, now)
    assert pauses[0] < 1
    assert all(4 * 2**n <= pause <= 8.1 * 2**n for n, pause in enumerate(pauses[1:]))
