"""What becomes of a request whose upstream fails (DESIGN §3.7, §3.8), and of the run."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from sandbox.client import Received, Sandbox
from tests.stack import Attempt, Reply, SidecarProcess, Stack

CHAT = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": "hello"}]}
ORDER = {"lines": [{"sku": "tea", "n": 1}], "total": 5}
MAIL = {"to": "ada@example.org", "subject": "s", "text": "t"}

SENT_AGAIN = {"GET": True, "PUT": True, "DELETE": True, "POST": False, "PATCH": False}
methods = pytest.mark.parametrize("method", SENT_AGAIN)


def as_sent(received: Received) -> tuple[Any, ...]:
    """Every byte of a request but for the connection it came on."""
    return received.method, received.target, received.headers, received.body


def status_of(stack: Stack, run: str) -> str:
    return str(stack.fetch("SELECT status FROM twiceshy.run WHERE id = $1", run)[0]["status"])


@pytest.fixture(scope="module")
def sends_once(module_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """A sidecar that is told not to send again."""
    sidecar = SidecarProcess(module_stack.dsn, tmp_path_factory.mktemp("once"), resend=0)
    yield sidecar
    sidecar.stop()


# ---- the upstream executes, and closes without an answer


@methods
@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "reused"])
def test_without_resend_every_method_is_sent_exactly_once(
    shared: Stack, sends_once: SidecarProcess, run: str, method: str, reset: bool, reused: bool
) -> None:
    attempt = shared.claim(run)
    attempt.port = sends_once.port
    if reused:  # where a client sends again by itself, it does so on a connection that was used before
        assert attempt.ask("GET", shared.url("/pantry")).status == 200
    shared.sandbox.fault(match={"path": "/any/gone"}, times=0, drop="after", reset=reset)
    reply = attempt.ask(method, shared.url("/any/gone"), ORDER)
    assert reply.status == (502 if SENT_AGAIN[method] else 424)
    assert len(shared.received("any")) == 1


@methods
def test_by_default_what_may_go_again_goes_again_and_byte_for_byte(shared: Stack, run: str, method: str) -> None:
    shared.sandbox.fault(match={"path": "/any/gone"}, times=0, drop="after")
    attempt = shared.claim(run)
    reply = attempt.ask(method, shared.url("/any/gone?a=1&a=%2F"), ORDER, {"X-Own": "1", "Authorization": "Bearer me"})
    hits = shared.received("any")
    assert len(hits) == (3 if SENT_AGAIN[method] else 1)
    assert len({as_sent(each) for each in hits}) == 1
    if SENT_AGAIN[method]:
        assert (reply.status, reply.error) == (502, "upstream")
        assert "The request was sent." in reply.json()["message"]
        assert status_of(shared, run) == "running"
    else:
        assert (reply.status, reply.error) == (424, "ambiguous")
        assert status_of(shared, run) == "ambiguous"


@pytest.mark.parametrize(("path", "body"), [("/orders", ORDER), ("/v1/chat/completions", CHAT)], ids=["keyed", "llm"])
def test_a_post_that_may_be_repeated_is(shared: Stack, run: str, path: str, body: dict[str, object]) -> None:
    shared.sandbox.fault(match={"path": path}, drop="after")
    first = shared.claim(run)
    made = first.ask("POST", shared.url(path), body)
    assert made.status in (200, 201)
    assert len({as_sent(each) for each in shared.received()}) == 1
    assert len(shared.received()) == 2
    shared.end(first, "died")
    assert shared.claim(run).ask("POST", shared.url(path), body).body == made.body
    assert len(shared.received()) == 2


def test_an_answer_that_was_begun_is_not_begun_again(shared: Stack, run: str) -> None:
    """Its client had a part of it, and is cut as it was; the next request asks again."""
    shared.sandbox.fault(match={"path": "/v1/*"}, drop="mid")
    first = shared.claim(run)
    cut = first.ask("POST", shared.url("/v1/chat/completions"), {**CHAT, "stream": True})
    assert (cut.status, cut.cut, cut.replayed) == (200, True, False)
    assert len(shared.received("llm")) == 1
    whole = first.ask("POST", shared.url("/v1/chat/completions"), {**CHAT, "stream": True})
    assert not whole.cut
    assert whole.body.startswith(cut.body)
    shared.end(first, "died")
    second = shared.claim(run)
    again = [second.ask("POST", shared.url("/v1/chat/completions"), {**CHAT, "stream": True}) for _ in range(2)]
    assert [(reply.body, reply.cut) for reply in again] == [(cut.body, True), (whole.body, False)]
    assert len(shared.received("llm")) == 2


def test_connections_to_upstreams_are_shared_by_nobody_who_could_be_hurt(shared: Stack, run: str) -> None:
    """A POST on a connection that the upstream just closed is bytes out and no answer."""
    attempts = [shared.claim(f"{run}-{n}") for n in range(2)]
    for attempt in attempts:
        for path in ("/email/send", "/any/post", "/email/send"):
            assert attempt.ask("POST", shared.url(path), MAIL).status in (200, 202)
        for _ in range(3):
            assert attempt.ask("GET", shared.url("/pantry")).status == 200
    effects, reads = shared.received(method="POST"), shared.received(method="GET")
    assert len({each.connection for each in effects}) == len(effects) == 6
    assert len({each.connection for each in reads}) == 2
    assert not {each.connection for each in effects} & {each.connection for each in reads}


# ---- a run that is stopped


def stop(stack: Stack, attempt: Attempt) -> Reply:
    stack.sandbox.fault(match={"path": "/any/lost"}, drop="after")
    stopped = attempt.ask("POST", stack.url("/any/lost"), ORDER)
    assert (stopped.status, stopped.error) == (424, "ambiguous")
    assert attempt.run in stopped.json()["message"]
    assert f"twiceshy resolve {attempt.run} {stopped.step}" in stopped.json()["message"]
    return stopped


@pytest.mark.parametrize("restarted", [False, True], ids=["same", "successor"])
def test_an_agent_that_swallows_a_stop_gets_it_again_for_everything(shared: Stack, run: str, restarted: bool) -> None:
    first = shared.claim(run)
    done = first.ask("POST", shared.url("/orders"), ORDER)
    read = first.ask("GET", shared.url("/pantry"))
    assert (done.status, read.status) == (201, 200)
    stopped = stop(shared, first)
    if restarted:
        shared.restart()
    before = len(shared.received())
    grant = "grant_type=client_credentials"
    for method, url, body, headers in [
        ("POST", shared.url("/orders"), ORDER, {}),
        ("GET", shared.url("/pantry"), None, {}),
        ("POST", shared.url("/any/lost"), ORDER, {}),
        ("POST", shared.url("/any/other"), ORDER, {"Twiceshy-Step": "named"}),
        ("POST", shared.url("/any/token"), grant, {"Content-Type": "application/x-www-form-urlencoded"}),
        ("DELETE", shared.url("/any/other"), None, {}),
        ("PUT", "http://twiceshy.internal/result", "1", {}),
        ("GET", "http://twiceshy.internal/run", None, {}),
        ("GET", "http://twiceshy.internal/attempt", None, {}),
    ]:
        again = first.ask(method, url, body, headers)
        assert (again.status, again.error) == (424, "ambiguous"), (method, url)
        assert again.json() == stopped.json()
    assert first.ask("HEAD", shared.url("/pantry")).status == 424
    assert len(shared.received()) == before
    assert shared.fetch("SELECT result FROM twiceshy.run WHERE id = $1", run)[0]["result"] is None
    # And an exit code of 0 does not make it done.
    assert shared.end(first, "done", 0) == "ambiguous"


@pytest.mark.parametrize("how", ["assume_done", "send_again"])
def test_a_stopped_run_goes_on_as_it_is_told(
    shared: Stack, run: str, how: Literal["assume_done", "send_again"]
) -> None:
    first = shared.claim(run)
    stopped = stop(shared, first)
    first.die()
    answer = {"status": 201, "headers": ((b"X-Seen", b"yes"),), "body": b'{"id":"looked-up"}'}
    assert shared.resolve(run, stopped.step, how, **(answer if how == "assume_done" else {})) == "queued"
    second = shared.claim(run)
    reply = second.ask("POST", shared.url("/any/lost"), ORDER)
    if how == "assume_done":
        assert (reply.status, reply.body, reply.headers["x-seen"]) == (201, b'{"id":"looked-up"}', "yes")
    else:
        assert (reply.status, reply.replayed) == (200, False)
    hits = shared.received("any")
    assert len(hits) == (1 if how == "assume_done" else 2)
    assert len({as_sent(each) for each in hits}) == 1
    shared.end(second, "died")
    assert shared.claim(run).ask("POST", shared.url("/any/lost"), ORDER).body == reply.body


# ---- the upstream cannot be reached


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/orders", ORDER), ("POST", "/email/send", MAIL), ("POST", "/any/x", ORDER), ("GET", "/pantry", None)],
    ids=["keyed", "at_most_once", "unknown", "read"],
)
def test_what_could_not_be_sent_may_go_again(
    shared: Stack, run: str, tmp_path: Path, method: str, path: str, body: dict[str, object] | None
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        url = f"http://127.0.0.1:{port}{path}"
        first = shared.claim(run)
        refused = first.ask(method, url, body)
        assert (refused.status, refused.error) == (502, "upstream")
        assert "Nothing was sent." in refused.json()["message"]
        assert "retry-after" not in refused.headers
        shared.end(first, "failed")
        second = shared.claim(run)
        assert second.ask(method, url, body).status == 502
    assert status_of(shared, run) == "running"
    with Sandbox.start(tmp_path / "late.log", port=port) as late:
        assert second.ask(method, url, body).status in (200, 201, 202)
        assert len(late.requests()) == 1
        shared.end(second, "died")
        third = shared.claim(run)
        assert [third.ask(method, url, body).status // 100 for _ in range(2)] == [5, 2]
        assert len(late.requests()) == 1


def test_a_name_that_nobody_knows_is_an_upstream_that_cannot_be_reached(shared: Stack, run: str) -> None:
    attempt = shared.claim(run)
    refused = attempt.ask("POST", "http://nowhere.invalid/x", ORDER)
    assert (refused.status, refused.error) == (502, "upstream")
    assert "Nothing was sent." in refused.json()["message"]
    assert status_of(shared, run) == "running"
