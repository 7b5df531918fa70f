"""What comes in at the door and what of it goes out to an upstream, judged by the bytes on both sides."""

import pytest

from tests.raw import OK, Origin, Wire, asked, credentials, headers, refused, request
from tests.stack import Attempt, Stack

CHUNKED = b"Transfer-Encoding: chunked"


# ---- the head that goes out


@pytest.mark.parametrize(
    "target",
    [
        "/a%2Fb/%61/../c//d;e?x=%2F&y=a+b&z=%7e",
        "//two//slashes/",
        "/.%2e/./..",
        "/q?a=b?c=d&&=&%zz",
        "/|^`{}<>\"'\\",
        "/" + "long/" * 10000,
    ],
    ids=["escapes", "slashes", "dots", "query", "odd", "50 KB"],
)
def test_the_target_arrives_byte_for_byte(shared: Stack, run: str, origin: Origin, target: str) -> None:
    client = asked(shared.claim(run), "GET", origin.url(target))
    head = origin.answer(OK)
    assert head.split(b"\r\n")[0] == b"GET " + target.encode() + b" HTTP/1.1"
    client.head()


@pytest.mark.parametrize(
    ("url", "line", "host"),
    [
        ("{0}?x=1", b"GET /?x=1 HTTP/1.1", b"127.0.0.1:{p}"),
        ("{0}", b"GET / HTTP/1.1", b"127.0.0.1:{p}"),
        ("HTTP://LOCALHOST.:{p}/A", b"GET /A HTTP/1.1", b"localhost:{p}"),
        ("{0}/a#part", b"GET /a HTTP/1.1", b"127.0.0.1:{p}"),
    ],
)
def test_the_url_decides_where_it_goes_whatever_host_says(
    shared: Stack, run: str, origin: Origin, url: str, line: bytes, host: bytes
) -> None:
    attempt = shared.claim(run)
    client = Wire.to(attempt)
    url = url.replace("{0}", origin.url("")).replace("{p}", str(origin.port))
    client.send(f"GET {url} HTTP/1.1\r\nHost: elsewhere.example\r\n".encode() + credentials(attempt) + b"\r\n\r\n")
    head = origin.answer(OK)
    assert head.split(b"\r\n")[0] == line
    expected = host.replace(b"{p}", b"%d" % origin.port)
    assert [value for name, value in headers(head) if name.lower() == b"host"] == [expected]
    client.head()


def test_what_a_client_sent_arrives_and_nothing_else(shared: Stack, run: str, origin: Origin) -> None:
    lines = [
        b"X-Dup: 1", b"x-dup: 2", b"X-DUP: 3", b"Accept-Encoding: br", b"X-Utf: caf\xc3\xa9",
        b"Authorization: Bearer x", b"X-Empty:", b"Cookie: a=b", b"Cookie: c=d",
    ]  # fmt: skip
    client = asked(shared.claim(run), "GET", origin.url("/a"), *lines)
    found = headers(origin.answer(OK))
    values: dict[bytes, list[bytes]] = {}
    for name, value in found:
        values.setdefault(name.lower(), []).append(value)
    via = values.pop(b"via")
    assert len(via) == 1 and via[0].startswith(b"1.1 twiceshy-")
    assert values == {
        b"host": [b"127.0.0.1:%d" % origin.port],
        b"x-dup": [b"1", b"2", b"3"],
        b"accept-encoding": [b"br"],
        b"x-utf": [b"caf\xc3\xa9"],
        b"authorization": [b"Bearer x"],
        b"x-empty": [b""],
        b"cookie": [b"a=b", b"c=d"],
    }
    client.head()


def test_what_was_meant_for_the_sidecar_or_the_next_hop_stays_behind(shared: Stack, run: str, origin: Origin) -> None:
    attempt = shared.claim(run)
    body = b'{"a": 1}'
    lines = [
        b"Connection: close, X-Hop, Authorization, Content-Length, Host", b"X-Hop: 1", b"Keep-Alive: 5",
        b"TE: trailers", b"Upgrade: h2c", b"HTTP2-Settings: AAAA", b"Trailer: X",
        b"Proxy-Connection: keep-alive", b"Proxy-Anything: 1",
        b"Twiceshy-Run: " + attempt.run.encode(), b"twiceshy-TOKEN: " + str(attempt.token).encode(),
        b"Twiceshy-Step: mine", b"Twiceshy-Whatever: 1", b"Authorization: Bearer kept", b"Expect: 100-continue",
    ]  # fmt: skip
    client = Wire.to(attempt)
    client.send(request(attempt, "POST", origin.url("/orders"), *lines, body=body))
    upstream = origin.accept()
    head = upstream.head()
    assert upstream.exactly(len(body)) == body
    upstream.send(OK)
    secret = [str(attempt.token).encode(), attempt.run.encode(), credentials(attempt).split()[-1]]
    for word in (b"proxy", b"twiceshy-run", b"twiceshy-step", b"twiceshy-token", b"twiceshy-w", *secret):
        assert word.lower() not in head.lower(), head
    names = sorted(name.lower() for name, _ in headers(head))
    assert names == [b"authorization", b"content-length", b"host", b"idempotency-key", b"via"]
    assert client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert (b"Connection", b"close") in headers(client.head())
    assert client.rest() == b"hi"


def test_a_header_that_is_not_utf_8_is_refused(shared: Stack, run: str, origin: Origin) -> None:
    client = asked(shared.claim(run), "GET", origin.url("/a"), b"X-Name: caf\xe9")
    assert "X-Name" in refused(client, 400)
    assert origin.nobody()


# ---- bodies


def test_a_body_in_chunks_goes_out_by_its_length(shared: Stack, run: str, origin: Origin) -> None:
    client = asked(shared.claim(run), "POST", origin.url("/orders"), CHUNKED, b"Trailer: X-T")
    for piece in (b"5;a=b\r\nhello\r\n", b"6\r\n ", b"world\r\n", b"0\r\nX-T: t\r\n\r\n"):
        client.send(piece)
    upstream = origin.accept()
    head = upstream.head()
    assert upstream.exactly(11) == b"hello world"
    assert (b"Content-Length", b"11") in headers(head)
    assert b"chunked" not in head
    assert b"X-T" not in head
    upstream.send(OK)
    client.head()


@pytest.mark.parametrize(("method", "length"), [("POST", [b"0"]), ("PUT", [b"0"]), ("DELETE", [b"0"]), ("GET", [])])
def test_no_body_is_said_as_methods_want_it(
    shared: Stack, run: str, origin: Origin, method: str, length: list[bytes]
) -> None:
    client = asked(shared.claim(run), method, origin.url("/a"))
    head = origin.answer(OK)
    assert [value for name, value in headers(head) if name.lower() == b"content-length"] == length
    client.head()


def test_a_get_with_a_body_keeps_it(shared: Stack, run: str, origin: Origin) -> None:
    client = asked(shared.claim(run), "GET", origin.url("/search"), body=b"q")
    upstream = origin.accept()
    assert (b"Content-Length", b"1") in headers(upstream.head())
    assert upstream.exactly(1) == b"q"
    upstream.send(OK)
    client.head()


def test_a_body_that_breaks_off_is_never_sent(shared: Stack, run: str, origin: Origin) -> None:
    attempt = shared.claim(run)
    for lines, part in (([b"Content-Length: 10"], b"12345"), ([CHUNKED], b"5\r\nhello\r\n")):
        client = asked(attempt, "POST", origin.url("/orders"), *lines)
        client.send(part)
        client.close()
    client = asked(attempt, "POST", origin.url("/orders"), CHUNKED)
    client.send(b"5\r\nhello\r\nnonsense\r\n")
    refused(client, 400)
    assert origin.nobody()


@pytest.mark.parametrize("then", ["reads on", "closes"])
def test_an_answer_that_comes_before_the_body_was_taken_is_the_answer(
    shared: Stack, run: str, origin: Origin, then: str
) -> None:
    client = asked(shared.claim(run), "POST", origin.url("/orders"), body=bytes(10 << 20))
    upstream = origin.accept()
    upstream.head()
    upstream.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
    if then == "closes":
        upstream.close()
    assert client.head().startswith(b"HTTP/1.1 413 Too Large\r\n")
    assert client.exactly(2) == b"no"


LIMIT = 64 << 20


@pytest.mark.parametrize("how", ["by length", "in chunks", "after 100"])
def test_a_body_over_the_limit_is_refused(shared: Stack, run: str, origin: Origin, how: str) -> None:
    attempt = shared.claim(run)
    if how == "in chunks":
        client = asked(attempt, "POST", origin.url("/orders"), CHUNKED)
        piece = b"%x\r\n%s\r\n" % (8 << 20, bytes(8 << 20))
        for _ in range(LIMIT // (8 << 20)):
            client.send(piece)
        client.send(b"1\r\nx\r\n")
    else:
        client = asked(
            attempt, "POST", origin.url("/orders"), b"Content-Length: %d" % (LIMIT + 1),
            *([b"Expect: 100-continue"] if how == "after 100" else []),
        )  # fmt: skip
    assert str(LIMIT) in refused(client, 413, "body-too-large")
    assert origin.nobody()


# ---- Expect: 100-continue


def test_100_continue_comes_when_the_fence_has_been_checked(shared: Stack, run: str, origin: Origin) -> None:
    zombie = shared.claim(run)
    assert zombie.ask("GET", shared.url("/pantry")).status == 200
    current = shared.claim(run)
    expecting = [b"Expect: 100-continue", b"Content-Length: 5"]

    client = asked(current, "POST", origin.url("/orders"), *expecting)
    assert client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert origin.nobody(0.05)
    client.send(b"hello")
    upstream = origin.accept()
    assert b"expect" not in upstream.head().lower()
    assert upstream.exactly(5) == b"hello"
    upstream.send(OK)
    assert client.head().startswith(b"HTTP/1.1 200")

    fenced = asked(zombie, "POST", origin.url("/orders"), *expecting)
    refused(fenced, 423, "fenced")
    made_up = asked(Attempt(run, "made-up-token", current.port), "POST", origin.url("/orders"), *expecting)
    refused(made_up, 423, "fenced")
    assert origin.nobody()


def test_a_refusal_after_100_continue_is_given(shared: Stack, run: str, origin: Origin) -> None:
    attempt = shared.claim(run)
    first = asked(attempt, "POST", origin.url("/orders"), b"Twiceshy-Step: one", body=b"a")
    upstream = origin.accept()
    upstream.head()
    upstream.send(OK)
    first.head()
    client = asked(
        attempt, "POST", origin.url("/orders"), b"Twiceshy-Step: one", b"Expect: 100-continue", b"Content-Length: 1"
    )
    assert client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"b")
    refused(client, 412, "diverged")


def test_a_client_of_http_1_0_is_not_told_to_go_on(shared: Stack, run: str, origin: Origin) -> None:
    attempt = shared.claim(run)
    client = Wire.to(attempt)
    client.send(
        request(attempt, "POST", origin.url("/orders"), b"Expect: 100-continue", body=b"a", version=b"HTTP/1.0")
    )
    upstream = origin.accept()
    upstream.head()
    upstream.send(OK)
    assert client.head().startswith(b"HTTP/1.1 200")
    assert client.rest() == b"hi"


# ---- connections


def test_a_connection_carries_one_request_after_the_other(shared: Stack, run: str, origin: Origin) -> None:
    attempt = shared.claim(run)
    client = Wire.to(attempt)
    upstream: Wire | None = None
    for n in range(5):
        client.send(request(attempt, "GET", origin.url(f"/{n}")))
        upstream = upstream or origin.accept()
        assert upstream.head().startswith(b"GET /%d " % n)
        upstream.send(OK)
        assert b"Connection" not in client.head()
        assert client.exactly(2) == b"hi"
    client.send(request(attempt, "GET", "http://169.254.169.254/"))
    refused(client, 403, "denied")  # a refusal leaves the connection as it was
    client.send(request(attempt, "GET", origin.url("/last"), b"Connection: close"))
    assert upstream is not None
    upstream.head()
    upstream.send(OK)
    assert (b"Connection", b"close") in headers(client.head())
    assert client.rest() == b"hi"


def test_pipelined_requests_are_answered_in_their_order(shared: Stack, run: str, origin: Origin) -> None:
    attempt = shared.claim(run)
    client = Wire.to(attempt)
    client.send(b"".join(request(attempt, "POST", origin.url(f"/orders?{n}"), body=b"%d" % n) for n in range(50)))
    upstream = origin.accept()
    for n in range(50):
        assert upstream.head().startswith(b"POST /orders?%d " % n)
        assert upstream.exactly(len(str(n))) == b"%d" % n
        upstream.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%d" % (len(str(n)), n))
        client.head()
        assert client.exactly(len(str(n))) == b"%d" % n


def test_a_request_may_come_byte_by_byte(shared: Stack, run: str, origin: Origin) -> None:
    attempt = shared.claim(run)
    client = Wire.to(attempt)
    for byte in request(attempt, "POST", origin.url("/orders"), body=b"abc"):
        client.send(bytes([byte]))
    upstream = origin.accept()
    upstream.head()
    assert upstream.exactly(3) == b"abc"
    upstream.send(OK)
    assert client.head().startswith(b"HTTP/1.1 200")


def test_an_upstream_connection_is_of_one_run(shared: Stack, run: str, origin: Origin) -> None:
    for name in (run, run + "-other"):
        client = asked(shared.claim(name), "GET", origin.url("/a"))
        origin.answer(OK)  # which takes a connection of its own
        client.head()
        assert client.exactly(2) == b"hi"


def test_what_must_not_happen_twice_goes_out_on_a_connection_of_its_own(
    shared: Stack, run: str, origin: Origin
) -> None:
    attempt = shared.claim(run)
    for n in range(3):
        client = asked(attempt, "POST", origin.url(f"/any/{n}"), body=b"x")
        upstream = origin.accept()
        assert (b"Connection", b"close") in headers(upstream.head())
        upstream.send(OK)
        assert b"Connection" not in client.head()
