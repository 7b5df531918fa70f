"""Inside a tunnel clients die, reset, read slowly and are cut as over plain HTTP."""

import contextlib
import json
import ssl

import pytest

from proxy import authority
from sandbox.anything import Pattern
from tests.raw import Wire, headers, locked, looked_at, stopped
from tests.stack import Stack
from tests.tunnelled import (
    ByHand,
    Secure,
    Tls,
    TlsOrigin,
    connected,
    head_of_connect,
    here,
    plain,
)  # fmt: skip

ORDER = {"lines": [{"sku": "tea", "n": 1}], "total": 1}
CHAT = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": "hello"}], "stream": True}
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


# ---- death and delivery


def test_a_post_of_a_killed_agent_is_joined(shared: Stack, agent: Secure, trust: ssl.SSLContext) -> None:
    shared.sandbox.fault(match={"path": "/orders"}, hold="order")
    agent.send("POST", "/orders", ORDER)
    shared.sandbox.wait_held("order")
    shared.end(agent, "died")
    second = Secure.of(shared.claim(agent.run), shared, trust)
    joining = second.in_background("POST", "/orders", ORDER)
    shared.sandbox.wait_for(lambda: second.report()["joined"], what="it joins")
    shared.sandbox.release("order")
    assert joining.result().status == 201
    assert len(shared.received("orders")) == 1


@pytest.mark.parametrize("size", [100_000, 3_000_000], ids=["all written", "part of it"])
def test_who_resets_before_it_read_has_not_had_its_answer(
    shared: Stack, agent: Secure, trust: ssl.SSLContext, size: int
) -> None:
    """Its retry is the same step: an answer that was written to a socket was not delivered by that."""
    wire = Wire.to(agent, receive_buffer=1 << 12)
    wire.send(head_of_connect(agent, here(shared)))
    wire.head()
    client = Tls(wire, trust, "127.0.0.1")
    client.send(plain("POST", f"/any/x?size={size}", here(shared), body=b"x"))
    client.head()
    _recorded(shared, agent.run)
    assert agent.ask("GET", "/pantry").status == 200  # by now all is written that can be
    client.reset()
    retry = agent.ask("POST", f"/any/x?size={size}", b"x")
    assert (retry.status, len(retry.body)) == (200, size)
    assert len(shared.received("any")) == 1


@pytest.mark.parametrize("at_once", [False, True], ids=["after its delivery was counted", "at once"])
def test_a_reset_is_seen_before_the_retry_beside_it(
    shared: Stack, agent: Secure, trust: ssl.SSLContext, at_once: bool
) -> None:
    """The retry comes by a tunnel that is open already, and the sidecar finds both in the same moment."""
    beside, unread = (Tls.through(agent, here(shared), trust) for _ in range(2))
    other, asked = (plain(method, "/any/reset", here(shared), body=b"x") for method in ("GET", "POST"))
    beside.send(other)
    beside.exactly(_length(beside.head()))
    unread.send(asked)
    _recorded(shared, agent.run)
    if not at_once:
        looked_at(agent)
    with stopped(shared.sidecar):
        beside.send(asked[:9])
        unread.reset()
        beside.send(asked[9:])
    # Replayed, or joined where the sidecar had only just recorded it.
    assert dict(headers(beside.head()))[b"Twiceshy-Step"].endswith(b"#1")
    assert len(shared.received("any", method="POST")) == 1


def test_a_reset_behind_the_end_of_tls_is_a_reset(shared: Stack, agent: Secure, trust: ssl.SSLContext) -> None:
    """Who takes leave politely, and closes without having read."""
    unread = Tls.through(agent, here(shared), trust)
    unread.send(plain("POST", "/any/reset", here(shared), body=b"x"))
    _recorded(shared, agent.run)
    looked_at(agent)
    with stopped(shared.sidecar):
        unread.tls.setblocking(False)
        with contextlib.suppress(ssl.SSLError):
            unread.tls.unwrap()  # sends its half, and finds the answer instead of the other
        unread.reset()
    assert agent.ask("POST", "/any/reset", b"x").replayed
    assert len(shared.received("any")) == 1


def test_a_model_call_that_nobody_read_is_not_paid_for_twice(
    shared: Stack, run: str, origin: TlsOrigin, trust: ssl.SSLContext
) -> None:
    """SDKs reset behind a terminal event, so what the kernel acknowledged counts, also of a socket just closed."""
    attempt = shared.claim(run)
    body = json.dumps(CHAT | {"stream": False}).encode()
    asked = plain("POST", "/v1/chat/completions", origin.authority, b"Content-Type: application/json", body=body)
    wire = Wire.to(attempt, receive_buffer=1 << 12)
    wire.send(head_of_connect(attempt, origin.authority))
    wire.head()
    client = Tls(wire, trust, "127.0.0.1")
    client.send(asked)
    upstream = origin.accept()
    upstream.head()
    upstream.exactly(len(body))
    upstream.send(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n" + b" " * 100000
    )
    client.head()
    _recorded(shared, run)
    client.reset()
    again = Tls.through(attempt, origin.authority, trust)
    again.send(asked)
    assert (b"Twiceshy-Replayed", b"true") in headers(again.head())
    assert len(again.exactly(100000)) == 100000
    assert origin.nobody()


def test_who_closes_after_it_read_has_had_its_answer(shared: Stack, agent: Secure) -> None:
    for size in 10 * [3, 300_000]:
        assert agent.ask("POST", f"/any/x?size={size}", b"x").status == 200  # each on a connection of its own
    assert len(shared.received("any")) == 20


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_events_pass_at_once_and_the_end_waits_for_the_record(
    shared: Stack, run: str, origin: TlsOrigin, trust: ssl.SSLContext, version: ssl.TLSVersion
) -> None:
    trust.minimum_version = trust.maximum_version = version
    client = Tls.through(shared.claim(run), origin.authority, trust)
    body = json.dumps(CHAT).encode()
    client.send(plain("POST", "/v1/chat/completions", origin.authority, b"Content-Type: application/json", body=body))
    upstream = origin.accept()
    upstream.head()
    upstream.exactly(len(body))
    upstream.send(EVENTS)
    client.head()
    for n in range(5):
        event = b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % n
        upstream.send(b"%x\r\n%s\r\n" % (len(event), event))
        assert client.body_until(b"\n\n") == event
    with locked(shared.dsn, run) as lock:
        upstream.send(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        lock.wait_wanted()
        assert client.silent()
    assert client.body_until(None) == b"data: [DONE]\n\n"


def test_a_cut_stream_is_passed_on_as_cut(shared: Stack, run: str, origin: TlsOrigin, trust: ssl.SSLContext) -> None:
    attempt = shared.claim(run)
    client = Tls.through(attempt, origin.authority, trust)
    body = json.dumps(CHAT).encode()
    asked = plain("POST", "/v1/chat/completions", origin.authority, b"Content-Type: application/json", body=body)
    client.send(asked)
    upstream = origin.accept()
    upstream.head()
    upstream.exactly(len(body))
    event = b'data: {"choices":[{"delta":{"content":"half"}}]}\n\n'
    upstream.send(EVENTS + b"%x\r\n%s\r\n" % (len(event), event))
    client.head()
    assert client.body_until(b"\n\n") == event
    upstream.send(b"0\r\n\r\n")  # a clean end of half a text
    # Not every ssl module tells a connection's end from TLS's own; the final chunk that is missing tells everybody.
    with contextlib.suppress(ssl.SSLEOFError, ConnectionResetError):
        assert client.rest() == b""
    assert client._ahead == b""


def test_a_cut_answer_to_http_1_0_is_seen_as_cut(
    shared: Stack, run: str, origin: TlsOrigin, trust: ssl.SSLContext
) -> None:
    client = Tls.through(shared.claim(run), origin.authority, trust)
    client.send(plain("GET", "/any/x", origin.authority).replace(b"HTTP/1.1", b"HTTP/1.0"))
    origin.answer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", close=True)
    client.head()
    assert client.exactly(5) == b"hello"
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        client.rest()


def test_a_slow_reader_holds_up_nobody(shared: Stack, agent: Secure, trust: ssl.SSLContext) -> None:
    size = 20_000_000
    wire = Wire.to(agent, receive_buffer=1 << 14)
    wire.send(head_of_connect(agent, here(shared)))
    wire.head()
    client = Tls(wire, trust, "127.0.0.1")
    before = shared.sidecar.memory()
    client.send(plain("POST", f"/any/big?size={size}", here(shared), body=b"x"))
    head = client.head()
    _recorded(shared, agent.run)  # whole, while its client has read nothing
    assert shared.sidecar.memory() - before < 16 << 20
    assert agent.ask("GET", "/pantry").status == 200
    serial = int(dict(headers(head))[b"Sandbox-Serial"])
    for block in Pattern(size, serial):
        assert client.exactly(len(block)) == block
    # It had everything: an equal request is another one.
    assert agent.ask("POST", "/any/big?size=10", b"x").status == 200


# ---- what is left


def test_the_sidecar_ends_with_tunnels_open(shared: Stack, agent: Secure, trust: ssl.SSLContext) -> None:
    half = connected(agent, here(shared))
    half.send(ByHand(trust, "127.0.0.1").hello()[:20])
    idle = agent.connect()
    assert agent.ask("GET", "/pantry", connection=idle).status == 200
    shared.restart(kill=False)
    assert half.gone_after_head()
    text = shared.sidecar.log.read_text()
    assert "Traceback" not in text, text[-3000:]
    place = shared.folder / "ca"
    assert (place / authority.BUNDLE).read_text().endswith((place / authority.CERTIFICATE).read_text())


def _length(head: bytes) -> int:
    return int({name.lower(): value for name, value in headers(head)}[b"content-length"])


def _recorded(stack: Stack, run: str) -> None:
    stack.sandbox.wait_for(
        lambda: stack.fetch("SELECT FROM twiceshy.step WHERE run_id = $1 AND state = 'answered'", run), what="a record"
    )
