"""Upstreams that are too slow: the limit is named, and what was sent is never taken for unsent (DESIGN §3.8)."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.stack import Stack, stack

CHAT = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": "hello"}]}
ORDER = {"lines": [{"sku": "tea", "n": 1}], "total": 5}
MAIL = {"to": "ada@example.org", "subject": "s", "text": "t"}
LIMITS: Any = {"connect_timeout": 0.5, "first_byte_timeout": 1.5, "silence_timeout": 1, "exchange_timeout": 5}


@pytest.fixture(scope="module")
def module_stack(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Limits that a test can wait for."""
    with stack(module_dsn, tmp_path_factory.mktemp("stack"), **LIMITS) as made:
        yield made


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/orders", ORDER), ("POST", "/v1/chat/completions", CHAT), ("GET", "/any/read", None)],
    ids=["keyed", "llm", "read"],
)
def test_what_may_be_repeated_gets_504_and_may_ask_again(
    shared: Stack, run: str, method: str, path: str, body: dict[str, object] | None
) -> None:
    shared.sandbox.fault(match={"path": path}, hold="slow")
    first = shared.claim(run)
    slow = first.ask(method, shared.url(path), body)
    assert (slow.status, slow.error) == (504, "upstream")
    assert "first_byte_timeout" in slow.json()["message"]
    assert "The request was sent." in slow.json()["message"]
    assert len(shared.received()) == 1  # it may be on it still: nothing is gained by asking again at once
    answer = first.ask(method, shared.url(path), body)
    assert answer.status in (200, 201)
    assert answer.step == slow.step
    assert len({(each.body, each.header("idempotency-key")) for each in shared.received()}) == 1
    assert len(shared.effects("orders")) <= 1
    shared.end(first, "died")
    second = shared.claim(run)
    again = [second.ask(method, shared.url(path), body) for _ in range(2)]
    assert [(reply.status, reply.body) for reply in again] == [(504, slow.body), (answer.status, answer.body)]
    assert len(shared.received()) == 2


def test_an_effect_without_a_key_that_takes_too_long_stops_the_run(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/email/send"}, hold="slow")
    attempt = shared.claim(run)
    stopped = attempt.ask("POST", shared.url("/email/send"), MAIL)
    assert (stopped.status, stopped.error) == (424, "ambiguous")
    assert "first_byte_timeout" in stopped.json()["message"]
    assert attempt.ask("GET", shared.url("/pantry")).status == 424
    assert len(shared.received()) == 1


def test_a_stream_that_falls_silent_is_cut_and_asked_again(shared: Stack, run: str) -> None:
    body = {**CHAT, "stream": True}
    shared.sandbox.fault(match={"path": "/v1/*"}, hold_events={"3": "silent"})
    attempt = shared.claim(run)
    cut = attempt.ask("POST", shared.url("/v1/chat/completions"), body)
    assert (cut.status, cut.cut) == (200, True)
    whole = attempt.ask("POST", shared.url("/v1/chat/completions"), body)
    assert not whole.cut
    assert whole.body.startswith(cut.body)
    assert len(shared.received("llm")) == 2


def test_an_effect_whose_answer_falls_silent_stops_the_run(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/any/large"}, hold_events={"2": "silent"})
    attempt = shared.claim(run)
    cut = attempt.ask("POST", shared.url("/any/large?size=300000"), ORDER)
    assert (cut.status, cut.cut) == (200, True)
    stopped = attempt.ask("POST", shared.url("/any/large?size=300000"), ORDER)
    assert (stopped.status, stopped.error) == (424, "ambiguous")
    assert "silence_timeout" in stopped.json()["message"]
    assert "131072 bytes of an answer with status 200 came" in stopped.json()["message"]
    assert len(shared.received()) == 1


def test_an_exchange_that_never_ends_is_ended(shared: Stack, run: str) -> None:
    """However alive it seems: an event, and then another one."""
    body = {**CHAT, "stream": True, "messages": [{"role": "user", "content": "and on and on"}]}
    shared.sandbox.fault(match={"path": "/v1/*"}, pace=0.8)
    attempt = shared.claim(run)
    cut = attempt.ask("POST", shared.url("/v1/chat/completions"), body)
    assert (cut.status, cut.cut) == (200, True)
    assert attempt.ask("POST", shared.url("/v1/chat/completions"), body).body.startswith(cut.body)
    assert len(shared.received("llm")) == 2
