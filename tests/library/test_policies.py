"""How often a step is tried, and for how long, against a real sidecar."""

import asyncio
import time
from collections.abc import Callable

import pytest

import twiceshy
from tests.stack import Attempt
from twiceshy import aio, steps

Begin = Callable[..., Attempt]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "PAUSE", 0.01)


def test_a_step_is_tried_until_it_works(begin: Begin) -> None:
    keys = []

    def work() -> str:
        keys.append(twiceshy.idempotency_key())
        if len(keys) < 3:
            raise OSError("not yet")
        return "at last"

    for _ in range(2):
        begin()
        assert twiceshy.step("a", work, max_tries=5) == "at last"
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_what_is_too_large_to_be_kept_was_done_all_the_same(begin: Begin) -> None:
    calls = []

    def output() -> str:
        calls.append(1)
        return "x" * (2 << 20)

    def words() -> None:
        calls.append(1)
        raise ValueError("x" * (2 << 20))

    for _ in range(2):
        begin()
        with pytest.raises(twiceshy.StepFailed, match="payload_max"):
            twiceshy.step("output", output)
        with pytest.raises(twiceshy.StepFailed, match=r"ValueError: xxx"):
            twiceshy.step("words", words)
    assert len(calls) == 2


def test_the_last_failure_counts(begin: Begin) -> None:
    calls = []

    def work() -> None:
        calls.append(1)
        raise OSError(f"number {len(calls)}")

    for _ in range(2):
        begin()
        with pytest.raises(twiceshy.StepFailed, match="step a: OSError: number 3"):
            twiceshy.step("a", work, max_tries=3)
    assert len(calls) == 3


def test_progress_goes_to_the_next_try(begin: Begin) -> None:
    seen = []

    def work() -> None:
        seen.append(twiceshy.progress(0))
        twiceshy.heartbeat(seen[-1] + 10)
        raise OSError

    begin()
    with pytest.raises(twiceshy.StepFailed):
        twiceshy.step("a", work, max_tries=3, heartbeat_timeout=60)
    assert seen == [0, 10, 20]


async def test_an_asynchronous_try_that_takes_too_long_is_cancelled(begin: Begin) -> None:
    await asyncio.to_thread(begin)
    ends = []

    async def work() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ends.append(1)

    with pytest.raises(twiceshy.StepFailed, match="TimeoutError"):
        await aio.step("slow", work, timeout=0.05, max_tries=2)
    assert len(ends) == 2
    assert await aio.random() < 1  # the attempt goes on


def test_a_blocking_try_that_takes_too_long_ends_the_attempt(begin: Begin) -> None:
    begin()
    with pytest.raises(twiceshy.Stopped, match=r"took longer than timeout = 0\.2 s"):
        twiceshy.step("slow", lambda: time.sleep(0.6), timeout=0.2)


def test_a_step_that_is_not_heard_of_ends_the_attempt(begin: Begin) -> None:
    begin()
    with pytest.raises(twiceshy.Stopped, match="was not heard of for heartbeat_timeout"):
        twiceshy.step("slow", lambda: time.sleep(0.6), heartbeat_timeout=0.2)
