"""What may not pass unopened is refused inside the tunnel, and what rules deny everywhere."""

import socket

import pytest

from tests.raw import OK, Origin, Wire, asked, refused
from tests.stack import Stack
from tests.tunnelled import (
    ESTABLISHED,
    ByHand,
    Tls,
    connected,
    head_of_connect,
    refused_by_upstream,
    trusting,
    unopened,
)


def inside(wire: Wire, stack: Stack, name: str = "localhost") -> Tls:
    """The TLS that the sidecar opens after all, for a refusal."""
    client = Tls(wire, trusting(stack), name)
    client.send(b"GET / HTTP/1.1\r\nHost: " + name.encode() + b"\r\n\r\n")
    return client


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        (b"X: none", 428, "no-run"),
        (b"Proxy-Authorization: Basic !!!", 400, "bad-identity"),
        (b"Proxy-Authorization: Basic cjE6bm9ib2R5cw==", 423, "fenced"),  # r1:nobodys
    ],
)
def test_who_may_not_pass_is_told_inside(
    shared: Stack, run: str, plain: Origin, line: bytes, status: int, code: str
) -> None:
    attempt = shared.claim(run)
    for ahead in (False, True):
        wire = Wire.to(attempt)
        hello = ByHand(trusting(shared), "localhost")
        wire.send(head_of_connect(None, unopened(plain), line) + (hello.hello() if ahead else b""))
        assert wire.sock.recv(len(ESTABLISHED)) == ESTABLISHED
        asks = b"GET / HTTP/1.1\r\nHost: " + unopened(plain).encode() + b"\r\n\r\n"
        if ahead:
            wire.send(hello.finish(wire))
            wire.send(hello.sealed(asks))
            assert hello.until(wire, b"\r\n\r\n").startswith(b"HTTP/1.1 %d " % status)
        else:
            client = Tls(wire, trusting(shared), "localhost")
            client.send(asks)
            refused(client, status, code)
    words = connected(attempt, unopened(plain), line, bare=True)
    words.send(b"GET / HTTP/1.1\r\nHost: " + unopened(plain).encode() + b"\r\n\r\n")
    refused(words, status, code)
    assert plain.nobody()


def test_a_run_that_is_over_passes_nothing(shared: Stack, run: str, plain: Origin) -> None:
    attempt = shared.claim(run)
    shared.end(attempt, "done", 0)
    refused(inside(connected(attempt, unopened(plain)), shared), 423, "fenced")
    assert plain.nobody()


def test_an_upstream_that_is_not_there(shared: Stack, run: str) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        wire = connected(shared.claim(run), f"localhost:{taken.getsockname()[1]}")
        client = inside(wire, shared)
        assert "Nothing was sent" in refused_by_upstream(client)


@pytest.mark.parametrize("to", ["169.254.169.254:443", "0.0.0.0:443", "localhost:{own}", "127.0.0.2:{own}"])
def test_addresses_that_nobody_may_reach(shared: Stack, run: str, to: str) -> None:
    to = to.format(own=shared.sidecar.port)
    refused(inside(connected(shared.claim(run), to), shared, to.partition(":")[0]), 403, "denied")


def test_plain_http_and_the_gateway_pass_unjournalled(shared: Stack, run: str, plain: Origin) -> None:
    attempt = shared.claim(run)
    client = asked(attempt, "POST", f"http://{unopened(plain)}/x", body=b"1")
    upstream = plain.accept()
    assert b"roxy" not in upstream.head()
    upstream.send(OK)
    assert client.head().startswith(b"HTTP/1.1 200")
    gateway = Wire.to(attempt)
    gateway.send(
        f"POST /@{run}:{attempt.token}/http/{unopened(plain)}/y HTTP/1.1\r\nHost: localhost:{attempt.port}\r\n"
        "Content-Length: 0\r\n\r\n".encode()
    )
    upstream.exactly(1)
    assert upstream.head().startswith(b"POST /y ")
    upstream.send(OK)
    assert gateway.head().startswith(b"HTTP/1.1 200")
    assert shared.fetch("SELECT FROM twiceshy.step WHERE run_id = $1", run) == []


def test_what_is_denied(shared: Stack, run: str, plain: Origin) -> None:
    attempt = shared.claim(run)
    client = Tls.through(attempt, f"127.0.0.3:{plain.port}", trusting(shared))
    client.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.3:%d\r\n\r\n" % plain.port)
    assert "nobody goes there" in refused(client, 403, "denied")
    assert "no deletes" in refused(asked(attempt, "DELETE", plain.url("/admin/x"), body=b""), 403, "denied")
    assert plain.nobody()
    allowed = asked(attempt, "DELETE", plain.url("/other"))
    plain.answer(OK)
    assert allowed.head().startswith(b"HTTP/1.1 200")
    assert attempt.report()["arrived"] == {
        f"127.0.0.3:{plain.port}": {"refused": 1}, f"127.0.0.1:{plain.port}": {"refused": 1, "journalled": 1}
    }  # fmt: skip
