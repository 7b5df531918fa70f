"""What comes in at the door and what of it goes out to an upstream, judged by the bytes on both sides."""

import http.client
import json
import struct
from collections.abc import Iterator

import pytest

from proxy.doors import is_silent
from tests.conftest import fresh_database
from tests.raw import Origin, Wire, asked, credentials, headers, request
from tests.stack import Attempt, Stack, stack

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED = b"Transfer-Encoding: chunked"


@pytest.fixture
def origin() -> Iterator[Origin]:
    with Origin() as made:
        yield made


def told(client: Wire) -> tuple[bytes, str | None, dict[str, object]]:
    """Status line, error code and body of a refusal."""
    head = client.head()
    found = {name.lower(): value for name, value in headers(head)}
    assert found[b"content-type"] == b"application/problem+json"
    body = json.loads(client.exactly(int(found[b"content-length"])))
    code = found.get(b"twiceshy-error")
    assert found.get(b"x-should-retry") == found.get(b"stripe-should-retry") == b"false"
    assert b"retry-after" not in found
    return head.split(b"\r\n")[0], code.decode() if code else None, body


def refused(client: Wire, status: int, code: str = "bad-request") -> str:
    line, found, body = told(client)
    assert (line.split(b" ")[1], found) == (b"%d" % status, code), line
    return str(body["message"])


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


# ---- what is refused


def test_what_cannot_be_read_is_not_quoted_at_length(shared: Stack, run: str) -> None:
    client = Wire.to(shared.claim(run))
    client.send(b"A" * 50_000 + b" http://h.example/ HTTP/1.1\r\n\r\n")
    answer = client.rest()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert len(answer) < 4000


def test_chunks_in_http_1_0_are_refused(shared: Stack, run: str, origin: Origin) -> None:
    attempt = shared.claim(run)
    client = Wire.to(attempt)
    client.send(request(attempt, "POST", origin.url("/orders"), CHUNKED, version=b"HTTP/1.0") + b"0\r\n\r\n")
    refused(client, 400)
    assert origin.nobody()


@pytest.mark.parametrize(
    "target",
    [
        "http://user:secret@127.0.0.1:{p}/", "http://user@127.0.0.1:{p}/", "http://@127.0.0.1:{p}/", "ftp://127.0.0.1/",
        "http:///a", "http://127.0.0.1:0/", "http://127.0.0.1:65536/", "http://127.0.0.1:x/", "http://[::1/",
        "/origin-form", "127.0.0.1:{p}/", "http://127.0.0.1:{p}\\@evil/", "http://a b/", "/caf\xe9",
    ],
)  # fmt: skip
def test_a_target_that_is_no_plain_url_is_refused(shared: Stack, run: str, origin: Origin, target: str) -> None:
    attempt = shared.claim(run)
    client = Wire.to(attempt)
    line = target.replace("{p}", str(origin.port)).encode("latin-1")
    client.send(b"GET " + line + b" HTTP/1.1\r\nHost: x\r\n" + credentials(attempt) + b"\r\n\r\n")
    refused(client, 400)
    assert origin.nobody(0.05)


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254", "[::ffff:169.254.169.254]", "[fd00:ec2::254]", "[fe80::1]", "[2002:a9fe:a9fe::]",
        "[64:ff9b::169.254.169.254]", "100.100.100.200", "metadata.google.internal", "METADATA.google.internal.",
        "0.0.0.0", "[::]", "224.0.0.1",
    ],
)  # fmt: skip
def test_where_no_agent_may_go(shared: Stack, run: str, host: str) -> None:
    attempt = shared.claim(run)
    refused(asked(attempt, "GET", f"http://{host}/latest/meta-data/"), 403, "denied")
    refused(asked(attempt, "POST", f"http://{host}/x", body=b"{}"), 403, "denied")
    # Nothing was sent, and the step may go again; the run goes on.
    assert shared.fetch("SELECT state FROM twiceshy.step WHERE run_id = $1", run) == [("not_sent",)]
    assert attempt.ask("GET", shared.url("/pantry")).status == 200


@pytest.mark.parametrize("host", ["2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518"])
def test_an_address_in_disguise_is_no_way_round(shared: Stack, run: str, host: str) -> None:
    client = asked(shared.claim(run), "GET", f"http://{host}/latest/meta-data/")
    status = client.head().split(b" ")[1]
    assert status in (b"403", b"502")  # seen through, or no name that can be resolved


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1.2.3", "[::ffff:127.0.0.1]"])
def test_the_sidecar_does_not_speak_to_itself(shared: Stack, run: str, host: str) -> None:
    attempt = shared.claim(run)
    url = f"http://{host}:{attempt.port}/@{run}:{attempt.token}/{shared.url('/pantry').replace('://', '/')}"
    refused(asked(attempt, "GET", url), 403, "denied")
    assert not shared.received()


def test_a_loop_is_seen_by_via(shared: Stack, run: str, origin: Origin) -> None:
    attempt = shared.claim(run)
    client = asked(attempt, "GET", origin.url("/a"))
    upstream = origin.accept()
    via = next(value for name, value in headers(upstream.head()) if name == b"Via")
    upstream.send(OK)
    client.head()
    refused(asked(attempt, "GET", origin.url("/b"), b"Via: 1.0 other, " + via), 403, "denied")
    assert origin.nobody()
    # Somebody else's is passed on.
    client = asked(attempt, "GET", origin.url("/c"), b"Via: 1.0 other")
    assert [value for name, value in headers(upstream.head()) if name.lower() == b"via"] == [b"1.0 other", via]
    upstream.send(OK)
    client.head()


# ---- the gateway form


def gateway(attempt: Attempt, origin: Origin, *lines: bytes, host: bytes = b"127.0.0.1:7777") -> Wire:
    client = Wire.to(attempt)
    target = b"/@%s:%s/http/127.0.0.1:%d/a//b%%2f?x=" % (attempt.run.encode(), str(attempt.token).encode(), origin.port)
    client.send(b"\r\n".join([b"GET " + target + b" HTTP/1.1", b"Host: " + host, *lines, b"", b""]))
    return client


@pytest.mark.parametrize("host", [b"127.0.0.1:7777", b"localhost", b"[::1]:1", b"10.1.2.3"])
def test_the_gateway_form_needs_no_proxy(shared: Stack, run: str, origin: Origin, host: bytes) -> None:
    # Node's fetch says Sec-Fetch-Mode and nothing more; a browser says the others too.
    client = gateway(shared.claim(run), origin, b"Sec-Fetch-Mode: cors", host=host)
    head = origin.answer(OK)
    assert head.startswith(b"GET /a//b%2f?x= HTTP/1.1\r\n")
    assert run.encode() not in head
    assert (b"Host", b"127.0.0.1:%d" % origin.port) in headers(head)
    client.head()


@pytest.mark.parametrize(
    "line",
    [
        b"Origin: null", b"Origin: http://evil.example", b"Sec-Fetch-Site: cross-site", b"sec-fetch-dest: empty",
        b"Sec-Fetch-User: ?1", b"Sec-Fetch-Storage-Access: none",
    ],
)  # fmt: skip
def test_the_gateway_form_is_not_for_web_pages(shared: Stack, run: str, origin: Origin, line: bytes) -> None:
    refused(gateway(shared.claim(run), origin, line), 400)
    assert origin.nobody(0.05)


@pytest.mark.parametrize(
    "host", [b"evil.example", b"evil.example:7777", b"localhost.evil.example", b"", b"user@localhost"]
)
def test_the_gateway_form_is_called_by_the_sidecars_own_name(
    shared: Stack, run: str, origin: Origin, host: bytes
) -> None:
    refused(gateway(shared.claim(run), origin, host=host), 400)
    assert origin.nobody(0.05)


# ---- who names no run


@pytest.fixture(scope="module")
def passing(server: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A sidecar that lets requests without a run pass."""
    for dsn in fresh_database(server, template):
        with stack(dsn, tmp_path_factory.mktemp("passing"), unidentified="pass") as made:
            yield made


def test_requests_without_a_run_are_refused(shared: Stack, run: str, origin: Origin) -> None:
    client = Wire.to(shared.claim(run))
    client.send(f"GET {origin.url('/a')} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    refused(client, 428, "no-run")
    assert origin.nobody(0.05)


def test_requests_without_a_run_may_be_let_pass_and_share_no_connection(passing: Stack, origin: Origin) -> None:
    nobody = Attempt("nobody", None, passing.sidecar.port)
    for n in range(2):
        client = Wire.to(nobody)
        client.send(f"GET {origin.url(f'/{n}')} HTTP/1.1\r\nHost: x\r\nAuthorization: a\r\n\r\n".encode())
        head = origin.answer(OK)
        assert head.startswith(b"GET /%d " % n)
        assert b"Twiceshy" not in client.head()
        assert client.exactly(2) == b"hi"
    assert not passing.fetch("SELECT FROM twiceshy.step")
    # What is let pass ends with its client.
    client = Wire.to(nobody)
    client.send(f"GET {origin.url('/gone')} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    upstream = origin.accept()
    upstream.head()
    client.close()
    assert upstream.gone()


# ---- hosts that have gone


def tcp_info(*, retransmits: int = 0, probes: int = 0, last_ack: float = 0.0) -> bytes:
    return struct.pack("8B13I", 1, 0, retransmits, probes, 0, 0, 0, 0, *[0] * 12, int(last_ack * 1000)) + bytes(44)


def test_a_host_is_gone_when_it_owes_acknowledgements_for_a_lease() -> None:
    assert is_silent(tcp_info(retransmits=6, last_ack=31), 30)
    assert is_silent(tcp_info(probes=2, last_ack=31), 30)
    assert not is_silent(tcp_info(last_ack=10000), 30)  # it owes nothing
    assert not is_silent(tcp_info(retransmits=1, last_ack=1), 30)
    assert not is_silent(tcp_info(probes=1, last_ack=100), 30)  # its window is closed, and it is asked rarely


def test_http_client_agrees(shared: Stack, run: str, origin: Origin) -> None:
    attempt = shared.claim(run)
    connection = attempt.send("GET", origin.url("/a"))
    origin.answer(b"HTTP/1.1 204 No Content\r\n\r\n")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (204, b"")
    with pytest.raises(http.client.ResponseNotReady):
        connection.getresponse()
