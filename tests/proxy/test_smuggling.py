"""Requests that two readers may read in two ways, at each door: judged by the bytes that the upstream received.

Each is followed by a request that an upstream would take for one of its own if it believed the other reading. Either
nothing of both goes out and the connection is over, or what goes out is framed anew, so that it reads one way only.
"""

import ssl
from collections.abc import Callable

import pytest

from tests.raw import OK, Origin, Wire, credentials, headers, refused
from tests.stack import Attempt, Stack
from tests.tunnelled import connected, trusting

HEAD = "POST {target} HTTP/1.1\r\nHost: {host}\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


# ---- the doors: how a request line names its target, and the connection that it goes to


def forward(attempt: Attempt, origin: Origin) -> tuple[Wire, str, bytes]:
    return Wire.to(attempt), origin.url("{path}"), credentials(attempt) + b"\r\n"


def gateway(attempt: Attempt, origin: Origin) -> tuple[Wire, str, bytes]:
    return Wire.to(attempt), f"/@{attempt.run}:{attempt.token}/http/127.0.0.1:{origin.port}{{path}}", b""


def tunnel(attempt: Attempt, origin: Origin) -> tuple[Wire, str, bytes]:
    """Plain HTTP in a tunnel: what is in it is of the tunnel's run without another word."""
    return connected(attempt, f"127.0.0.1:{origin.port}"), "{path}", b""


Open = Callable[[Attempt, Origin], tuple[Wire, str, bytes]]
DOORS: dict[str, Open] = {"forward": forward, "gateway": gateway, "tunnel": tunnel}


def opened(door: Open, attempt: Attempt, origin: Origin, vector: bytes) -> Wire:
    """A client that has sent *vector* behind a request's first lines, and another request behind that."""
    client, target, more = door(attempt, origin)
    host = f"127.0.0.1:{origin.port}"
    head = HEAD.format(target=target.replace("{path}", "/orders"), host=host).encode() + more
    behind = f"GET {target.replace('{path}', '/smuggled')} HTTP/1.1\r\nHost: {host}\r\n".encode() + more + b"\r\n"
    client.send(head + vector + behind)
    return client


REFUSED = {
    # two framings
    "length and chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n",
    "two equal lengths": b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n",
    "length list": b"Content-Length: 0, 5\r\n\r\n",
    "equal length list": b"Content-Length: 0, 0\r\n\r\n",
    "empty length": b"Content-Length:\r\n\r\n",
    "length with plus": b"Content-Length: +0\r\n\r\n",
    "length with minus": b"Content-Length: -1\r\n\r\n",
    "length in hex": b"Content-Length: 0x0\r\n\r\n",
    "length with a fraction": b"Content-Length: 0.0\r\n\r\n",
    "length with an underscore": b"Content-Length: 1_0\r\n\r\n0123456789",
    "length in other digits": "Content-Length: \u0660\r\n\r\n".encode(),
    "length with a space inside": b"Content-Length: 1 0\r\n\r\n0123456789",
    "length behind a vertical tab": b"Content-Length: \x0b0\r\n\r\n",
    # codings
    "coding behind a tab, and length": b"Transfer-Encoding:\tchunked\r\nContent-Length: 0\r\n\r\n",
    "unknown coding": b"Transfer-Encoding: xchunked\r\n\r\n",
    "chunked not last": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "coding and chunked": b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": b"Transfer-Encoding: identity\r\n\r\n",
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two codings": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "coding in quotes": b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "coding with a parameter": b"Transfer-Encoding: chunked;a=b\r\n\r\n0\r\n\r\n",
    "coding behind a vertical tab": b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "coding before a NUL": b"Transfer-Encoding: chunked\0\r\n\r\n0\r\n\r\n",
    "empty coding": b"Transfer-Encoding:\r\n\r\n",
    # names
    "space before colon": b"Content-Length : 0\r\n\r\n",
    "space in a name": b"Transfer Encoding: chunked\r\n\r\n",
    "space before a name": b" Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "NUL in a name": b"X\0: a\r\n\r\n",
    "no name": b": a\r\n\r\n",
    "no colon": b"Transfer-Encoding chunked\r\n\r\n",
    "name of other letters": "Transfer-Encoding\u00ad: chunked\r\n\r\n".encode(),
    # lines
    "folded header": b"X: a\r\n b\r\n\r\n",
    "folded coding": b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "folded length": b"Content-Length:\r\n\t0\r\n\r\n",
    "bare LF": b"X: a\nContent-Length: 0\r\n\r\n",
    "bare CR": b"X: a\rContent-Length: 0\r\n\r\n",
    "head ended by bare LFs": b"X: a\n\n",
    "NUL": b"X: a\0b\r\n\r\n",
    "two hosts": b"Host: other\r\n\r\n",
    # chunks
    "chunk size in hex": CHUNKED + b"\r\n0x0\r\n\r\n",
    "chunk size with sign": CHUNKED + b"\r\n+0\r\n\r\n",
    "negative chunk size": CHUNKED + b"\r\n-1\r\n\r\n",
    "chunk size with an underscore": CHUNKED + b"\r\n1_0\r\n0123456789abcdef\r\n0\r\n\r\n",
    "chunk size of 17 digits": CHUNKED + b"\r\n10000000000000003\r\nabc\r\n0\r\n\r\n",
    "empty chunk size": CHUNKED + b"\r\n\r\n0\r\n\r\n",
    "space before a chunk size": CHUNKED + b"\r\n 3\r\nabc\r\n0\r\n\r\n",
    "chunk without CRLF": CHUNKED + b"\r\n3\r\nabcX\r\n0\r\n\r\n",
    "chunk line with bare LF": CHUNKED + b"\r\n3\nabc\r\n0\r\n\r\n",
    "chunk ended by bare LF": CHUNKED + b"\r\n3\r\nabc\n0\r\n\r\n",
    "chunk extension with bare LF": CHUNKED + b"\r\n3;a\nb\r\nabc\r\n0\r\n\r\n",
    "a length as trailer": CHUNKED + b"Trailer: Content-Length\r\n\r\n0\r\nContent-Length: 40\r\n\r\n",
    "a coding as trailer": CHUNKED + b"\r\n3\r\nabc\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a host as trailer": CHUNKED + b"\r\n0\r\nHost: other\r\n\r\n",
    "last chunk with bare LF": CHUNKED + b"\r\n3\r\nabc\r\n0\n\n",
}

#: what is sent -> the body that goes out, by its length
REFRAMED = {
    "coding in capitals": (b"transfer-encoding: CHUNKED\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc"),
    "chunk extension": (CHUNKED + b'\r\n3;a="b;c"\r\nabc\r\n0;d\r\n\r\n', b"abc"),
    "zeros before a chunk size": (CHUNKED + b"\r\n0003\r\nabc\r\n000\r\n\r\n", b"abc"),
    "a trailer": (CHUNKED + b"Trailer: X-T\r\n\r\n3\r\nabc\r\n0\r\nX-T: t\r\n\r\n", b"abc"),
    "length named in Connection": (b"Connection: Content-Length\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    "coding named in Connection": (
        b"Connection: Transfer-Encoding\r\n" + CHUNKED + b"\r\n3\r\nabc\r\n0\r\n\r\n", b"abc",
    ),
    "zeros before a length": (b"Content-Length: 003\r\n\r\nabc", b"abc"),
    "a request as body": (b"Content-Length: 23\r\n\r\nGET /inner HTTP/1.1\r\n\r\n", b"GET /inner HTTP/1.1\r\n\r\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_two_ways_ends_at_the_door(shared: Stack, run: str, origin: Origin, name: str) -> None:
    attempt = shared.claim(run)
    for door in DOORS.values():
        client = opened(door, attempt, origin, REFUSED[name])
        refused(client, 400)
        assert client.rest_of_cut() == b""  # one answer, and the connection is over
    assert origin.nobody(0.05)


def framed(upstream: Wire) -> bytes:
    """The body of the request that *upstream* receives, which must be framed in one way only."""
    head = upstream.head()
    assert head.startswith(b"POST /orders HTTP/1.1\r\n"), head
    found: dict[bytes, list[bytes]] = {}
    for name, value in headers(head):
        found.setdefault(name.lower(), []).append(value)
    assert not {b"transfer-encoding", b"trailer", b"upgrade", b"http2-settings"} & set(found), head
    [length] = found[b"content-length"]
    assert len(found[b"host"]) == 1
    return upstream.exactly(int(length))


@pytest.mark.parametrize("name", REFRAMED)
@pytest.mark.parametrize("door", DOORS)
def test_what_reads_one_way_goes_out_framed_anew(shared: Stack, run: str, origin: Origin, name: str, door: str) -> None:
    vector, body = REFRAMED[name]
    client = opened(DOORS[door], shared.claim(run), origin, vector)
    upstream = origin.accept()
    got = framed(upstream)
    assert got == body
    upstream.send(OK)
    assert client.head().startswith(b"HTTP/1.1 200")
    assert client.exactly(2) == b"hi"
    # The one behind it is a request of its own, as its sender meant it.
    assert upstream.head().startswith(b"GET /smuggled HTTP/1.1\r\n")
    upstream.send(OK)
    assert client.head().startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("door", DOORS)
def test_nothing_behind_an_upgrade_is_read(shared: Stack, run: str, origin: Origin, door: str) -> None:
    """It may be of another protocol: what was asked is answered, in this one, and the connection is over."""
    vector = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: A\r\n\r\n"
    client = opened(DOORS[door], shared.claim(run), origin, vector)
    upstream = origin.accept()
    assert framed(upstream) == b""
    upstream.send(OK)
    assert (b"Connection", b"close") in headers(client.head())
    assert client.rest_of_cut() == b"hi"
    assert upstream.silent(0.05)


def test_inside_tls_it_ends_as_well(shared: Stack, run: str, origin: Origin) -> None:
    """One of each kind: the same reader stands behind every door."""
    context: ssl.SSLContext = trusting(shared)
    attempt = shared.claim(run)
    for name in ("length and chunks", "two lengths", "folded coding", "bare LF", "chunk without CRLF", "two hosts"):
        wire = connected(attempt, f"127.0.0.1:{origin.port}")
        tls = Wire(context.wrap_socket(wire.sock, server_hostname="127.0.0.1"))
        head = HEAD.format(target="/orders", host=f"127.0.0.1:{origin.port}").encode()
        tls.send(head + REFUSED[name] + b"GET /smuggled HTTP/1.1\r\n\r\n")
        refused(tls, 400)
        assert tls.rest_of_cut() == b""
    assert origin.nobody(0.05)
