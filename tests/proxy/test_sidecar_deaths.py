"""The sidecar dies, or ends, when an effect is made and its answer not recorded (DESIGN §3.4)."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from sandbox.client import Received
from tests.stack import Attempt, SidecarProcess, Stack

CHAT = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": "hello"}]}
ORDER = {"lines": [{"sku": "tea", "n": 1}], "total": 5}
MAIL = {"to": "ada@example.org", "subject": "s", "text": "t"}
JSON = {"Content-Type": "application/json"}


def lose(stack: Stack, run: str, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Attempt:
    """The next attempt of a run whose request was executed, and whose sidecar and agent died before the answer."""
    stack.sandbox.fault(match={"path": path.partition("?")[0]}, nth=1, hold="made")
    first = stack.claim(run)
    first.send(method, stack.url(path), body, headers)
    stack.sandbox.wait_held("made")
    stack.restart()
    first.die()
    return stack.claim(run)


def as_sent(received: Received) -> tuple[Any, ...]:
    """Every byte of a request but for the connection it came on."""
    return received.method, received.target, received.headers, received.body


def json_of(value: Any, *, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent).encode()


@pytest.mark.parametrize(
    ("path", "first", "later", "kind"),
    [
        ("/orders", json_of(ORDER), json_of(ORDER, indent=2), JSON),
        ("/crm/notes", json_of({"text": "ü"}), '{"text": "ü"}'.encode(), JSON),
        ("/payments/v1/refunds", b"charge=ch_1&x=%41", b"charge=ch_1&x=A",
         {"Content-Type": "application/x-www-form-urlencoded"}),
    ],
    ids=["orders", "notes", "payments"],
)  # fmt: skip
def test_a_keyed_effect_goes_again_as_it_went_first(
    shared: Stack, run: str, path: str, first: bytes, later: bytes, kind: dict[str, str]
) -> None:
    second = lose(shared, run, "POST", path, first, {**kind, "Authorization": "Bearer old", "X-Try": "1"})
    reply = second.ask("POST", shared.url(path), later, {**kind, "Authorization": "Bearer new", "X-Try": "2"})
    assert (reply.status, reply.replayed) == (200, False)
    one, two = shared.received(method="POST")
    assert one.body == two.body == first
    key = one.header("idempotency-key")
    assert key
    assert two.header("idempotency-key") == key
    assert (two.header("authorization"), two.header("x-try")) == ("Bearer new", "1")
    assert len(shared.effects()) == 1
    shared.end(second, "died")
    assert shared.claim(run).ask("POST", shared.url(path), later, kind).body == reply.body
    assert len(shared.received(method="POST")) == 2


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_put_or_delete_goes_again_as_it_went_first(shared: Stack, run: str, method: str) -> None:
    body = json_of(ORDER)
    second = lose(shared, run, method, "/any/thing?v=1", body, JSON)
    assert second.ask(method, shared.url("/any/thing?v=1"), body, JSON).status == 200
    assert len({as_sent(each) for each in shared.received("any")}) == 1
    assert len(shared.received("any")) == 2


def test_a_model_is_asked_again_and_that_counts_as_drift(shared: Stack, run: str) -> None:
    second = lose(shared, run, "POST", "/v1/chat/completions", json_of(CHAT), JSON)
    assert second.ask("POST", shared.url("/v1/chat/completions"), CHAT).status == 200
    assert second.ask("GET", "http://twiceshy.internal/attempt").json()["drift"] == 1
    assert len(shared.received("llm")) == 2


def test_a_read_is_made_again(shared: Stack, run: str) -> None:
    second = lose(shared, run, "GET", "/any/read", None, {})
    assert second.ask("GET", shared.url("/any/read")).json()["n"] == shared.received("any")[1].n


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [("/email/send", MAIL, {}), ("/any/post", ORDER, {}), ("/email/send", MAIL, {"Twiceshy-Step": "mail"})],
    ids=["email", "unknown", "named"],
)
@pytest.mark.parametrize("how", ["assume_done", "send_again"])
def test_an_effect_without_a_key_stops_the_run_until_somebody_says(
    shared: Stack, run: str, path: str, body: dict[str, object], name: dict[str, str],
    how: Literal["assume_done", "send_again"],
) -> None:  # fmt: skip
    second = lose(shared, run, "POST", path, json_of(body), {**JSON, **name})
    stopped = second.ask("POST", shared.url(path), body, name)
    assert (stopped.status, stopped.error) == (424, "ambiguous")
    assert shared.end(second, "failed") == "ambiguous"
    assert len(shared.received(method="POST")) == 1

    assert shared.resolve(run, stopped.step, how) == "queued"
    third = shared.claim(run)
    reply = third.ask("POST", shared.url(path), body, name)
    if how == "assume_done":
        assert (reply.status, reply.body, reply.replayed) == (200, b"", True)
        assert len(shared.effects()) == 1
    else:
        assert (reply.status // 100, reply.replayed) == (2, False)
        assert len(shared.effects()) == 2
        assert len({as_sent(each) for each in shared.received(method="POST")}) == 1
    assert shared.end(third, "done", 0) == "done"


@pytest.mark.parametrize(
    ("method", "path", "age"),
    [("POST", "/orders", "25 hours"), ("PUT", "/any/thing", "6 minutes")],
    ids=["keyed", "keyless"],
)
def test_what_the_upstream_may_have_forgotten_is_not_sent_again(
    shared: Stack, run: str, method: str, path: str, age: str
) -> None:
    second = lose(shared, run, method, path, json_of(ORDER), JSON)
    shared.fetch("UPDATE twiceshy.step SET begun_at = begun_at - $2::text::interval WHERE run_id = $1", run, age)
    stopped = second.ask(method, shared.url(path), ORDER)
    assert (stopped.status, stopped.error) == (424, "ambiguous")
    assert len(shared.received()) == 1


def test_a_key_that_is_still_in_use_is_asked_for_again(shared: Stack, run: str) -> None:
    """The provider works on the first one yet, and says so with 409."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    shared.sandbox.fault(match={"path": "/payments/*"}, nth=1, hold_before="working")
    first = shared.claim(run)
    first.send("POST", shared.url("/payments/v1/refunds"), b"charge=ch_9", form)
    shared.sandbox.wait_held("working")
    shared.restart()
    first.die()
    second = shared.claim(run)
    assert second.ask("POST", shared.url("/payments/v1/refunds"), "charge=ch_9", form).status == 409
    shared.sandbox.release("working")
    shared.sandbox.wait_for(lambda: shared.effects("payments"))
    made = second.ask("POST", shared.url("/payments/v1/refunds"), "charge=ch_9", form)
    assert (made.status, made.headers["idempotent-replayed"]) == (200, "true")
    assert len(shared.effects("payments")) == 1
    assert len({each.header("idempotency-key") for each in shared.received("payments")}) == 1


def test_a_sidecar_that_is_told_to_end_finishes_what_is_under_way(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/email/send"}, hold="slow")
    first = shared.claim(run)
    asked = first.in_background("POST", shared.url("/email/send"), MAIL)
    shared.sandbox.wait_held("slow")
    ending = threading.Thread(target=shared.sidecar.stop)
    ending.start()
    shared.sandbox.wait_for(lambda: refuses(shared.sidecar.port))
    shared.sandbox.release("slow")
    assert asked.result().status == 202
    ending.join(30)
    shared.restart()
    replayed = shared.claim(run).ask("POST", shared.url("/email/send"), MAIL)
    assert (replayed.body, replayed.replayed) == (asked.result().body, True)
    assert len(shared.received("email")) == 1


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.fixture
def elsewhere(shared: Stack, tmp_path: Path) -> Iterator[SidecarProcess]:
    """A sidecar beside the first one, which lives."""
    sidecar = SidecarProcess(shared.dsn, tmp_path / "elsewhere", **shared.settings, poll=0.1)
    yield sidecar
    sidecar.stop()


def test_what_another_sidecar_has_under_way_is_waited_for(shared: Stack, elsewhere: SidecarProcess, run: str) -> None:
    shared.sandbox.fault(match={"path": "/email/send"}, hold="slow")
    first = shared.claim(run)
    first.send("POST", shared.url("/email/send"), MAIL)
    shared.sandbox.wait_held("slow")
    first.die()
    second = shared.claim(run)
    second.port = elsewhere.port
    assert second.ask("GET", shared.url("/pantry")).status == 200
    waiting = second.in_background("POST", shared.url("/email/send"), MAIL)
    shared.sandbox.release("slow")
    assert (waiting.result().status, waiting.result().replayed) == (202, True)
    assert len(shared.received("email")) == 1
