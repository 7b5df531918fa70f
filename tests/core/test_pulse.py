"""The sidecar's own lease (DESIGN §3.5, §5)."""

import asyncio

import pytest

from proxy.pulse import Pulse
from runtime.errors import DatabaseAway


async def until_over(pulse: Pulse) -> None:
    while pulse.alive():
        await asyncio.sleep(0.001)


async def test_a_lease_that_had_ended_is_believed_again_only_when_it_is_known_whose_the_runs_are() -> None:
    known = asyncio.Event()

    async def renew() -> bool:
        assert not pulse.alive()
        await known.wait()
        assert not pulse.alive()
        return True

    pulse = Pulse(10.0, renew)
    pulse._confirmed -= 10.0
    beating = asyncio.create_task(pulse.beat())
    await asyncio.sleep(0)
    assert not pulse.alive()
    known.set()
    await beating
    assert pulse.alive()


async def test_a_lease_that_ended_is_renewed_when_it_is_needed_by_one_of_many() -> None:
    asked = 0

    async def renew() -> bool:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return True

    pulse = Pulse(10.0, renew)
    await pulse.revive()
    assert asked == 0
    pulse._confirmed -= 10.0
    await asyncio.gather(*(pulse.revive() for _ in range(5)))
    assert (asked, pulse.alive()) == (1, True)


async def test_who_was_declared_dead_stays_dead() -> None:
    async def renew() -> bool:
        return False

    pulse = Pulse(10.0, renew)
    pulse._confirmed -= 10.0
    await pulse.revive()
    assert not pulse.alive()


async def test_a_database_that_is_away_is_said_to_be() -> None:
    async def renew() -> bool:
        raise DatabaseAway("gone")

    pulse = Pulse(10.0, renew)
    pulse._confirmed -= 10.0
    with pytest.raises(DatabaseAway):
        await pulse.revive()
    assert not pulse.alive()
