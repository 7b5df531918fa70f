"""The handshake of a WebSocket as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.message import Request
from proxy.upgrade import Extent, Malformed, fault, is_asked_for, is_http2, read_answer, request_head

ASKED = ((b"Connection", b"keep-alive, Upgrade"), (b"Upgrade", b"WebSocket"))


def test_what_asks_for_a_websocket() -> None:
    assert is_asked_for(ASKED)
    assert not is_asked_for(((b"Upgrade", b"h2c"), (b"Connection", b"Upgrade")))
    assert fault("GET", ASKED, http10=False) is None
    assert fault("GET", (*ASKED, (b"Content-Length", b"0")), http10=False) is None
    assert "GET" in str(fault("POST", ASKED, http10=False))
    assert "GET" in str(fault("GET", ASKED, http10=True))
    assert "Connection" in str(fault("GET", ASKED[1:], http10=False))
    assert "no body" in str(fault("GET", (*ASKED, (b"Content-Length", b"5")), http10=False))
    assert "no body" in str(fault("GET", (*ASKED, (b"Transfer-Encoding", b"chunked")), http10=False))


def test_the_head_that_goes_upstream() -> None:
    headers = ((b"sec-websocket-KEY", b"x"), (b"X-A", b"1"), (b"x-a", b"2"))
    request = Request("GET", "https", "a.test", 8443, "/r/%61/../b?x=%2F&", headers, b"")
    assert request_head(request, (b"Via", b"1.1 us")) == (
        b"GET /r/%61/../b?x=%2F& HTTP/1.1\r\nHost: a.test:8443\r\nsec-websocket-KEY: x\r\nX-A: 1\r\nx-a: 2\r\n"
        b"Via: 1.1 us\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    )


def test_an_answer_is_read_and_ends_its_connection() -> None:
    raw = b"HTTP/1.1 403 No way\r\nx-odd:  1 \r\nconnection: keep-alive\r\nKeep-Alive: 5\r\nContent-Length: 2\r\n\r\n"
    answer = read_answer(raw)
    assert (answer.status, answer.raw) == (403, raw)
    assert answer.headers[0] == (b"x-odd", b"1")
    assert answer.closing() == (b"HTTP/1.1 403 No way\r\nx-odd:  1 \r\nContent-Length: 2\r\nConnection: close\r\n\r\n")
    assert read_answer(b"HTTP/1.1 101\r\n\r\n").status == 101
    for bad in (
        b"HTTP/2 200\r\n\r\n",
        b"hello\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 9x\r\n\r\n",
    ):
        with pytest.raises(Malformed):
            read_answer(bad)


def test_http2_is_known_by_its_first_bytes() -> None:
    assert is_http2(bytes.fromhex("000000040000000000"))
    assert is_http2(bytes.fromhex("000012040000000000"))
    assert not is_http2(b"HTTP/1.1 ")


BODIES = [
    (b"Content-Length: 5\r\n", b"hello", b"HTTP/1.1 200 the next"),
    (b"Content-Length: 0\r\n", b"", b"x"),
    (b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"more"),
    (b"Transfer-Encoding: Chunked\r\n", b"A;x=y\r\n0123456789\r\n1\nx\r\n0\r\nTrailer: 1\r\n\r\n", b"0\r\n\r\n"),
]


@given(st.sampled_from(BODIES), st.integers(1, 9))
def test_where_a_body_ends(body: tuple[bytes, bytes, bytes], size: int) -> None:
    header, whole, more = body
    extent = Extent(read_answer(b"HTTP/1.1 400 Bad\r\n" + header + b"\r\n"))
    data, taken = whole + more, b""
    for at in range(0, len(data), size):
        assert extent.over == (len(taken) == len(whole))
        taken += extent.take(data[at : at + size])
    assert extent.over
    assert taken == whole
    assert not extent.by_close


def test_a_body_may_end_with_its_connection_or_not_be_there() -> None:
    extent = Extent(read_answer(b"HTTP/1.1 200 OK\r\n\r\n"))
    assert extent.by_close
    assert extent.take(b"all of it") == b"all of it"
    assert not extent.over
    assert Extent(read_answer(b"HTTP/1.1 204 None\r\n\r\n")).over


@pytest.mark.parametrize("bad", [b"x\r\n", b"-1\r\n", b"\r\n", b"5" * 70000, b"5\r\nhello0\r\n\r\n" + b"z\r\n"])
def test_chunks_that_are_none(bad: bytes) -> None:
    extent = Extent(read_answer(b"HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\n"))
    with pytest.raises(Malformed):
        extent.take(bad)
