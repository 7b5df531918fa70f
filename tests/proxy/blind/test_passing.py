"""What passes through a tunnel that is not opened: byte for byte, both ways, in bounded memory. What is told of it."""

import hashlib
import json
import os
import random
import socket
import ssl
import subprocess
import sys
import threading

import pytest

from sandbox.tls import Issuer
from tests.raw import Origin, Wire
from tests.stack import PROJECT, Attempt, Stack
from tests.tunnelled import ESTABLISHED, Tls, TlsOrigin, connected, head_of_connect, passing, slowly_sent, unopened


def test_the_client_sees_the_upstreams_own_certificate(
    shared: Stack, run: str, origin: TlsOrigin, issuer: Issuer, trust: ssl.SSLContext
) -> None:
    attempt = shared.claim(run)
    wire = connected(attempt, unopened(origin))
    upstream: list[Wire] = []
    serving = threading.Thread(target=lambda: upstream.append(origin.accept()))
    serving.start()
    client = Tls(wire, trust, "localhost")  # with the sidecar's leaf this would fail
    serving.join(20)
    assert client.tls.selected_alpn_protocol() == "h2"
    subject = client.tls.getpeercert()
    assert subject is not None
    assert "somebody's CA" in str(subject["issuer"])
    client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert upstream[0].exactly(24) == b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    upstream[0].send(b"\0\0\0\4\0\0\0\0\0")
    assert client.exactly(9) == b"\0\0\0\4\0\0\0\0\0"
    assert shared.fetch("SELECT FROM twiceshy.step WHERE run_id = $1", run) == []
    told = attempt.report()
    assert told["arrived"] == {unopened(origin): {"tunnel": 1}}
    assert told["hints"] == []


@pytest.mark.parametrize("size", [1, 1000], ids=["byte by byte", "at once"])
def test_what_comes_with_connect_passes_first(shared: Stack, run: str, plain: Origin, size: int) -> None:
    attempt = shared.claim(run)
    wire = Wire.to(attempt)
    ahead = b"\x16\x03\x01 no hello at all"
    slowly_sent(wire, head_of_connect(attempt, unopened(plain)) + ahead, size)
    assert wire.head() == ESTABLISHED
    assert plain.accept().exactly(len(ahead)) == ahead


def test_the_server_may_speak_first(shared: Stack, run: str, plain: Origin) -> None:
    wire = connected(shared.claim(run), unopened(plain))
    upstream = plain.accept()
    upstream.send(b"220 mail.test\r\n")
    assert wire.until(b"\r\n") == b"220 mail.test\r\n"


@pytest.mark.parametrize("first", ["client", "server"])
def test_bytes_are_exact_and_half_an_end_is_passed_on(shared: Stack, run: str, plain: Origin, first: str) -> None:
    wire = connected(shared.claim(run), unopened(plain))
    upstream = plain.accept()
    there, back = (wire, upstream) if first == "client" else (upstream, wire)
    for speaker, listener in ((there, back), (back, there)):
        data = random.Random(first).randbytes(3_000_000)
        sending = threading.Thread(target=_say_all, args=(speaker, data))
        sending.start()
        assert hashlib.sha256(listener.rest()).digest() == hashlib.sha256(data).digest()
        sending.join(20)


def _say_all(wire: Wire, data: bytes) -> None:
    wire.send(data)
    wire.sock.shutdown(socket.SHUT_WR)


def test_a_slow_reader_costs_no_memory(shared: Stack, run: str, plain: Origin) -> None:
    """50 MB each way, of which the other end takes nothing for a while."""
    attempt = shared.claim(run)
    wire = Wire.to(attempt, receive_buffer=1 << 14)
    wire.send(head_of_connect(attempt, unopened(plain)))
    wire.head()
    upstream = plain.accept()
    upstream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    size, before = 50_000_000, shared.sidecar.memory()
    blocks = random.Random(1).randbytes(1 << 20)
    for speaker, listener in ((upstream, wire), (wire, upstream)):
        sent = [0]

        def send(speaker: Wire = speaker, sent: list[int] = sent) -> None:
            while sent[0] < size:
                speaker.send(blocks[: size - sent[0]])
                sent[0] += len(blocks[: size - sent[0]])

        sending = threading.Thread(target=send)
        sending.start()
        assert listener.exactly(1)
        assert attempt.ask("GET", shared.url("/pantry")).status == 200
        assert sent[0] < size
        assert shared.sidecar.memory() - before < 8 << 20
        received = 1 + len(listener._ahead)
        while received < size:
            received += len(listener.sock.recv(1 << 20))
        sending.join(20)
    assert shared.sidecar.memory() - before < 12 << 20


# ---- what is said of it


def test_the_summary_says_that_it_was_not_journalled(shared: Stack, run: str, plain: Origin) -> None:
    attempt = shared.claim(run)
    for _ in range(2):
        passing(attempt, plain)
    attempt.report()
    shared.end(Attempt(run, attempt.token, attempt.port), "done", 0)
    environment = {**os.environ, "DATABASE_URL": shared.dsn, "TWICESHY_HOME": str(shared.folder)}
    show = [sys.executable, "-m", "proxy.cli", "show", run]
    shown = subprocess.run(show, capture_output=True, text=True, cwd=PROJECT, env=environment, check=True).stdout
    assert f"unjournalled: {unopened(plain)} (2 tunnels)" in shown.splitlines()
    told = subprocess.run([*show, "--json"], capture_output=True, text=True, cwd=PROJECT, env=environment, check=True)
    assert json.loads(told.stdout)["attempts"][0]["unjournalled"] == {unopened(plain): {"tunnel": 2}}
