"""CONNECT and the TLS inside it, as clients open it: in pieces, ahead of time, by address, by name, without TLS."""

import ssl

import pytest

from tests.raw import OK, Origin, Wire, refused
from tests.stack import Stack
from tests.tunnelled import (
    ByHand,
    Secure,
    Tls,
    connected,
    head_of_connect,
    here,
    plain,
    slowly_sent,
)  # fmt: skip

# ---- opening


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_connect_may_come_in_pieces(shared: Stack, run: str, trust: ssl.SSLContext, size: int) -> None:
    attempt = shared.claim(run)
    wire = Wire.to(attempt)
    slowly_sent(wire, head_of_connect(attempt, here(shared)), size)
    assert wire.head() == b"HTTP/1.1 200 Connection established\r\n\r\n"
    client = Tls(wire, trust, "127.0.0.1")
    client.send(plain("GET", "/pantry", here(shared)))
    assert client.head().startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("size", [1, 7, 100000])
@pytest.mark.parametrize("ahead", [True, False], ids=["with CONNECT", "after it"])
def test_a_hello_may_come_with_connect_and_in_pieces(
    shared: Stack, run: str, trust: ssl.SSLContext, ahead: bool, size: int
) -> None:
    attempt = shared.claim(run)
    wire, client = Wire.to(attempt), ByHand(trust, "127.0.0.1")
    head = head_of_connect(attempt, here(shared))
    if ahead:
        hello = client.hello()
        wire.send(head + hello[: max(1, len(hello) // size)])
        slowly_sent(wire, hello[max(1, len(hello) // size) :], size)
        assert wire.sock.recv(39) == b"HTTP/1.1 200 Connection established\r\n\r\n"
    else:
        wire.send(head)
        wire.head()
        slowly_sent(wire, client.hello(), size)
    wire.send(client.finish(wire))
    wire.send(client.sealed(plain("GET", "/pantry", here(shared))))
    assert client.until(wire, b"\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_request_may_come_before_the_handshake_is_over(
    shared: Stack, run: str, trust: ssl.SSLContext, version: ssl.TLSVersion
) -> None:
    trust.minimum_version = trust.maximum_version = version
    attempt = shared.claim(run)
    wire, client = connected(attempt, here(shared)), ByHand(trust, "127.0.0.1")
    wire.send(client.hello())
    last = client.finish(wire)
    wire.send(last + client.sealed(plain("GET", "/pantry", here(shared))))
    assert client.until(wire, b"\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert client.object.version() == {"TLSv1_2": "TLSv1.2", "TLSv1_3": "TLSv1.3"}[version.name]


@pytest.mark.parametrize(
    ("offered", "taken"), [(["h2", "http/1.1"], "http/1.1"), (["http/1.1"], "http/1.1"), (["h2"], None), ([], None)]
)
def test_http_1_1_is_all_that_is_spoken(
    shared: Stack, run: str, trust: ssl.SSLContext, offered: list[str], taken: str | None
) -> None:
    if offered:
        trust.set_alpn_protocols(offered)
    client = Tls.through(shared.claim(run), here(shared), trust)
    assert client.tls.selected_alpn_protocol() == taken
    client.send(plain("GET", "/pantry", here(shared)))
    assert client.head().startswith(b"HTTP/1.1 200")


def test_tls_1_1_is_not_spoken(shared: Stack, agent: Secure) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.deprecated_call():
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        Tls.through(agent, here(shared), old)
    assert "did not come through the TLS handshake" in agent.report()["hints"][0]


def test_an_address_in_connect_and_a_name_in_the_handshake(shared: Stack, run: str, trust: ssl.SSLContext) -> None:
    """Clients that resolve names themselves. The leaf is for both; CONNECT's authority decides."""
    attempt = shared.claim(run)
    for name in ("sandbox.test", "127.0.0.1"):
        client = Tls.through(attempt, here(shared), trust, name=name)
        client.send(plain("GET", "/pantry", here(shared)))
        assert client.head().startswith(b"HTTP/1.1 200")
    client = Tls.through(attempt, here(shared), trust, name="sandbox.test")
    client.send(plain("GET", "/pantry", "sandbox.test"))
    assert "another host" in refused(client, 400)


@pytest.mark.parametrize("to", ["localhost:{p}", "LocalHost:{p}", "127.0.0.1:{p}"])
def test_names_and_addresses(shared: Stack, run: str, trust: ssl.SSLContext, to: str) -> None:
    to = to.format(p=shared.sandbox.port)
    client = Tls.through(shared.claim(run), to, trust)
    client.send(plain("GET", "/pantry", to))
    assert client.head().startswith(b"HTTP/1.1 200")


def test_plain_http_in_a_tunnel(shared: Stack, run: str) -> None:
    """As undici's ProxyAgent speaks to http:// upstreams."""
    attempt = shared.claim(run)
    with Origin() as origin:
        to = f"127.0.0.1:{origin.port}"
        upstream: Wire | None = None
        for n, ahead in enumerate((False, True)):
            asked = plain("POST", "/orders?%61", to, b"Content-Type: text/plain", body=b"%d" % n)
            client = Wire.to(attempt) if ahead else connected(attempt, to)
            client.send((head_of_connect(attempt, to) if ahead else b"") + asked)
            if ahead:
                client.head()
            upstream = upstream or origin.accept()
            head = upstream.head()
            assert head.startswith(b"POST /orders?%61 HTTP/1.1\r\n")
            assert b"roxy" not in head
            upstream.exactly(1)
            upstream.send(OK)
            assert client.head().startswith(b"HTTP/1.1 200")
    rows = shared.fetch("SELECT url FROM twiceshy.step WHERE run_id = $1", run)
    assert {row["url"].partition("?")[0] for row in rows} == {f"http://{to}/orders"}


def test_a_tunnel_to_port_80_is_plain_http(shared: Stack, run: str) -> None:
    client = connected(shared.claim(run), "169.254.169.254:80")
    client.send(plain("GET", "/latest/meta-data/", "169.254.169.254"))
    refused(client, 403, "denied")


def test_the_sidecars_own_pages_are_reached_by_tunnel(shared: Stack, agent: Secure, trust: ssl.SSLContext) -> None:
    client = Tls.through(agent, "twiceshy.internal:443", trust)
    client.send(plain("GET", "/run", "twiceshy.internal"))
    assert client.head().startswith(b"HTTP/1.1 200")
    wire = connected(agent, "twiceshy.internal:80")
    wire.send(plain("GET", "/run", "twiceshy.internal"))
    assert wire.head().startswith(b"HTTP/1.1 200")
