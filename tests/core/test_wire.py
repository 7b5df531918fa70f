"""The bytes of an answer: a client that reads HTTP reads back what was given, whole or visibly cut."""

import http.client
import io
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.message import Headers
from proxy.wire import Framing, content_length, end, framing, head, piece, upstream_headers

STATUSES = [200, 201, 204, 301, 304, 404, 500, 503]


class _Socket:
    """What ``http.client`` reads from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._data)


def read(method: str, data: bytes) -> http.client.HTTPResponse:
    answer = http.client.HTTPResponse(_Socket(data), method=method)  # type: ignore[arg-type]
    answer.begin()
    return answer


def written(method: str, status: int, headers: Headers, pieces: list[bytes], *, http10: bool = False) -> bytes:
    kind = framing(method, status, headers, http10=http10)
    out = head(status, b"Words", headers, kind, keep_alive=True)
    if kind is Framing.NONE:
        return out
    return out + b"".join(piece(data, kind) for data in pieces) + end(kind)


# ---- framing


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("http10", [False, True])
def test_the_framing_says_where_a_body_ends(status: int, http10: bool) -> None:
    length = ((b"content-length", b"3"),)
    unknown = Framing.CLOSE if http10 else Framing.CHUNKED
    bodyless = status in (204, 304)
    assert framing("HEAD", status, length, http10=http10) is Framing.NONE
    assert framing("GET", status, length, http10=http10) is (Framing.NONE if bodyless else Framing.LENGTH)
    assert framing("POST", status, (), http10=http10) is (Framing.NONE if bodyless else unknown)


@pytest.mark.parametrize(
    ("value", "length"),
    [(b"0", 0), (b"12", 12), (b" 12 ", 12), (b"", None), (b"-1", None), (b"+1", None), (b"1, 1", None), (b"0x1", None)],
)
def test_a_content_length_is_a_number(value: bytes, length: int | None) -> None:
    assert content_length(((b"Content-Length", value),)) == length


# ---- headers of an upstream


def test_only_end_to_end_headers_of_an_upstream_are_kept() -> None:
    raw = (
        (b"Date", b"x"), (b"Content-Length", b"5"), (b"Connection", b"keep-alive, X-Hop"), (b"X-Hop", b"1"),
        (b"Transfer-Encoding", b"chunked"), (b"Set-Cookie", b"a"), (b"Set-Cookie", b"b"), (b"Proxy-Authenticate", b"x"),
        (b"Twiceshy-Replayed", b"true"), (b"Keep-Alive", b"5"), (b"Upgrade", b"h2c"),
    )  # fmt: skip
    assert upstream_headers(raw, 200) == (
        (b"Date", b"x"), (b"Set-Cookie", b"a"), (b"Set-Cookie", b"b"), (b"Content-Length", b"5"),
    )  # fmt: skip


def test_the_length_is_kept_where_it_says_something() -> None:
    """Content-Length kept for HEAD and 304; a 204 has none."""
    raw = ((b"content-length", b"5"),)
    assert upstream_headers(raw, 304) == raw
    assert upstream_headers(raw, 204) == ()
    assert upstream_headers((*raw, (b"Content-Length", b"5")), 200) == raw


@pytest.mark.parametrize("value", [b"", b"-1", b"1, 1", b"abc", b"1 1", b"\xb2"])
def test_a_length_that_is_none_is_not_passed_on(value: bytes) -> None:
    """Beside Transfer-Encoding it would be two lengths: the way requests are smuggled."""
    assert upstream_headers(((b"Content-Length", value), (b"A", b"1")), 200) == ((b"A", b"1"),)


def test_a_length_named_in_connection_stays_what_it_is() -> None:
    raw = ((b"Connection", b"Content-Length"), (b"Content-Length", b"5"))
    assert upstream_headers(raw, 200) == ((b"Content-Length", b"5"),)


# ---- bytes

token = st.text(string.ascii_letters + string.digits + "-", min_size=1, max_size=10).map(
    lambda text: f"X-{text}".encode()
)
value = st.text(string.ascii_letters + string.digits + " /;=,", max_size=20).map(lambda text: text.strip().encode())
some_headers = st.lists(st.tuples(token, value), max_size=5).map(tuple)
pieces_of_a_body = st.lists(st.binary(max_size=40), max_size=6)


@given(
    st.sampled_from(["GET", "POST", "HEAD"]), st.sampled_from(STATUSES), some_headers, pieces_of_a_body, st.booleans()
)
def test_a_client_reads_what_was_given(
    method: str, status: int, headers: Headers, pieces: list[bytes], http10: bool
) -> None:
    body = b"".join(pieces)
    for given_headers in (headers, (*headers, (b"Content-Length", b"%d" % len(body)))):
        answer = read(method, written(method, status, given_headers, pieces, http10=http10))
        bodyless = method == "HEAD" or status in (204, 304)
        assert (answer.status, answer.reason) == (status, "Words")
        assert answer.read() == (b"" if bodyless else body)
        for name, each in given_headers:
            assert each.decode() in (answer.headers.get_all(name.decode()) or [])


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6))
def test_an_answer_without_its_end_is_seen_to_be_cut(pieces: list[bytes]) -> None:
    """No piece ends the body by itself: an empty one is nothing at all."""
    whole = b"".join(pieces)
    for headers in ((), ((b"Content-Length", b"%d" % (len(whole) + 1)),)):
        kind = framing("GET", 200, headers, http10=False)
        data = head(200, b"OK", headers, kind, keep_alive=True)
        data += b"".join(piece(each, kind) for each in [*pieces, b""])
        with pytest.raises(http.client.IncompleteRead):
            read("GET", data).read()


@pytest.mark.parametrize(
    ("kind", "keep_alive", "close"),
    [
        (Framing.LENGTH, True, False),
        (Framing.LENGTH, False, True),
        (Framing.CHUNKED, True, False),
        (Framing.CLOSE, True, True),
        (Framing.NONE, True, False),
        (Framing.NONE, False, True),
    ],
)
def test_a_connection_that_ends_says_so(kind: Framing, keep_alive: bool, close: bool) -> None:
    lines = head(200, b"OK", (), kind, keep_alive=keep_alive).split(b"\r\n")
    assert (b"Connection: close" in lines) is close
    assert (b"Transfer-Encoding: chunked" in lines) is (kind is Framing.CHUNKED)


def test_nothing_is_added_but_what_was_given() -> None:
    """aiohttp's own answers add Date, Server and Content-Type."""
    extra = ((b"Twiceshy-Replayed", b"true"),)
    assert head(200, b"Fine", ((b"a", b"1"), (b"A", b"2")), Framing.LENGTH, keep_alive=True, extra=extra) == (
        b"HTTP/1.1 200 Fine\r\na: 1\r\nA: 2\r\nTwiceshy-Replayed: true\r\n\r\n"
    )
