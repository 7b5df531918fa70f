"""What the launcher makes of signals, beyond what a real terminal shows."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from runtime.launch.agent import Agent, Exit
from runtime.launch.signals import Signals
from runtime.launch.terminal import Terminal


@pytest.fixture
async def signals() -> AsyncIterator[Signals]:
    null = os.open(os.devnull, os.O_RDONLY)
    made = Signals(Terminal(null), frozenset(), grace=0.05)
    made.install()
    yield made
    if made.agent is not None:
        await made.agent.end(0)
    made.close()
    os.close(null)


async def start(signals: Signals, script: str) -> Agent:
    """An agent that has said that it is ready, by a file descriptor of its own."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    signals.agent = await Agent.start(
        ["sh", "-c", f"{script}; echo >/dev/fd/{writing}; while :; do sleep 0.01; done"],
        os.environ,
        on_signal=signals.of_group,
    )
    os.close(writing)
    await asyncio.to_thread(os.read, reading, 1)
    os.close(reading)
    return signals.agent


async def test_an_agent_deaf_to_sigterm_is_ended_after_a_grace(signals: Signals) -> None:
    agent = await start(signals, "trap '' TERM")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(signals.enough.wait(), 10)
    assert not agent.exit.done()
    assert signals.interrupted_by() == signal.SIGTERM


async def test_sigint_is_the_agents_to_answer(signals: Signals) -> None:
    """One that goes on after it, and ends well much later, was not interrupted."""
    agent = await start(signals, "trap 'echo' INT")
    os.kill(os.getpid(), signal.SIGINT)
    while signals.interrupted_by(Exit(130)) is None:
        await asyncio.sleep(0.001)
    await asyncio.sleep(2 * signals.grace)
    assert not signals.enough.is_set()
    assert not agent.exit.done()
    assert signals.interrupted_by(Exit(0)) is None
    assert signals.interrupted_by(Exit(-signal.SIGINT)) == signal.SIGINT
    assert signals.interrupted_by(Exit(130)) == signal.SIGINT


async def test_a_signal_between_attempts_ends_the_wait(signals: Signals) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(signals.enough.wait(), 10)
    assert signals.interrupted_by() == signal.SIGINT


async def test_what_an_agent_does_to_its_own_group_is_its_own_affair(signals: Signals) -> None:
    agent = await start(signals, "true")
    agent.signal(signal.SIGTERM)
    assert await asyncio.wait_for(agent.exit, 10) == Exit(-signal.SIGTERM)
    assert signals.interrupted_by(await agent.exit) is None


async def test_what_was_ignored_stays_ignored() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    before = signal.getsignal(signal.SIGHUP)
    signals = Signals(Terminal(null), frozenset({signal.SIGHUP}))
    signals.install()
    assert signal.getsignal(signal.SIGHUP) == before
    signals.close()
    os.close(null)
