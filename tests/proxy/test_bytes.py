"""What an upstream answered is what the agent gets, live and replayed: status line, headers, body, byte for byte."""

import gzip

import pytest

from tests.raw import Origin, Wire, asked, headers, request
from tests.stack import Attempt, Stack

OWN = {b"twiceshy-step", b"twiceshy-replayed", b"transfer-encoding", b"content-length", b"connection"}
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
EVENTS = b"Content-Type: text/event-stream\r\n"


def chunks(data: bytes, size: int) -> bytes:
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def by_length(data: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n%s" % (len(data), data)


SSE_CRLF = b"".join(b"event: e\r\ndata: %d\r\n: comment\r\n\r\n" % n for n in range(5))
ANTHROPIC = (
    b"\xef\xbb\xbfevent: message_start\r\ndata: {}\r\n\r\n: ping\r\rdata: \xff\xfe\n\n"
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n\n: after the end'
)
ZIPPED = gzip.compress(b"data: 1\n\ndata: [DONE]\n\n", mtime=0)
BINARY = bytes(range(256)) * 300

#: name -> method, target, the upstream's answer, the body in it
ANSWERS: dict[str, tuple[str, str, bytes, bytes]] = {
    "no Date, Server, Content-Type": ("GET", "/a", OK + b"Content-Length: 2\r\n\r\nhi", b"hi"),
    "duplicates in other casing, empty values": (
        "GET", "/a",
        OK + b"X-Dup: 1\r\nx-dup: 2\r\nSet-Cookie: a\r\nX-Empty:\r\nSet-Cookie: b\r\nDATE: now\r\n" + by_length(b"hi"),
        b"hi",
    ),
    "latin-1 in a header and in the reason": (
        "GET", "/a", b"HTTP/1.1 200 Tr\xe8s bien\r\nX-Name: caf\xe9 \xff\r\nContent-Length: 0\r\n\r\n", b"",
    ),
    "UTF-8 in a header and in the reason": (
        "GET", "/a", "HTTP/1.1 200 Très bien\r\nX-Name: café\r\nContent-Length: 0\r\n\r\n".encode(), b"",
    ),
    "no reason": ("GET", "/a", b"HTTP/1.1 200 \r\nContent-Length: 1\r\n\r\nx", b"x"),
    "a status nobody knows": ("GET", "/a", b"HTTP/1.1 299 Odd One\r\nContent-Length: 1\r\n\r\nx", b"x"),
    "204": ("POST", "/a", b"HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n", b""),
    "304": ("GET", "/a", b'HTTP/1.1 304 Not Modified\r\nContent-Length: 42\r\nETag: "a"\r\n\r\n', b""),
    "HEAD": ("HEAD", "/a", OK + b"Content-Length: 42\r\nContent-Type: a/b\r\n\r\n", b""),
    "a redirect is the agent's to follow": (
        "GET", "/a", b"HTTP/1.1 302 Found\r\nLocation: /b\r\nContent-Length: 0\r\n\r\n", b"",
    ),
    "close-delimited": ("GET", "/a", OK + b"X-A: b\r\n\r\nto the end", b"to the end"),
    "HTTP/1.0": ("GET", "/a", b"HTTP/1.0 200 OK\r\nX-A: b\r\n\r\nto the end", b"to the end"),
    "binary": (
        "POST", "/orders", b"HTTP/1.1 201 Created\r\n" + by_length(BINARY), BINARY,
    ),
    "in chunks of 7": ("POST", "/orders", OK + CHUNKED + b"\r\n" + chunks(BINARY, 777), BINARY),
    "chunk extensions and trailers": (
        "GET", "/a", OK + b"Trailer: X-T\r\n" + CHUNKED + b"\r\n3;a=b\r\nabc\r\n0;z\r\nX-T: u\r\n\r\n", b"abc",
    ),
    "compressed": (
        "GET", "/a", OK + b"Content-Encoding: gzip\r\n" + by_length(ZIPPED),
        ZIPPED,
    ),
    "events with CRLF": ("GET", "/a", OK + EVENTS + CHUNKED + b"\r\n" + chunks(SSE_CRLF, 5), SSE_CRLF),
    "events of a known dialect, every line end there is": (
        "POST", "/v1/messages", OK + EVENTS + CHUNKED + b"\r\n" + chunks(ANTHROPIC, 3), ANTHROPIC,
    ),
    "events of a known dialect, compressed all the same": (
        "POST", "/v1/chat/completions",
        OK + b"Content-Encoding: gzip\r\n" + EVENTS + CHUNKED + b"\r\n" + chunks(ZIPPED, 7), ZIPPED,
    ),
    "events of a known dialect by length": (
        "POST", "/v1/messages",
        OK + EVENTS + by_length(ANTHROPIC), ANTHROPIC,
    ),
    "events of a known dialect to the end": (
        "POST", "/v1/messages", OK + EVENTS + b"\r\n" + ANTHROPIC, ANTHROPIC,
    ),
    "an error without the end of its dialect": (
        "POST", "/v1/messages", b"HTTP/1.1 400 Bad\r\n" + EVENTS + b"Content-Length: 4\r\n\r\noops", b"oops",
    ),
}  # fmt: skip


def read(client: Wire, bodyless: bool) -> tuple[bytes, bytes]:
    """An answer's head and body."""
    head = client.head()
    lengths = [value for name, value in headers(head) if name == b"Content-Length"]
    if bodyless:
        return head, b""
    return head, client.exactly(int(lengths[0])) if lengths else client.body_until(None)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_the_same_live_and_replayed(shared: Stack, run: str, origin: Origin, name: str) -> None:
    method, target, answer, body = ANSWERS[name]
    bodyless = name in ("204", "304", "HEAD")
    closed = b"Content-Length" not in answer and CHUNKED not in answer and not bodyless
    theirs = answer.split(b"\r\n\r\n")[0] + b"\r\n\r\n"

    first = shared.claim(run)
    client = asked(first, method, origin.url(target), body=b"{}" if method == "POST" else None)
    upstream = origin.accept()
    upstream.head()
    upstream.send(answer)
    if closed:
        upstream.close()
    head, got = read(client, bodyless)
    assert got == body
    if not closed:
        # The connection stands: nothing is behind the answer.
        assert client.silent(0.05)
    shared.end(first, "died")

    again = asked(shared.claim(run), method, origin.url(target), body=b"{}" if method == "POST" else None)
    replayed, same = read(again, bodyless)
    assert same == body
    assert again.silent(0.05)
    assert origin.nobody(0.02)

    for each in (head, replayed):
        assert each.split(b"\r\n")[0].partition(b" ")[2] == theirs.split(b"\r\n")[0].partition(b" ")[2]
        passed = [pair for pair in headers(each) if pair[0].lower() not in OWN]
        assert passed == [pair for pair in headers(theirs) if pair[0].lower() not in (*OWN, b"trailer")]
        lengths = [pair for pair in headers(each) if pair[0].lower() == b"content-length"]
        assert lengths == [pair for pair in headers(theirs) if pair[0].lower() == b"content-length"]
        assert each.count(b"Transfer-Encoding: chunked\r\n") == (not lengths and not bodyless)
        assert b"\r\nConnection:" not in each
    assert (b"Twiceshy-Replayed", b"true") in headers(replayed)
    assert b"Twiceshy-Replayed" not in head


def test_hop_by_hop_headers_and_what_speaks_in_our_name_stay_behind(shared: Stack, run: str, origin: Origin) -> None:
    client = asked(shared.claim(run), "GET", origin.url("/a"))
    origin.answer(
        b"HTTP/1.1 200 OK\r\nConnection: X-Hop, keep-alive\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nUpgrade: h2c\r\n"
        b"Proxy-Authenticate: Basic\r\nTwiceshy-Replayed: true\r\nTwiceshy-Error: fenced\r\nX-Kept: yes\r\n"
        b"Content-Length: 2\r\n\r\nhi"
    )
    names = [name for name, _ in headers(client.head())]
    assert names == [b"X-Kept", b"Content-Length", b"Twiceshy-Step"]


@pytest.mark.parametrize(
    "before", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"]
)
def test_informational_answers_are_swallowed(shared: Stack, run: str, origin: Origin, before: bytes) -> None:
    client = asked(shared.claim(run), "POST", origin.url("/orders"), body=b"{}")
    upstream = origin.accept()
    upstream.head()
    upstream.send(before)
    assert client.silent()
    upstream.send(before + b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nhi")
    assert client.head().startswith(b"HTTP/1.1 201 Created\r\n")
    assert client.exactly(2) == b"hi"
    assert client.silent()


def test_a_protocol_that_nobody_asked_for_is_no_answer(shared: Stack, run: str, origin: Origin) -> None:
    client = asked(shared.claim(run), "POST", origin.url("/any/x"), body=b"{}")
    origin.answer(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\nraw")
    assert client.head().startswith(b"HTTP/1.1 424 ")


def test_trailers_of_one_answer_are_not_headers_of_the_next(shared: Stack, run: str, origin: Origin) -> None:
    attempt = shared.claim(run)
    client = asked(attempt, "GET", origin.url("/a"))
    upstream = origin.accept()
    upstream.head()
    upstream.send(b"HTTP/1.1 200 OK\r\n" + CHUNKED + b"\r\n1\r\na\r\n0\r\nX-Trailer: t\r\nX-Other: u\r\n\r\n")
    client.head()
    assert client.body_until(None) == b"a"
    second = asked(attempt, "GET", origin.url("/b"))
    upstream.head()  # on the same connection
    upstream.send(b"HTTP/1.1 200 OK\r\nX-B: b\r\nContent-Length: 1\r\n\r\nb")
    assert [name for name, _ in headers(second.head())] == [b"X-B", b"Content-Length", b"Twiceshy-Step"]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5x\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 1\r\n\r\nx",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70000 + b"\r\nContent-Length: 1\r\n\r\nx",
    ],
    ids=["length and chunks", "two lengths", "negative", "no number", "NUL", "not HTTP", "70 KB header"],
)
def test_an_answer_that_cannot_be_understood_is_none(shared: Stack, run: str, origin: Origin, answer: bytes) -> None:
    client = asked(shared.claim(run), "POST", origin.url("/any/x"), body=b"{}")
    origin.answer(answer, close=True)
    head = client.head()
    assert head.startswith(b"HTTP/1.1 424 ")
    assert (b"Twiceshy-Error", b"ambiguous") in headers(head)


def test_an_answer_that_cannot_be_understood_is_not_quoted_at_length(shared: Stack, run: str, origin: Origin) -> None:
    client = asked(shared.claim(run), "POST", origin.url("/long"))
    origin.answer(b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", close=True)
    head, body = read(client, bodyless=False)
    assert b" 424 " in head.splitlines()[0]
    assert len(body) < 4000
    assert len(shared.fetch("SELECT stop_message FROM twiceshy.run WHERE id = $1", run)[0][0]) < 1000


def test_a_folded_header_splits_nothing(shared: Stack, run: str, origin: Origin) -> None:
    client = asked(shared.claim(run), "GET", origin.url("/a"))
    origin.answer(b"HTTP/1.1 200 OK\r\nX-A: one\r\n two\r\nX-B: b\r\nContent-Length: 2\r\n\r\nhi")
    found = dict(headers(client.head()))
    assert found[b"X-A"].split() in ([b"one", b"two"], [b"onetwo"])
    assert found[b"X-B"] == b"b"
    assert client.exactly(2) == b"hi"


def test_heads_of_1000_headers_and_of_20_kb_pass_both_ways(shared: Stack, run: str, origin: Origin) -> None:
    many = [b"X-%d: %d" % (n, n) for n in range(900)]
    large = b"X-Large: " + b"l" * 20000
    client = asked(shared.claim(run), "GET", origin.url("/a"), *many, large)
    head = origin.answer(b"\r\n".join([b"HTTP/1.1 200 OK", *many, large, b"Content-Length: 2", b"", b"hi"]))
    for each in (head, client.head()):
        lines = each.split(b"\r\n")
        assert [line for line in lines if line.startswith(b"X-")] == [*many, large]
    assert client.exactly(2) == b"hi"


# ---- clients of HTTP/1.0, which know no chunks


def old(attempt: Attempt, origin: Origin) -> Wire:
    client = Wire.to(attempt)
    lines = [b"Connection: keep-alive"]
    client.send(request(attempt, "POST", origin.url("/orders"), *lines, body=b"{}", version=b"HTTP/1.0"))
    return client


def old_head(client: Wire) -> None:
    head = client.head()
    assert (b"Connection", b"close") in headers(head)
    assert b"Transfer-Encoding" not in head


def test_a_client_of_http_1_0_sees_the_end_by_the_close(shared: Stack, run: str, origin: Origin) -> None:
    first = shared.claim(run)
    client = old(first, origin)
    origin.answer(b"HTTP/1.1 200 OK\r\n" + CHUNKED + b"\r\n5\r\nhello\r\n0\r\n\r\n")
    old_head(client)
    assert client.rest() == b"hello"
    shared.end(first, "died")
    again = old(shared.claim(run), origin)
    old_head(again)
    assert again.rest() == b"hello"


def test_a_client_of_http_1_0_sees_a_cut_by_a_reset(shared: Stack, run: str, origin: Origin) -> None:
    first = shared.claim(run)
    client = old(first, origin)
    upstream = origin.accept()
    upstream.head()
    upstream.send(b"HTTP/1.1 200 OK\r\n" + CHUNKED + b"\r\n5\r\nhello\r\n")
    old_head(client)
    assert client.exactly(5) == b"hello"
    upstream.close()
    with pytest.raises(ConnectionResetError):
        client.rest()
    assert first.ask("POST", shared.url("/crm/notes"), {"text": "acted on it"}).status // 100 == 2
    shared.end(first, "died")
    again = old(shared.claim(run), origin)
    old_head(again)
    with pytest.raises(ConnectionResetError):
        again.rest()
