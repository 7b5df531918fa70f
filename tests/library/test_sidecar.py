"""The library against a real sidecar: each attempt is this process under another token."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import twiceshy
from runtime import events
from tests.apart import ask_database
from tests.stack import Attempt, Stack
from twiceshy import aio

Begin = Callable[..., Attempt]


def test_values_are_the_same_in_the_next_attempt(begin: Begin) -> None:
    begin()
    first = [twiceshy.now(), twiceshy.random(), twiceshy.uuid4(), twiceshy.random()]
    begin()
    assert [twiceshy.now(), twiceshy.random(), twiceshy.uuid4(), twiceshy.random()] == first
    assert first[1] != first[3]


def test_a_step_is_done_once_and_given_as_json(begin: Begin) -> None:
    calls = []

    def work(n: int) -> tuple[int, dict[int, str]]:
        calls.append((n, twiceshy.idempotency_key()))
        return n, {1: "x"}

    begin()
    assert [twiceshy.step("a", work, 1), twiceshy.step("a", work, 2)] == [[1, {"1": "x"}], [2, {"1": "x"}]]
    begin()
    assert [twiceshy.step("a", work, 1), twiceshy.step("a", work, 2)] == [[1, {"1": "x"}], [2, {"1": "x"}]]
    assert [n for n, _ in calls] == [1, 2]
    assert len({key for _, key in calls}) == 2


def test_a_failure_is_told_again(begin: Begin) -> None:
    calls = []

    def work() -> None:
        calls.append(1)
        raise ValueError("no such order")

    for _ in range(2):
        begin()
        with pytest.raises(twiceshy.StepFailed, match="ValueError: no such order"):
            twiceshy.step("a", work)
    assert len(calls) == 1


def test_progress_and_key_go_to_the_next_attempt(begin: Begin) -> None:
    seen = []

    def work() -> str:
        seen.append((twiceshy.progress(0), twiceshy.idempotency_key()))
        twiceshy.heartbeat(len(seen))
        if len(seen) == 1:
            raise KeyboardInterrupt  # as a killed process: nothing is handed in
        return "done"

    begin()
    with pytest.raises(KeyboardInterrupt):
        twiceshy.step("a", work)
    begin()
    assert twiceshy.step("a", work) == "done"
    assert [progress for progress, _ in seen] == [0, 1]
    assert seen[0][1] == seen[1][1]


def test_at_most_once_is_asked_about(begin: Begin, one_stack: Stack) -> None:
    def work() -> None:
        raise KeyboardInterrupt

    begin()
    with pytest.raises(KeyboardInterrupt):
        twiceshy.step("mail", work, at_most_once=True)
    begin()
    with pytest.raises(twiceshy.Ambiguous, match="mail") as stopped:
        twiceshy.step("mail", work, at_most_once=True)
    assert stopped.value.code == str(stopped.value)  # what Python prints at the end


def test_a_step_with_a_key_of_its_own_is_that_step(begin: Begin) -> None:
    calls: list[int] = []
    begin()
    for _ in range(2):  # asked for again in the same attempt, it is the same one
        twiceshy.step("a", calls.append, 1, key="mine")
    begin()
    twiceshy.step("a", calls.append, 1, key="mine")
    assert calls == [1]
    with pytest.raises(twiceshy.Diverged, match="mine"):
        twiceshy.step("a", calls.append, 2, key="mine")


def test_another_attempt_ends_this_one(begin: Begin, run: str, one_stack: Stack) -> None:
    begin()
    twiceshy.now()
    one_stack.claim(run)
    with pytest.raises(twiceshy.Fenced, match=run):
        twiceshy.random()


def test_what_is_not_taken_is_no_end(begin: Begin) -> None:
    begin()
    with pytest.raises(twiceshy.Refused, match="a number of seconds"):
        twiceshy.sleep(-1)
    assert 0 <= twiceshy.random() < 1


def test_input_and_result(begin: Begin, run: str, one_stack: Stack) -> None:
    begin()
    assert twiceshy.input() is None
    twiceshy.set_result({"a": None})
    assert one_stack.fetch("SELECT result FROM twiceshy.run WHERE id = $1", run)[0]["result"] == b'{"a": null}'


def test_steps_in_threads(begin: Begin) -> None:
    calls = []

    def work(n: int) -> int:
        calls.append(n)
        return n * n

    for _ in range(2):
        begin()
        with ThreadPoolExecutor(8) as threads:
            squares = list(threads.map(lambda n: twiceshy.step("square", work, n), range(24)))
        assert squares == [n * n for n in range(24)]
    assert sorted(calls) == list(range(24))


def test_an_event_is_waited_for_in_a_thread(begin: Begin, one_stack: Stack, run: str) -> None:
    begin()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(twiceshy.wait_event, "go")
        assert twiceshy.random() < 1
        send(one_stack, run, "go", b'{"n": 1}')
        assert waiting.result(20).payload == {"n": 1}
    with pytest.raises(twiceshy.TimedOut):
        twiceshy.wait_event("go", timeout=0.05)


# ---- awaited


async def test_gathered_steps_are_each_done_once(begin: Begin) -> None:
    calls: list[int] = []
    together = asyncio.Barrier(12)

    async def work(n: int) -> int:
        await together.wait()  # they are under way at the same time
        calls.append(n)
        return n * n

    for _ in range(2):
        await asyncio.to_thread(begin)
        squares = await asyncio.gather(*(aio.step("square", work, n) for n in range(12)))
        assert squares == [n * n for n in range(12)]
    assert sorted(calls) == list(range(12))


async def test_equal_steps_at_the_same_time_are_steps_of_their_own(begin: Begin) -> None:
    calls: list[int] = []

    async def work() -> int:
        calls.append(1)
        return len(calls)

    await asyncio.to_thread(begin)
    first = await asyncio.gather(*(aio.step("draw", work) for _ in range(5)))
    await asyncio.to_thread(begin)
    assert sorted(await asyncio.gather(*(aio.step("draw", work) for _ in range(5)))) == sorted(first) == [1, 2, 3, 4, 5]


async def test_functions_that_block_do_not_stop_the_loop(begin: Begin) -> None:
    await asyncio.to_thread(begin)
    gate = threading.Event()

    def blocks() -> str:
        assert gate.wait(20)
        return f"{twiceshy.progress('none')} of {threading.current_thread() is threading.main_thread()}"

    async def opens() -> None:
        gate.set()

    text, nothing = await asyncio.gather(aio.step("blocks", blocks), aio.step("opens", opens))
    assert (text, nothing) == ("none of False", None)


async def test_a_wait_that_is_given_up_leaves_nothing_behind(begin: Begin, run: str, one_stack: Stack) -> None:
    await asyncio.to_thread(begin)
    before = set(asyncio.all_tasks()), sockets()
    for wait in (aio.wait_event("go"), aio.sleep(600), aio.wait_event("other", timeout=600)):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait, 0.1)
    for _ in range(100):
        if (set(asyncio.all_tasks()), sockets()) == before:
            break
        await asyncio.sleep(0.01)
    assert (set(asyncio.all_tasks()), sockets()) == before
    # And nobody takes the event that it waited for.
    await asyncio.to_thread(send, one_stack, run, "go", b"7")
    assert (await aio.wait_event("go")).payload == 7


async def test_one_of_many_waits_comes_first(begin: Begin, run: str, one_stack: Stack) -> None:
    await asyncio.to_thread(begin)
    waits = [asyncio.create_task(aio.wait_event(f"e{n}")) for n in range(40)]
    await aio.random()
    await asyncio.to_thread(send, one_stack, run, "e7", b"1")
    done, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    assert [each.result().name for each in done] == ["e7"]
    for each in left:
        each.cancel()
    assert await asyncio.gather(*left, return_exceptions=True)


async def test_a_step_whose_task_was_cancelled_is_let_go_before_the_next_wait(begin: Begin) -> None:
    await asyncio.to_thread(begin)
    calls = []

    async def work() -> None:
        calls.append(1)
        await asyncio.sleep(600)

    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(aio.step("slow", work), 0.2)
    await asyncio.to_thread(begin)  # this attempt has died right then: the next one does the step again
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(aio.step("slow", work), 0.2)
    await aio.sleep(0)
    await asyncio.to_thread(begin)
    with pytest.raises(asyncio.TimeoutError):  # the program sees what it saw before
        await asyncio.wait_for(aio.step("slow", work), 0.2)
    await aio.sleep(0)
    await asyncio.to_thread(begin)
    with pytest.raises(twiceshy.StepFailed, match="its task was cancelled"):
        await asyncio.to_thread(twiceshy.step, "slow", work)  # here nothing can be cancelled
    assert len(calls) == 2


async def test_a_named_step_that_was_cancelled_has_failed_when_it_is_asked_for_again(begin: Begin) -> None:
    for _ in range(2):
        await asyncio.to_thread(begin)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(aio.step("slow", asyncio.sleep, 600, key="slow"), 0.2)
        await aio.sleep(0)
        with pytest.raises(twiceshy.StepFailed, match="its task was cancelled"):
            await aio.step("slow", asyncio.sleep, 600, key="slow")


async def test_a_heartbeat_from_a_task_within_a_step(begin: Begin) -> None:
    await asyncio.to_thread(begin)

    async def work() -> Any:
        await asyncio.gather(aio.heartbeat({"n": 1}), asyncio.to_thread(twiceshy.heartbeat))
        return twiceshy.progress()

    assert await aio.step("beats", work) == {"n": 1}


async def test_an_asynchronous_function_is_not_called_by_the_blocking_step(begin: Begin) -> None:
    await asyncio.to_thread(begin)

    async def work() -> None: ...

    with pytest.raises(twiceshy.StepFailed, match=r"await twiceshy\.aio\.step"):
        await asyncio.to_thread(twiceshy.step, "a", work)


# ---- without twiceshy


def test_outside_of_twiceshy_the_error_says_how_to_start() -> None:
    assert "HTTP_PROXY" not in os.environ
    with pytest.raises(twiceshy.NotUnderTwiceshy, match="twiceshy run"):
        twiceshy.now()


def sockets() -> int:
    """How many sockets this process has open."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(each).startswith("socket:")
    return found


def send(stack: Stack, run: str, name: str, payload: bytes) -> None:
    ask_database(stack.dsn, events.send, run, name, payload, limit=1000)
