"""Answers that were sent and did not arrive: what is asked again is the same step, done and recorded once."""

from collections.abc import Callable
from typing import Any

import pytest

import twiceshy
from tests.stack import Attempt, Stack
from twiceshy import drive, wire

Begin = Callable[..., Attempt]


@pytest.fixture
def loses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on the first answer to each request is lost when it is here whole; to what it was lost."""
    ask = drive._ask
    lost: list[str] = []

    def loses(route: wire.Route, timeout: float | None) -> wire.Reply:
        reply = ask(route, timeout)
        line = route.data.split(b" HTTP/1.1", 1)[0].decode()
        if b"X-Stainless-Retry-Count" in route.data:
            return reply
        lost.append(line.replace("http://twiceshy.internal", ""))
        raise ConnectionResetError("lost")

    monkeypatch.setattr(drive, "_ask", loses)
    return lost


def test_values_waits_and_steps(
    begin: Begin, run: str, one_stack: Stack, loses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def work(n: int) -> list[Any]:
        calls.append(n)
        twiceshy.heartbeat({"n": n})
        return [n, twiceshy.idempotency_key()]

    def program() -> list[Any]:
        with pytest.raises(twiceshy.TimedOut):
            twiceshy.wait_event("never", timeout=0)
        twiceshy.sleep(0)
        steps = [twiceshy.step("a", work, n) for n in (1, 1, 2)]
        return [twiceshy.now(), twiceshy.random(), twiceshy.random(), twiceshy.uuid4(), *steps]

    begin()
    first = program()
    assert "POST /now" in loses
    assert "POST /steps" in loses
    assert sum(line.startswith("PUT /steps/") for line in loses) == 3
    monkeypatch.undo()  # all answers arrive
    begin()
    assert program() == first
    assert calls == [1, 1, 2]
    assert one_stack.fetch("SELECT count(*) AS n FROM twiceshy.step WHERE run_id = $1", run)[0]["n"] == 9


def test_tries(begin: Begin, loses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twiceshy.steps.PAUSE", 0.01)
    calls: list[int] = []

    def work() -> int:
        calls.append(1)
        if len(calls) < 3:
            raise OSError
        return 7

    begin()
    assert twiceshy.step("a", work, max_tries=9) == 7
    assert len(calls) == 3


def test_failures_and_results(begin: Begin, run: str, one_stack: Stack, loses: list[str]) -> None:
    def work() -> None:
        raise ValueError("no")

    for _ in range(2):
        begin()
        with pytest.raises(twiceshy.StepFailed, match="ValueError: no"):
            twiceshy.step("a", work)
        twiceshy.set_result(5)
    assert one_stack.fetch("SELECT result FROM twiceshy.run WHERE id = $1", run)[0]["result"] == b"5"
