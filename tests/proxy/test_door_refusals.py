"""What ends at the door: targets, addresses, loops, the gateway form, requests of nobody."""

import http.client
import struct
from collections.abc import Iterator

import pytest

from proxy.doors import is_silent
from tests.conftest import fresh_database
from tests.raw import OK, Origin, Wire, asked, credentials, headers, refused, request
from tests.stack import Attempt, Stack, stack

CHUNKED = b"Transfer-Encoding: chunked"


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
