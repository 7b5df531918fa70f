"""Clients that do not trust the CA, and upstreams that cannot be trusted."""

import json
import ssl
from pathlib import Path

import pytest

from sandbox.tls import Issuer
from tests.raw import OK
from tests.stack import Attempt, Stack
from tests.tunnelled import (
    ByHand,
    Secure,
    Tls,
    TlsOrigin,
    connected,
    context_of,
    here,
    plain,
    refused_by_upstream,
)  # fmt: skip

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
