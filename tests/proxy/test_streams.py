"""Answers as they come: no event waits for its successor, no end is told before it is recorded.

A client and an upstream as plain sockets (``tests.raw``); a commit is made to hang by a lock on the run's row.
"""

import json
import time
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import fresh_database
from tests.raw import Origin, Wire, asked, headers, locked, unchunked
from tests.stack import Attempt, Stack, stack

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
JSON = b"Content-Type: application/json"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def impatient(server: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A sidecar that waits for a record for a second at most."""
    for dsn in fresh_database(server, template):
        with stack(dsn, tmp_path_factory.mktemp("impatient"), record_wait=1) as made:
            yield made


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text.encode()


def taken(origin: Origin) -> Wire:
    """The upstream's connection, the whole request taken."""
    wire = origin.accept()
    head = wire.head()
    length = next((value for name, value in headers(head) if name.lower() == b"content-length"), b"0")
    wire.exactly(int(length))
    return wire


def stream(attempt: Attempt, origin: Origin) -> tuple[Wire, Wire]:
    """A client that asked for a stream, and the upstream's side of it."""
    client = asked(attempt, "POST", origin.url(CHAT), JSON, body=BODY)
    return client, taken(origin)


# ---- passing on


def test_event_1_is_with_the_agent_before_event_2_is_sent(
    shared: Stack, run: str, origin: Origin, record_property: Callable[[str, object], None]
) -> None:
    client, upstream = stream(shared.claim(run), origin)
    upstream.send(EVENTS)
    assert client.head().startswith(b"HTTP/1.1 200 OK\r\n")
    delays = []
    for n in range(20):
        sent = time.perf_counter()
        upstream.send(chunk(event(f"word {n}")))
        assert client.body_until(b"\n\n") == event(f"word {n}")
        delays.append(time.perf_counter() - sent)
    upstream.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    assert client.body_until(None) == b"data: [DONE]\n\n"
    record_property("event to agent, median ms", round(1000 * sorted(delays)[10], 2))
    print(f"event to agent: first {1000 * delays[0]:.2f} ms, median {1000 * sorted(delays)[10]:.2f} ms")


def test_a_stream_that_its_upstream_never_ends_ends_with_its_terminal_event(
    shared: Stack, run: str, origin: Origin
) -> None:
    first = shared.claim(run)
    client, upstream = stream(first, origin)
    upstream.send(EVENTS + chunk(event("all")) + chunk(b"data: [DONE]\n\n"))
    assert client.head().startswith(b"HTTP/1.1 200 OK\r\n")
    assert client.body_until(None) == event("all") + b"data: [DONE]\n\n"
    first.die()
    again = shared.claim(run).ask("POST", origin.url(CHAT), BODY, {"Content-Type": "application/json"})
    assert (again.replayed, again.cut) == (True, False)
    upstream.close()


def test_the_head_is_with_the_agent_before_the_first_byte_of_the_body(shared: Stack, run: str, origin: Origin) -> None:
    client = asked(shared.claim(run), "GET", origin.url("/slow"))
    upstream = taken(origin)
    upstream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
    assert b"Content-Length: 10\r\n" in client.head()
    upstream.send(b"01234")
    assert client.exactly(5) == b"01234"
    upstream.send(b"56789")
    assert client.exactly(5) == b"56789"


# ---- the end waits for the record


ENDS = [
    pytest.param(
        "POST", CHAT, EVENTS + chunk(event("a")) + chunk(event("b")), chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
        event("a") + event("b"), b"data: [DONE]\n\n", id="terminal event",
    ),
    pytest.param(
        "POST", CHAT, EVENTS + chunk(event("a")), chunk(b"data: [DONE]\n\n: after the end\n\n") + b"0\r\n\r\n",
        event("a"), b"data: [DONE]\n\n: after the end\n\n", id="terminal event, and more behind it",
    ),
    pytest.param(
        "POST", "/orders", b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 40000),
        b"0\r\n\r\n", b"x" * 40000, b"", id="final chunk",
    ),
    pytest.param(
        "POST", "/orders", b"HTTP/1.1 201 Created\r\n\r\n" + b"x" * 40000, None, b"x" * 40000, b"", id="close",
    ),
    pytest.param(
        "POST", "/any/x", b"HTTP/1.1 200 OK\r\nContent-Length: 40000\r\n\r\n" + b"x" * 39000, b"x" * 1000,
        b"x" * 39999, b"x", id="last byte",
    ),
    pytest.param(
        "GET", "/any/x", b"HTTP/1.1 200 OK\r\nContent-Length: 40000\r\n\r\n" + b"x" * 39000, b"x" * 1000,
        b"x" * 39999, b"x", id="last byte of a read",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("method", "target", "first", "last", "before", "after"), ENDS)
def test_the_end_waits_for_the_record(
    shared: Stack, run: str, origin: Origin,
    method: str, target: str, first: bytes, last: bytes | None, before: bytes, after: bytes,
) -> None:  # fmt: skip
    attempt = shared.claim(run)
    client = asked(attempt, method, origin.url(target), JSON, body=BODY if method == "POST" else None)
    upstream = taken(origin)
    upstream.send(first)
    by_length = b"Content-Length" in client.head()
    with locked(shared.dsn, run) as lock:
        if last is None:
            upstream.close()
        else:
            upstream.send(last)
        got = client.exactly(len(before)) if by_length else client.body_until(before)
        lock.wait_wanted()
        assert client.silent()
        lock.release()
    got += client.exactly(len(after)) if by_length else client.body_until(None)
    assert got == before + after


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("POST", b"HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n"),
        ("POST", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        ("POST", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n"),
        ("GET", b'HTTP/1.1 304 Not Modified\r\nContent-Length: 77\r\nETag: "a"\r\n\r\n'),
        ("POST", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nsmall"),
        ("POST", b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 5\r\n\r\nsmall"),
    ],
)  # fmt: skip
def test_an_answer_without_a_body_or_a_small_one_waits_as_a_whole(
    shared: Stack, run: str, origin: Origin, method: str, answer: bytes
) -> None:
    client = asked(shared.claim(run), method, origin.url("/any/x"), body=b"b" if method == "POST" else None)
    upstream = taken(origin)
    with locked(shared.dsn, run) as lock:
        upstream.send(answer)
        lock.wait_wanted()
        assert client.silent()
    assert client.head().split(b"\r\n")[0] == answer.split(b"\r\n")[0]


def test_the_wait_for_the_record_is_bounded_and_the_answer_is_kept(impatient: Stack, run: str, origin: Origin) -> None:
    attempt = impatient.claim(run)
    client, upstream = stream(attempt, origin)
    upstream.send(EVENTS + chunk(event("a")))
    client.head()
    client.body_until(event("a"))
    with locked(impatient.dsn, run) as lock:
        upstream.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        lock.wait_wanted()
        assert client.rest_of_cut() == b""  # cut without its end
        retry = asked(attempt, "POST", origin.url(CHAT), JSON, body=BODY)
    retry.head()
    assert retry.body_until(None) == event("a") + b"data: [DONE]\n\n"
    assert origin.nobody()


# ---- joined


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_stream_joined_after_a_kill_gives_the_same_bytes(shared: Stack, run: str, origin: Origin, after: int) -> None:
    events = [event(f"word {n}") for n in range(4)] + [b"data: [DONE]\n\n"]
    first = shared.claim(run)
    client, upstream = stream(first, origin)
    if after:
        upstream.send(EVENTS + b"".join(map(chunk, events[:after])))
        client.head()
        client.body_until(events[after - 1])
    shared.end(first, "died")

    second = shared.claim(run)
    joined = asked(second, "POST", origin.url(CHAT), JSON, body=BODY)
    if after:
        head = joined.head()
        assert joined.body_until(events[after - 1]) == b"".join(events[:after])
        upstream.send(b"".join(map(chunk, events[after:])) + b"0\r\n\r\n")
    else:
        # The upstream answers when the second attempt is attached.
        while dict(second.steps()) == {}:
            time.sleep(0.01)
        upstream.send(EVENTS + b"".join(map(chunk, events)) + b"0\r\n\r\n")
        head = joined.head()
    assert joined.body_until(None) == b"".join(events[after:])
    assert b"Twiceshy-Replayed" not in head
    assert origin.nobody()
    shared.end(second, "died")

    third = asked(shared.claim(run), "POST", origin.url(CHAT), JSON, body=BODY)
    assert b"Twiceshy-Replayed: true\r\n" in third.head()
    assert third.body_until(None) == b"".join(events)


# ---- cut


CUTS = [
    pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 50, b"", "/orders", b"x" * 50, id="length"),
    pytest.param(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 50), b"", "/orders", b"x" * 50,
        id="no final chunk",
    ),
    pytest.param(EVENTS + chunk(event("a")), b"0\r\n\r\n", CHAT, event("a"), id="known dialect, clean end"),
    pytest.param(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event("a"), b"", CHAT, event("a"),
        id="known dialect, closed",
    ),
    pytest.param(
        EVENTS + chunk(event("a")), chunk(b"data: half"), CHAT, event("a") + b"data: half", id="half an event",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "more", "target", "body"), CUTS)
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_cut_answer_reaches_the_agent_as_cut_and_is_never_replayed_whole(
    shared: Stack, run: str, origin: Origin, answer: bytes, more: bytes, target: str, body: bytes, how: str
) -> None:
    first = shared.claim(run)
    client = asked(first, "POST", origin.url(target), JSON, body=BODY)
    upstream = taken(origin)
    upstream.send(answer)
    head = client.head()
    by_length = b"Content-Length" in head
    got = client.exactly(50) if by_length else client.body_until(event("a") if target == CHAT else b"x" * 50)
    upstream.send(more)
    if how == "reset":
        upstream.reset()
    else:
        upstream.close()
    rest, whole = (client.rest_of_cut(), False) if by_length else unchunked(client.rest_of_cut())
    # A reset may overtake what was sent before it.
    assert (got + rest, whole) == (body, False) or (how == "reset" and body.startswith(got + rest) and not whole)
    shared.end(first, "died")

    # Provisional: in the next attempt it goes out again.
    again = asked(shared.claim(run), "POST", origin.url(target), JSON, body=BODY)
    other = taken(origin)
    other.send(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nnew")
    assert b"Twiceshy-Replayed" not in again.head()
    assert again.exactly(3) == b"new"


def test_a_cut_answer_that_the_agent_acted_on_is_replayed_as_cut(shared: Stack, run: str, origin: Origin) -> None:
    first = shared.claim(run)
    client, upstream = stream(first, origin)
    upstream.send(EVENTS + chunk(event("a")))
    client.head()
    client.body_until(event("a"))
    upstream.close()
    client.rest_of_cut()
    assert first.ask("POST", shared.url("/orders"), {"lines": [{"sku": "a", "n": 1}]}).status == 201
    shared.end(first, "died")

    again = asked(shared.claim(run), "POST", origin.url(CHAT), JSON, body=BODY)
    assert b"Twiceshy-Replayed: true\r\n" in again.head()
    assert unchunked(again.rest_of_cut()) == (event("a"), False)
    assert origin.nobody()


def test_a_read_that_its_agent_broke_off_and_acted_on_is_kept_as_cut(shared: Stack, run: str, origin: Origin) -> None:
    first = shared.claim(run)
    client = asked(first, "GET", origin.url("/events"))
    upstream = taken(origin)
    upstream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"one") + chunk(b"two"))
    client.head()
    client.body_until(b"two")
    assert first.ask("POST", shared.url("/orders"), {"lines": [{"sku": "a", "n": 1}]}).status == 201
    client.close()
    assert upstream.gone()  # cancelled with its client
    shared.sandbox.wait_for(lambda: shared.fetch("SELECT FROM twiceshy.answer WHERE run_id = $1 AND NOT whole", run))
    shared.end(first, "died")

    again = asked(shared.claim(run), "GET", origin.url("/events"))
    assert b"Twiceshy-Replayed: true\r\n" in again.head()
    assert unchunked(again.rest_of_cut()) == (b"onetwo", False)
    assert origin.nobody()


def test_a_read_that_its_agent_broke_off_unused_is_made_again(shared: Stack, run: str, origin: Origin) -> None:
    attempt = shared.claim(run)
    client = asked(attempt, "GET", origin.url("/events"))
    upstream = taken(origin)
    upstream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"one"))
    client.head()
    client.body_until(b"one")
    client.close()
    # At once, before the sidecar can have seen the end of the one before.
    again = asked(attempt, "GET", origin.url("/events"))
    other = taken(origin)
    other.send(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nnew")
    again.head()
    assert again.exactly(3) == b"new"
    assert upstream.gone()
    assert not shared.fetch("SELECT FROM twiceshy.answer WHERE run_id = $1 AND NOT whole", run)


def test_a_read_whose_client_is_gone_at_once_does_not_go_on(shared: Stack, run: str, origin: Origin) -> None:
    attempt = shared.claim(run)
    attempt.ask("GET", shared.url("/pantry"))
    for _ in range(20):
        asked(attempt, "GET", origin.url("/events")).close()
    # None of them is left at the upstream, though it never answers.
    while not origin.nobody():
        pass
    assert all(wire.gone_after_head() for wire in origin.taken)
