"""What is inside a tunnel: refusals, whose run it is, replays, bytes as they were."""

import ssl

import pytest

from tests.raw import Wire, credentials, headers, refused
from tests.stack import Attempt, Stack
from tests.tunnelled import (
    Secure,
    Tls,
    connected,
    head_of_connect,
    here,
    plain,
)  # fmt: skip

ORDER = {"lines": [{"sku": "tea", "n": 1}], "total": 1}
CHAT = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": "hello"}], "stream": True}


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
