"""A run that is named without a token by a process that cannot be read (DESIGN §2)."""

import contextlib
import http.client
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import NOBODY, scratch
from tests.proxy.speakers import (
    CHAT,
    INTERNAL,
    MAIL,
    RESULT,
    Form,
    Speaker,
    as_user,
    ask,
    forms,
    order,
    status,
    unreadable,
)
from tests.stack import Attempt, Reply, Stack, stack

# ---- a peer whose process cannot be read


@pytest.fixture(scope="module")
def strange_stack(module_dsn: str, request: pytest.FixtureRequest) -> Iterator[Stack]:
    with scratch("ts-") as folder, contextlib.ExitStack() as around:
        python = sys.executable
        if os.geteuid() == 0:
            python = as_user(NOBODY, request.getfixturevalue("python_of_nobody"), folder)
            (folder / "state").mkdir()
            os.chown(folder / "state", NOBODY, NOBODY)
        else:
            around.enter_context(unreadable())
        yield around.enter_context(stack(module_dsn, folder, python=python, lease=6, idle_timeout=1))


@pytest.fixture
def strange(strange_stack: Stack) -> Stack:
    """A stack whose sidecar may not look into our processes."""
    strange_stack.mark()
    return strange_stack


def step(name: str) -> dict[str, str]:
    return {"Twiceshy-Step": name}


@forms
def test_a_stranger_is_refused_unless_he_names_his_steps(strange: Stack, run: str, form: Form) -> None:
    def asked(method: str, path: str, body: Any = None, also: dict[str, str] | None = None) -> Reply:
        return ask(strange, form, run, None, method, path, body, also)

    for method, path, body in (("GET", "/pantry", None), ("POST", "/orders", order()), ("POST", "/email/send", MAIL)):
        reply = asked(method, path, body)
        assert (reply.status, reply.error) == (428, "no-attempt")
        for words in ("cannot be read", "Twiceshy-Step", f"twiceshy run --run {run}", f"twiceshy claim {run}"):
            assert words in reply.json()["detail"]
    assert strange.received() == []

    live = asked("POST", "/orders", order(), step("order"))
    assert (live.status, live.step) == (201, "order")
    assert asked("GET", "/pantry", None, step("look")).status == 200
    assert asked("POST", "/email/send", MAIL, step("mail")).status == 202
    assert asked("POST", "/orders", order()).error == "no-attempt"
    again = asked("POST", "/orders", order(), step("order"))
    assert again.body == live.body
    assert len(strange.effects()) == 2


def test_a_strangers_named_steps_outlive_sidecars(strange: Stack, run: str) -> None:
    me = Attempt(run, None, strange.sidecar.port)
    live = me.ask("POST", strange.url("/orders"), order(), step("order"))
    strange.sandbox.fault(match={"path": "/v1/chat/completions"}, hold=run)
    asking = me.in_background("POST", strange.url("/v1/chat/completions"), CHAT, step("model"))
    strange.sandbox.wait_held(run)
    strange.restart()
    with pytest.raises((OSError, http.client.HTTPException)):
        asking.result()
    again = me.ask("POST", strange.url("/orders"), order(), step("order"))
    assert (again.replayed, again.body) == (True, live.body)
    strange.sandbox.release(run)
    assert me.ask("POST", strange.url("/v1/chat/completions"), CHAT, step("model")).status == 200
    assert me.ask("POST", strange.url("/email/send"), MAIL, step("mail")).status == 202
    # The name names one request.
    other = me.ask("POST", strange.url("/email/send"), {**MAIL, "text": "other"}, step("mail"))
    assert (other.status, other.error) == (412, "diverged")
    assert [each.service for each in strange.effects() if each.service != "llm"] == ["orders", "email"]


def test_a_strangers_attempt_ends_by_result_or_silence(strange: Stack, run: str) -> None:
    me = Attempt(run, None, strange.sidecar.port)
    live = me.ask("POST", strange.url("/orders"), order(), step("order"))
    strange.sandbox.wait_for(lambda: status(strange, run) == ("queued", "failed"))
    again = me.ask("POST", strange.url("/orders"), order(), step("order"))
    assert (again.replayed, again.body) == (True, live.body)
    assert me.ask("GET", INTERNAL).json()["attempt"] == 2
    assert me.ask("PUT", RESULT, {"sum": 1}).status == 204
    assert status(strange, run) == ("done", "done")
    reply = me.ask("POST", strange.url("/orders"), order(2), step("more"))
    assert (reply.status, reply.error) == (423, "not-running")
    assert len(strange.effects()) == 1


def test_a_stranger_does_not_disturb_a_group(strange: Stack, shared: Stack, run: str) -> None:
    """Of two sidecars on one database one can read its client."""
    me = Attempt(run, None, strange.sidecar.port)
    with contextlib.ExitStack() as around:
        if os.geteuid() != 0:
            pytest.skip("no sidecar here can read this process")
        agent = around.enter_context(Speaker(shared, run))
        assert agent.ask("POST", "/orders", order()).status == 201
        refused = me.ask("POST", shared.url("/orders"), order(2), step("two"))
        assert (refused.status, refused.error) == (423, "fenced")
        assert agent.ask("POST", "/email/send", MAIL).status == 202
    assert [each.service for each in shared.effects()] == ["orders", "email"]
