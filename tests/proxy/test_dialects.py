"""Streams of every dialect against the sandbox: cut ones are never taken for whole, ends wait for their record.

The sandbox's answers are a function of the question, so what is asked again is known byte by byte.
"""

import http.client
import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.raw import Origin, asked, headers, locked, unchunked
from tests.stack import Attempt, Stack

JSON = b"Content-Type: application/json"
SAY = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True)
class Dialect:
    name: str
    path: str
    body: dict[str, Any]
    end: bytes  # how its terminal event begins

    def __str__(self) -> str:
        return self.name


DIALECTS = [
    Dialect(
        "openai_chat", "/v1/chat/completions",
        {"model": "m", "messages": SAY, "stream": True, "stream_options": {"include_usage": True}}, b"data: [DONE]",
    ),
    Dialect(
        "openai_responses", "/v1/responses", {"model": "m", "input": SAY, "stream": True}, b"event: response.completed",
    ),
    Dialect(
        "anthropic", "/v1/messages", {"model": "m", "max_tokens": 99, "messages": SAY, "stream": True},
        b"event: message_stop",
    ),
    Dialect(
        "gemini", "/v1beta/models/m:streamGenerateContent?alt=sse", {"contents": [{"parts": [{"text": "hello"}]}]},
        b"data: ",
    ),
]  # fmt: skip


@pytest.fixture(params=DIALECTS, ids=str)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    found: Dialect = request.param
    return found


def text(dialect: Dialect) -> bytes:
    return json.dumps(dialect.body).encode()


def events(stack: Stack, dialect: Dialect) -> list[bytes]:
    """The events of the whole stream, asked of the sandbox itself."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.sandbox.port, timeout=20)
    connection.request("POST", dialect.path, text(dialect), {"Content-Type": "application/json"})
    whole = connection.getresponse().read()
    connection.close()
    stack.mark()
    blank = b"\r\n\r\n" if b"\r\n" in whole else b"\n\n"
    return [event + blank for event in whole.split(blank)[:-1]]


@pytest.mark.parametrize("how", [{}, {"clean": True}, {"framing": "close"}, {"reset": True}], ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["early", "before its end"])
def test_a_stream_that_is_cut_is_asked_again(
    shared: Stack, run: str, dialect: Dialect, how: dict[str, Any], late: bool
) -> None:
    sent = events(shared, dialect)
    at = len(sent) - 1 if late else 2
    match = {"service": "llm"}
    shared.sandbox.fault(match=match, drop="mid", cut_at=at, hold_events={at: "cut"}, **how)
    first = shared.claim(run)
    client = asked(first, "POST", shared.url(dialect.path), JSON, body=text(dialect))
    client.head()
    came = client.body_until(sent[at - 1])
    shared.sandbox.release("cut")
    if dialect.name == "openai_chat" and late and how in ({"clean": True}, {"framing": "close"}):
        # All choices are finished and the framing is in order: only [DONE] is missing, which some servers leave out.
        assert came + client.body_until(None) == b"".join(sent[:at])
        shared.end(first, "died")
        again = shared.claim(run).ask("POST", shared.url(dialect.path), dialect.body)
        assert (again.replayed, again.cut, again.body) == (True, False, b"".join(sent[:at]))
        return
    rest, whole = unchunked(client.rest_of_cut())
    assert (came + rest, whole) == (b"".join(sent[:at]), False)
    shared.end(first, "died")

    second = shared.claim(run).ask("POST", shared.url(dialect.path), dialect.body)
    assert (second.replayed, second.cut, second.body) == (False, False, b"".join(sent))
    assert len(shared.received("llm")) == 2
    third = shared.claim(run).ask("POST", shared.url(dialect.path), dialect.body)
    assert (third.replayed, third.cut, third.body) == (True, False, b"".join(sent))
    assert len(shared.received("llm")) == 2


def test_the_end_waits_for_the_record_and_tokens_are_counted(shared: Stack, run: str, dialect: Dialect) -> None:
    sent = events(shared, dialect)
    assert sent[-1].startswith(dialect.end)
    shared.sandbox.fault(match={"service": "llm"}, hold_events={len(sent) - 1: "end"})
    client = asked(shared.claim(run), "POST", shared.url(dialect.path), JSON, body=text(dialect))
    client.head()
    assert client.body_until(sent[-2]) == b"".join(sent[:-1])
    with locked(shared.dsn, run) as lock:
        shared.sandbox.release("end")
        lock.wait_wanted()
        assert client.silent()
    assert client.body_until(None) == sent[-1]
    [answer] = shared.fetch("SELECT tokens, finality FROM twiceshy.answer WHERE run_id = $1", run)
    assert (answer["tokens"], answer["finality"]) == (shared.effects("llm")[0].facts["tokens"], "final")


# ---- whole, and yet no answer

FAILURES = [
    ("/v1/chat/completions", [b'data: {"error":{"message":"out of memory"}}\n\n', b"data: [DONE]\n\n"]),
    ("/v1/responses", [b'data: {"type":"response.failed","response":{"error":{"code":"server_error"}}}\n\n']),
    ("/v1/messages", [b'event: error\ndata: {"type":"error","error":{}}\n\n', b'data: {"type":"message_stop"}\n\n']),
    (
        "/v1/models/m:streamGenerateContent?alt=sse",
        [b'data: {"error":{"code":503}}\n\n', b'data: {"candidates":[{"finishReason":"OTHER"}]}\n\n'],
    ),
]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(("path", "told"), FAILURES, ids=[path for path, _ in FAILURES])
def test_a_stream_that_tells_of_an_error_is_asked_again(
    shared: Stack, run: str, origin: Origin, path: str, told: list[bytes]
) -> None:
    first, failed = shared.claim(run), b"".join(told)

    def live(attempt: Attempt, answer: bytes, kind: bytes = b"text/event-stream") -> None:
        client = asked(attempt, "POST", origin.url(path), JSON, body=b"{}")
        wire = origin.accept()
        wire.exactly(int(dict(headers(wire.head()))[b"Content-Length"]))
        wire.send(HEAD % (kind, len(answer)) + answer)
        assert b"Twiceshy-Replayed" not in client.head()
        assert client.exactly(len(answer)) == answer

    def replayed(attempt: Attempt, answer: bytes) -> None:
        client = asked(attempt, "POST", origin.url(path), JSON, body=b"{}")
        assert b"Twiceshy-Replayed: true" in client.head()
        assert client.exactly(len(answer)) == answer

    live(first, failed)
    live(first, failed)
    shared.end(first, "failed")
    # Of a step's answers only the last is tried again; what comes then takes its place.
    second = shared.claim(run)
    replayed(second, failed)
    live(second, b"other", b"text/plain")
    shared.end(second, "died")
    third = shared.claim(run)
    replayed(third, failed)
    replayed(third, b"other")
    assert [row["n"] for row in shared.fetch("SELECT count(*) AS n FROM twiceshy.step WHERE run_id = $1", run)] == [1]
