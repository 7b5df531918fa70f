"""Approvals at twiceshy.internal: a wait that a person ends, recorded once and the same in every attempt."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime import approvals
from runtime.entries import Decision, Verdict
from runtime.errors import Decided, NotNow
from tests.proxy.waiting import AGENT_API, ask, call, send, until_due, until_open
from tests.stack import Stack, stack

WAIT = "/approvals/manager/wait"


@pytest.fixture(scope="module")
def module_stack(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A sidecar that looks often, and parks nothing."""
    with stack(module_dsn, tmp_path_factory.mktemp("stack"), poll=0.1, hold=60) as made:
        yield made


def decide(stack: Stack, run: str, decision: Verdict = "approve", named: str = "manager", **words: str) -> Decision:
    decided = call(stack, approvals.decide, run, named, decision, **words)
    assert isinstance(decided, Decision)
    return decided


def test_a_person_decides_and_it_is_recorded(shared: Stack) -> None:
    attempt = shared.claim("decided")
    body = b'{"request": {"amount":  1e400, "to": "\\u0000"}, "timeout": 60}'
    waiting = attempt.in_background("POST", AGENT_API + WAIT, body)
    until_open(shared, "decided")
    send(shared, "decided", "manager", b'{"decision": "approve"}')
    [opened] = call(shared, approvals.open_ones, run="decided")
    assert (opened.name, opened.request) == ("manager", b'{"amount":  1e400, "to": "\\u0000"}')
    decided = decide(shared, "decided", "decline", by="ann", comment="too much")
    reply = waiting.result()
    said = reply.json()["approval"]
    assert (said["id"], said["name"], said["decision"]) == (reply.step, "manager", "decline")
    assert (said["by"], said["comment"]) == ("ann", "too much")
    assert decided.id == reply.step
    assert attempt.ask("POST", AGENT_API + WAIT, b'{"timeout": 0}').json() == {"timeout": True}
    assert shared.claim("decided").ask("POST", AGENT_API + WAIT, body).body == reply.body


def test_each_wait_is_an_approval_of_its_own(shared: Stack) -> None:
    attempt = shared.claim("two")
    waits = [attempt.in_background("POST", AGENT_API + WAIT, {"timeout": 60}, {"Twiceshy-Step": key}) for key in "ab"]
    until_open(shared, "two", 2)
    with pytest.raises(NotNow, match="more than once"):
        decide(shared, "two")
    verdicts: list[Verdict] = ["approve", "decline"]

    def one(n: int) -> Decision:
        try:
            return decide(shared, "two", verdicts[n % 2], "a", by=str(n))
        except Decided as error:
            return error.first

    with ThreadPoolExecutor(10) as threads:
        told = set(threads.map(one, range(10)))
    [first] = told
    assert waits[0].result().json()["approval"]["by"] == first.by
    assert [each.id for each in call(shared, approvals.open_ones, run="two")] == ["b"]
    decide(shared, "two", "approve", "b")
    second = waits[1].result()
    later = shared.claim("two")
    assert ask(later, WAIT, {"timeout": 60}, "b").body == second.body
    assert ask(later, WAIT, {"timeout": 60}, "a").json()["approval"]["by"] == first.by


def test_a_timeout_and_a_decision_at_the_same_instant(shared: Stack) -> None:
    attempt = shared.claim("instant")
    ends = {}
    for n in range(6):
        waiting = attempt.in_background("POST", AGENT_API + WAIT, {"timeout": 0.1}, {"Twiceshy-Step": f"w{n}"})
        until_due(shared, "instant", f"w{n}")
        try:
            decided: Decision | None = decide(shared, "instant", named=f"w{n}")
        except NotNow:
            decided = None
        said = ends[f"w{n}"] = waiting.result().json()
        assert said == {"timeout": True} if decided is None else said["approval"]["id"] == decided.id
    later = shared.claim("instant")
    assert {key: ask(later, WAIT, {"timeout": 0.1}, key).json() for key in ends} == ends


@pytest.mark.check_all
@pytest.mark.parametrize("point", ["before-record", "recorded"])
@pytest.mark.parametrize("how", ["decided", "not in time"])
def test_a_sidecar_that_dies_around_the_record_changes_nothing(dsn: str, tmp_path: Path, point: str, how: str) -> None:
    with stack(dsn, tmp_path, poll=0.1, hold=60, failpoint=f"{point}:1") as made:
        attempt = made.claim("r")
        body = {"timeout": 60 if how == "decided" else 0.2}
        waiting = attempt.in_background("POST", AGENT_API + WAIT, body)
        if how == "decided":
            until_open(made, "r")
            decide(made, "r", by="ann")
        with pytest.raises(OSError):
            waiting.result()
        del made.settings["failpoint"]
        made.restart()
        if how == "not in time":
            with pytest.raises(NotNow, match="not decided in time"):
                decide(made, "r")
        said = ask(made.claim("r"), WAIT, body)
        assert said.json() == {"timeout": True} if how == "not in time" else said.json()["approval"]["by"] == "ann"
        assert ask(made.claim("r"), WAIT, body).body == said.body


def test_what_is_malformed_is_refused(shared: Stack) -> None:
    attempt = shared.claim("malformed")
    for path, body in (
        (WAIT, {"timeout": -1}), (WAIT, {"by": "me"}), ("/approvals/a%3Ab/wait", {}), ("/approvals//wait", {}),
    ):  # fmt: skip
        reply = ask(attempt, path, body)
        assert (reply.status, reply.error) == (400, "bad-request"), (path, body)
    assert shared.fetch("SELECT FROM twiceshy.step WHERE run_id = 'malformed'") == []
