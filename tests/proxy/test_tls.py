"""CONNECT and the TLS inside it: as clients open it, as they fail at it, and all that holds over plain HTTP."""

import contextlib
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy import authority
from sandbox.anything import Pattern
from sandbox.tls import Issuer
from tests.conftest import fresh_database
from tests.proxy.test_doors import OK, refused
from tests.raw import Origin, Wire, credentials, headers, locked
from tests.stack import Attempt, Stack, stack
from tests.tunnelled import (
    ByHand,
    Secure,
    Tls,
    TlsOrigin,
    connected,
    context_of,
    head_of_connect,
    slowly_sent,
    trusting,
)  # fmt: skip

ORDER = {"lines": [{"sku": "tea", "n": 1}], "total": 1}
CHAT = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": "hello"}], "stream": True}
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer("an upstream's CA")


@pytest.fixture(scope="module")
def secure_stack(
    server: str, template: str, tmp_path_factory: pytest.TempPathFactory, issuer: Issuer
) -> Iterator[Stack]:
    """The stack with a sandbox over TLS. The sidecar trusts its CA, and that of the tests' own upstreams."""
    folder = tmp_path_factory.mktemp("tls")
    from sandbox import tls

    both = folder / "both.pem"
    both.write_bytes((tls.ensure(folder / "tls") / tls.CA).read_bytes() + issuer.pem)
    for dsn in fresh_database(server, template):
        with stack(dsn, folder, tls=True, extra_ca=both) as made:
            yield made


@pytest.fixture
def shared(secure_stack: Stack) -> Iterator[Stack]:
    secure_stack.mark()
    yield secure_stack
    secure_stack.sandbox.clear()


@pytest.fixture
def trust(shared: Stack) -> ssl.SSLContext:
    return trusting(shared)


@pytest.fixture
def agent(shared: Stack, run: str, trust: ssl.SSLContext) -> Secure:
    return Secure.of(shared.claim(run), shared, trust)


@pytest.fixture
def origin(issuer: Issuer, tmp_path: Path) -> Iterator[TlsOrigin]:
    with TlsOrigin(context_of(issuer.issue(["127.0.0.1", "localhost"]), tmp_path)) as made:
        yield made


def here(stack: Stack) -> str:
    """The sandbox as CONNECT names it."""
    return f"127.0.0.1:{stack.sandbox.port}"


def plain(method: str, path: str, host: str, *lines: bytes, body: bytes | None = None) -> bytes:
    head = [f"{method} {path} HTTP/1.1".encode(), b"Host: " + host.encode(), *lines]
    if body is not None:
        head.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*head, b"", body or b""])


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


# ---- refusals are given inside


def test_another_host_inside_is_refused(shared: Stack, run: str, trust: ssl.SSLContext) -> None:
    attempt = shared.claim(run)
    for host in ("api.openai.com", "127.0.0.1", "127.0.0.1:1", "localhost"):
        client = Tls.through(attempt, here(shared), trust)
        client.send(plain("GET", "/pantry", host))
        refused(client, 400)
    client = Tls.through(attempt, here(shared), trust)
    client.send(plain("GET", "https://api.openai.com/pantry", here(shared)))
    refused(client, 400)
    assert not shared.received()


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        (b"X: none", 428, "no-run"),
        (b"Proxy-Authorization: Basic !!!", 400, "bad-identity"),
        (b"Proxy-Authorization: Basic cjE6", 400, "bad-identity"),  # r1: and no password
        (b"Proxy-Authorization: Bearer x", 400, "bad-identity"),
        (b"Proxy-Authorization: Basic cjE6bm9ib2R5cw==", 423, "fenced"),  # r1:nobodys
    ],
)
def test_connect_is_always_accepted(
    shared: Stack, run: str, trust: ssl.SSLContext, line: bytes, status: int, code: str
) -> None:
    attempt = shared.claim(run)
    client = Tls.through(attempt, here(shared), trust, line, bare=True)
    client.send(plain("POST", "/orders", here(shared), body=b"{}"))
    refused(client, status, code)
    inside = connected(attempt, here(shared), line, bare=True)
    inside.send(plain("GET", "/pantry", here(shared)))
    refused(inside, status, code)
    assert not shared.received()


@pytest.mark.parametrize("to", ["", "a b:443", "u@h:443", "h:0", "h:x", "[::1:443", "https://h/"])
def test_a_connect_to_nowhere_too(shared: Stack, run: str, trust: ssl.SSLContext, to: str) -> None:
    attempt = shared.claim(run)
    wire = connected(attempt, to)
    wire.send(plain("GET", "/", "h"))
    refused(wire, 400)
    client = Tls(connected(attempt, to), trust, "api.openai.com")  # its handshake says what it meant
    client.send(plain("GET", "/", "api.openai.com"))
    refused(client, 400)


def test_a_fenced_one_is_told_inside(shared: Stack, agent: Secure) -> None:
    connection = agent.connect()
    assert agent.ask("POST", "/orders", ORDER, connection=connection).status == 201
    shared.claim(agent.run)
    late = agent.ask("POST", "/orders", ORDER)
    assert (late.status, late.error) == (423, "fenced")
    assert len(shared.received("orders")) == 1


def test_a_connect_inside_a_tunnel_leads_nowhere(shared: Stack, run: str, trust: ssl.SSLContext) -> None:
    client = Tls.through(shared.claim(run), here(shared), trust)
    client.send(b"CONNECT api.openai.com:443 HTTP/1.1\r\nHost: api.openai.com:443\r\n\r\n")
    refused(client, 400)


def test_a_connect_behind_another_request_too(shared: Stack, run: str) -> None:
    attempt = shared.claim(run)
    client = Wire.to(attempt)
    client.send(plain("GET", "http://twiceshy.internal/run", "twiceshy.internal", credentials(attempt)))
    found = dict(headers(client.head()))
    client.exactly(int(found[b"Content-Length"]))
    client.send(head_of_connect(attempt, here(shared)))
    assert "a connection of its own" in refused(client, 400)


# ---- who speaks


def test_headers_inside_name_the_run_and_go_no_further(shared: Stack, run: str, trust: ssl.SSLContext) -> None:
    attempt = shared.claim(run)
    client = Tls.through(attempt, here(shared), trust, bare=True)
    token = str(attempt.token).encode()
    client.send(
        plain(
            "POST", "/any/x", here(shared), b"Twiceshy-Run: " + run.encode(), b"Twiceshy-Token: " + token,
            b"Twiceshy-Step: mine", body=b"x",
        )
    )  # fmt: skip
    assert (b"Twiceshy-Step", b"mine") in headers(client.head())
    [received] = shared.received()
    for name, value in received.headers:
        assert "twiceshy-" not in name.lower()
        assert "proxy" not in name.lower()
        assert str(attempt.token) not in value and run not in value


def test_a_run_without_a_token_is_known_by_its_process(shared: Stack, run: str, trust: ssl.SSLContext) -> None:
    attempt = Attempt(run, None, shared.sidecar.port)
    client = Tls.through(attempt, here(shared), trust)
    client.send(plain("POST", "/any/x", here(shared), body=b"x"))
    assert client.head().startswith(b"HTTP/1.1 200")
    rows = shared.fetch("SELECT kind FROM twiceshy.attempt WHERE run_id = $1", run)
    assert [row["kind"] for row in rows] == ["group"]


def test_a_tunnel_is_of_one_run(shared: Stack, agent: Secure) -> None:
    connection = agent.connect()
    for n in range(30):
        reply = agent.ask("POST", f"/any/{n}", b"x", connection=connection)
        assert reply.status == 200
    other = agent.ask("POST", "/any/x", b"x", {"Twiceshy-Run": "another"}, connection=connection)
    assert (other.status, other.error) == (400, "bad-identity")
    assert len(shared.received("any")) == 30
    assert len(agent.report()["steps"]) == 30


def test_answers_are_replayed_inside(shared: Stack, agent: Secure, trust: ssl.SSLContext) -> None:
    first = [agent.ask("POST", "/orders", ORDER), agent.ask("POST", "/v1/chat/completions", CHAT)]
    shared.end(agent, "died")
    second = Secure.of(shared.claim(agent.run), shared, trust)
    again = [second.ask("POST", "/orders", ORDER), second.ask("POST", "/v1/chat/completions", CHAT)]
    assert [(each.status, each.body, each.replayed) for each in again] == [
        (each.status, each.body, True) for each in first
    ]
    assert len(shared.received(method="POST")) == 2


def test_the_target_arrives_byte_for_byte(shared: Stack, agent: Secure, trust: ssl.SSLContext) -> None:
    target = "/any/a%2Fb/%61/../c//d;e?x=%2F&y=a+b&z=%7e"
    client = Tls.through(agent, here(shared), trust)
    client.send(plain("GET", target, here(shared)))
    client.head()
    [received] = shared.received()
    assert received.target == target


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
    for _ in range(2):
        assert agent.ask("POST", "/any/x?size=300000", b"x").status == 200  # each on a connection of its own
    assert len(shared.received("any")) == 2


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


# ---- clients that do not trust the CA


def test_a_client_that_does_not_trust_the_ca_is_told_of(shared: Stack, agent: Secure) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        Tls.through(agent, here(shared), ssl.create_default_context())
    # It may have been the first that ever came of the attempt; who asks next is its launcher.
    [hint] = agent.report()["hints"]
    assert hint.startswith("127.0.0.1: this client does not trust the CA")
    assert "does not trust the CA" in shared.sidecar.log.read_text()
    rows = shared.fetch("SELECT tape FROM twiceshy.attempt WHERE run_id = $1", agent.run)
    assert json.loads(rows[0]["tape"])["hints"] == [hint]
    # Once is enough, and the next attempt begins without.
    with pytest.raises(ssl.SSLCertVerificationError):
        Tls.through(agent, here(shared), ssl.create_default_context())
    assert agent.report()["hints"] == [hint]
    assert Secure.of(shared.claim(agent.run), shared, agent.context).report()["hints"] == []


@pytest.mark.parametrize("how", ["close", "reset"])
def test_one_that_hangs_up_without_a_word_too(shared: Stack, agent: Secure, how: str) -> None:
    """Node verifies after the handshake, and closes."""
    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    client = Tls.through(agent, here(shared), blind)
    getattr(client, how)()
    found = shared.sandbox.wait_for(lambda: agent.report()["hints"], what="the hint")
    assert "hung up right after the TLS handshake" in found[0]


def test_one_that_hangs_up_in_the_handshake(shared: Stack, agent: Secure, trust: ssl.SSLContext) -> None:
    wire = connected(agent, here(shared))
    wire.send(ByHand(trust, "127.0.0.1").hello())
    wire.sock.recv(1)
    wire.close()
    found = shared.sandbox.wait_for(lambda: agent.report()["hints"], what="the hint")
    assert "hung up in the TLS handshake" in found[0]


def test_a_stranger_gives_no_hint_to_a_run(shared: Stack, agent: Secure) -> None:
    agent.report()
    stranger = Attempt(agent.run, "not-the-token", agent.port)
    with pytest.raises(ssl.SSLCertVerificationError):
        Tls.through(stranger, here(shared), ssl.create_default_context())
    assert agent.report()["hints"] == []


def test_what_a_client_calls_a_host_does_no_harm(shared: Stack, agent: Secure) -> None:
    wire = connected(agent, "\x1bc" + "x" * 5000 + ".test:443")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        Tls(wire, ssl.create_default_context(), "a.test")
    [hint] = agent.report()["hints"]
    assert hint.isprintable()
    assert len(hint) < 600


# ---- upstreams that cannot be trusted


@pytest.mark.parametrize("wrong", ["self-signed", "expired", "another name", "no tls", "well"])
def test_an_upstream_is_always_verified(
    shared: Stack, run: str, issuer: Issuer, tmp_path: Path, trust: ssl.SSLContext, wrong: str
) -> None:
    certificates = {
        "self-signed": lambda: Issuer("nobody's CA").issue(["127.0.0.1"]),
        "expired": lambda: issuer.issue(["127.0.0.1"], days=-1),
        "another name": lambda: issuer.issue(["127.0.0.2", "elsewhere.test"]),
    }
    attempt = shared.claim(run)
    made = certificates[wrong]() if wrong in certificates else issuer.issue(["127.0.0.1"])
    with TlsOrigin(context_of(made, tmp_path)) as origin:
        client = Tls.through(attempt, origin.authority, trust)
        client.send(plain("POST", "/any/x", origin.authority, body=b"{}"))
        if wrong == "no tls":
            sock = origin._listener.accept()[0]
            assert sock.recv(5)[:1] == b"\x16"  # a hello, and no request
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            sock.close()
        elif wrong in certificates:
            origin.offended()
        else:
            upstream = origin.accept()
            upstream.head()
            upstream.exactly(2)
            upstream.send(OK)
            assert client.head().startswith(b"HTTP/1.1 200")
            return
        message = refused_by_upstream(client)
    assert "not sent" in message.lower() or "nothing was sent" in message.lower()
    rows = shared.fetch("SELECT state FROM twiceshy.step WHERE run_id = $1", run)
    assert [row["state"] for row in rows] == ["not_sent"]


def refused_by_upstream(client: Wire) -> str:
    head = client.head()
    found = {name.lower(): value for name, value in headers(head)}
    assert (head.split(b" ")[1], found[b"twiceshy-error"]) == (b"502", b"upstream"), head
    return str(json.loads(client.exactly(int(found[b"content-length"])))["message"])


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


def _recorded(stack: Stack, run: str) -> None:
    stack.sandbox.wait_for(
        lambda: stack.fetch("SELECT FROM twiceshy.step WHERE run_id = $1 AND state = 'answered'", run), what="a record"
    )
