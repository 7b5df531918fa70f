"""A program's entry, and functions that are steps, against a real sidecar."""

import asyncio
import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import twiceshy
from tests.stack import PROJECT, Attempt, Stack
from twiceshy import aio

Begin = Callable[..., Attempt]


@pytest.fixture
def given(begin: Begin, run: str, one_stack: Stack) -> Callable[[bytes], Attempt]:
    def given(text: bytes) -> Attempt:
        attempt = begin()
        one_stack.fetch("UPDATE twiceshy.run SET input = $2 WHERE id = $1", run, text)
        return attempt

    return given


def result(stack: Stack, run: str) -> Any:
    return stack.fetch("SELECT result FROM twiceshy.run WHERE id = $1", run)[0]["result"]


# ---- agents


def test_an_agent_is_given_the_input_and_returns_the_result(
    given: Callable[[bytes], Attempt], run: str, one_stack: Stack
) -> None:
    @twiceshy.agent
    def double(number: int) -> dict[str, int]:
        return {"twice": 2 * number}

    given(b"21")
    double.main()
    assert result(one_stack, run) == b'{"twice": 42}'
    assert (double(3), double.__name__) == ({"twice": 6}, "double")


def test_an_asynchronous_agent(given: Callable[[bytes], Attempt], run: str, one_stack: Stack) -> None:
    @twiceshy.agent
    async def count(words: list[str]) -> int:
        return sum(await asyncio.gather(*(aio.step("count", len, word) for word in words)))

    given(b'["a", "bc"]')
    count.main()
    assert result(one_stack, run) == b"3"


def test_an_agent_without_input_and_without_a_value_of_its_own(begin: Begin, run: str, one_stack: Stack) -> None:
    @twiceshy.agent
    def reports() -> None:
        twiceshy.set_result("so far")

    begin()
    reports.main()
    assert result(one_stack, run) == b'"so far"'


def test_an_agent_by_its_name(given: Callable[[bytes], Attempt], run: str, one_stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("def refund(given):\n    return given['order']\n")
    given(b'{"order": "A-1"}')
    command = [sys.executable, "-m", "twiceshy"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    ended = subprocess.run([*command, "shop:refund"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert result(one_stack, run) == b'"A-1"'
    for words in ([], ["shop"]):
        assert subprocess.run([*command, *words], cwd=tmp_path, env=environment, capture_output=True).returncode == 1


# ---- activities


async def test_a_function_that_only_makes_a_coroutine_is_awaited(begin: Begin) -> None:
    async def work(n: int) -> int:
        return n + 1

    await asyncio.to_thread(begin)
    assert await aio.step("wrapped", lambda n: work(int(n)), 1) == 2
    assert await aio.step("partial", functools.partial(work, 2)) == 3


def test_an_activity_is_a_step_of_its_name(begin: Begin) -> None:
    calls = []

    @twiceshy.activity
    def charge(order: str, cents: int = 5, *, currency: str = "eur") -> Any:
        """Charge it."""
        calls.append(order)
        return order, cents, currency

    for _ in range(2):
        begin()
        assert [charge("A"), charge("B", cents=7), charge("C", currency="usd")] == [
            ["A", 5, "eur"], ["B", 7, "eur"], ["C", 5, "usd"],
        ]  # fmt: skip
    assert calls == ["A", "B", "C"]
    assert (charge.__name__, charge.__doc__) == ("charge", "Charge it.")


async def test_an_asynchronous_activity(begin: Begin) -> None:
    calls = []

    @twiceshy.activity(name="counts", at_most_once=True)
    async def count(word: str, *, times: int = 1) -> int:
        calls.append(word)
        await asyncio.sleep(0)
        return len(word) * times

    assert inspect.iscoroutinefunction(count)
    for _ in range(2):
        await asyncio.to_thread(begin)
        assert [*await asyncio.gather(count("a"), count("bc", times=2))] == [1, 4]
    assert sorted(calls) == ["a", "bc"]
