"""POST /continue at twiceshy.internal: the run is done and goes on as another, and its agent should end."""

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import kin, verbs
from tests.proxy.waiting import AGENT_API, ask, call, send, until_open
from tests.stack import Attempt, Stack, stack


@pytest.fixture(scope="module")
def module_stack(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(module_dsn, tmp_path_factory.mktemp("stack"), poll=0.1, hold=60, continue_after=3) as made:
        yield made


def about(attempt: Attempt) -> dict[str, Any]:
    found: dict[str, Any] = attempt.ask("GET", AGENT_API + "/run").json()
    return found


def successors(stack: Stack, run: str) -> list[str]:
    return [row["id"] for row in stack.fetch("SELECT id FROM twiceshy.run WHERE continued_from = $1", run)]


def test_a_run_goes_on_with_another_input_and_no_history(shared: Stack) -> None:
    attempt = shared.claim("old")
    for _ in range(2):
        ask(attempt, "/now")
    send(shared, "old", "read", id="e1")
    send(shared, "old", "unread", id="e2")
    ask(attempt, "/events/read/wait")
    body = b'{"input": {"n":  1e400}}'
    reply = attempt.ask("POST", AGENT_API + "/continue", body)
    [successor] = successors(shared, "old")
    assert reply.json() == {"run": successor}
    # However it is asked again, it is told the same; whatever else it asks is refused.
    assert attempt.ask("POST", AGENT_API + "/continue", body).body == reply.body
    for method, path in (("POST", "/now"), ("GET", "/run"), ("PUT", "/result")):
        refused = attempt.ask(method, AGENT_API + path, b"{}")
        assert (refused.status, refused.error) == (423, "continued")
        assert f"it goes on as run {successor}" in refused.json()["detail"]
    assert attempt.ask("GET", shared.url("/orders")).error == "continued"
    shared.restart()
    again = Attempt("old", attempt.token, shared.sidecar.port)
    assert again.ask("POST", AGENT_API + "/continue", body).body == reply.body
    assert shared.end(attempt, "failed") == "done"
    assert successors(shared, "old") == [successor]

    later = shared.claim(successor)
    assert b'"input": {"n":  1e400}' in later.ask("GET", AGENT_API + "/run").body
    assert {**about(later), "input": 0} == {
        "run": successor, "attempt": 1, "agent": "", "steps": 0, "should_continue_as_new": False,
        "continued_from": "old", "input": 0,
    }  # fmt: skip
    assert ask(later, "/events/unread/wait", {"timeout": 0}).json()["event"]["id"] == "e2"
    send(shared, "old", "unread", id="e3")
    assert ask(later, "/events/unread/wait").json()["event"]["id"] == "e3"
    assert not send(shared, "old", "read", id="e1").fresh
    assert ask(later, "/events/read/wait", {"timeout": 0}).json() == {"timeout": True}


def test_a_long_history_is_hinted_at(shared: Stack) -> None:
    attempt = shared.claim("long")
    assert about(attempt)["should_continue_as_new"] is False
    for _ in range(3):
        ask(attempt, "/now")
    assert (about(attempt)["steps"], about(attempt)["should_continue_as_new"]) == (3, True)
    # Who is started again is told so at the same place, when it knows again what it did.
    again = shared.claim("long")
    for had in range(4):
        assert (about(again)["steps"], about(again)["should_continue_as_new"]) == (3, had == 3)
        ask(again, "/now")


def test_what_nobody_has_read_is_no_history(shared: Stack) -> None:
    """It would go on with the successor, which would be told the same before it has read any of it."""
    busy = shared.claim("busy")
    for _ in range(3):
        send(shared, "busy", "go")
    for had in range(4):
        assert about(busy)["should_continue_as_new"] is (had == 3)
        ask(busy, "/events/go/wait", {"timeout": 0})


def test_what_left_ends_first_and_a_wait_does_not_hold_it_up(shared: Stack) -> None:
    attempt = shared.claim("busy-still")
    shared.sandbox.fault(match={"path": "/orders"}, hold="order")
    order = {"lines": [{"sku": "rice", "count": 1}], "total": 1}
    call_out = attempt.in_background("POST", shared.url("/orders"), order)
    waiting = attempt.in_background("POST", AGENT_API + "/events/never/wait")
    until_open(shared, "busy-still", 2)
    going = attempt.in_background("POST", AGENT_API + "/continue")
    assert about(attempt)["steps"] == 2
    assert successors(shared, "busy-still") == []
    shared.sandbox.release("order")
    [successor] = [going.result().json()["run"]]
    assert call_out.result().status < 300
    assert waiting.result().error == "continued"
    assert successors(shared, "busy-still") == [successor]


def test_what_is_malformed_or_too_late_continues_nothing(shared: Stack) -> None:
    attempt = shared.claim("not")
    for body in (b"[]", b"{", b'{"input": NaN}', b'{"run": "mine"}'):
        assert attempt.ask("POST", AGENT_API + "/continue", body).error == "bad-request"
    later = shared.claim("not")
    assert attempt.ask("POST", AGENT_API + "/continue").error == "fenced"
    call(shared, verbs.cancel, "not")
    assert later.ask("POST", AGENT_API + "/continue").error == "not-running"
    assert successors(shared, "not") == []


@pytest.mark.check_all
@pytest.mark.parametrize("point", ["before-record", "recorded"])
def test_a_sidecar_that_dies_around_it_leaves_one_successor_or_none(dsn: str, tmp_path: Path, point: str) -> None:
    with stack(dsn, tmp_path, poll=0.1, failpoint=f"{point}:1") as made:
        attempt = made.claim("r")
        with pytest.raises((OSError, http.client.HTTPException)):
            attempt.ask("POST", AGENT_API + "/continue", b'{"input": 1}')
        del made.settings["failpoint"]
        made.restart()
        if point == "recorded":
            told = Attempt("r", attempt.token, made.sidecar.port).ask("POST", AGENT_API + "/continue", b'{"input": 1}')
            assert made.end(attempt, "died") == "done"
        else:
            assert successors(made, "r") == []
            told = made.claim("r").ask("POST", AGENT_API + "/continue", b'{"input": 1}')
        assert successors(made, "r") == [told.json()["run"]]
        assert call(made, kin.newest, "r") == told.json()["run"]
