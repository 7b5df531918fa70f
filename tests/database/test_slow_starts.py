"""What starts an agent may take longer than a lease: the run stays its launcher's, unless it was taken away."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, cast

import pytest

from runtime import runs, verbs
from runtime.database import connect
from runtime.keeping import Keeping
from runtime.launch.agent import Agent, CannotStart, Listener
from runtime.launch.attempt import Attempt, Why
from runtime.launch.patient import Patient
from runtime.launch.signals import Signals
from runtime.launch.terminal import Terminal
from runtime.settings import Settings

SETTINGS = Settings(lease=3.0, poll=0.05)


class Slow:
    """A program whose start takes as long as *work* does."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self.work = work
        self.cancelled = False

    async def start(self, env: Mapping[str, str], ignored: frozenset[int], listener: Listener) -> Agent:
        try:
            await self.work()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        raise CannotStart("that took its time")


class NoSidecar:
    proxy = "127.0.0.1:9"
    sidecar = "s"
    dsn = "postgresql://127.0.0.1:9/none"


@pytest.fixture
async def connection(dsn: str) -> AsyncIterator[Any]:
    made = await connect(dsn, name="test")
    yield made
    await made.close()


async def attempt(dsn: str, connection: Any, slow: Slow) -> Attempt:
    run = await runs.create(connection, "r")
    claim = await runs.claim(connection, run, kind="launcher", host="h", folder="f", lease=SETTINGS.lease)
    signals = Signals(Terminal(-1), frozenset())
    patient = Patient(lambda: dsn, "run", lambda _: None)
    return Attempt(SETTINGS, claim, slow, cast(Keeping, NoSidecar()), patient, signals)


async def until(connection: Any, statement: str) -> None:
    async with asyncio.timeout(30):
        while not await connection.fetchval(statement):
            await asyncio.sleep(0.05)


@pytest.mark.check_all
async def test_the_lease_is_renewed_while_the_agent_starts(dsn: str, connection: Any) -> None:
    own = await connect(dsn, name="test")
    claimed = "(SELECT started_at FROM twiceshy.attempt)"

    async def two_leases() -> None:
        await until(own, f"SELECT now() > {claimed} + interval '6 s'")
        assert await own.fetchval("SELECT lease_expires_at > now() FROM twiceshy.run")

    made = await attempt(dsn, connection, Slow(two_leases))
    with pytest.raises(CannotStart):
        await made.run()
    await made.patient.close()
    await own.close()


@pytest.mark.parametrize(("lost", "why"), [(True, Why.LOST), (False, Why.STOPPED)])
async def test_who_has_lost_his_run_starts_nothing(dsn: str, connection: Any, lost: bool, why: Why) -> None:
    slow = Slow(lambda: asyncio.sleep(60))
    made = await attempt(dsn, connection, slow)
    running = asyncio.create_task(made.run())
    await asyncio.sleep(0)
    if lost:
        await runs.claim(connection, "r", kind="launcher", host="h", folder="f", lease=SETTINGS.lease, proved_dead=True)
    else:
        await verbs.cancel(connection, "r")
    ended = await asyncio.wait_for(running, 30)
    assert (ended.why, ended.exit, slow.cancelled) == (why, None, True)
    await made.patient.close()


async def test_who_was_told_to_stop_starts_nothing(dsn: str, connection: Any) -> None:
    slow = Slow(lambda: asyncio.sleep(60))
    made = await attempt(dsn, connection, slow)
    made.signals.enough.set()
    assert (await asyncio.wait_for(made.run(), 30)).why is Why.INTERRUPTED
    await made.patient.close()
