"""Tunnels that are not opened, and hosts that are denied.

The client trusts the upstream's CA and not the sidecar's, and the sidecar trusts neither: what it sees of the
upstream's certificate it sees unopened.
"""

import contextlib
import hashlib
import json
import os
import random
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from sandbox.tls import Issuer
from tests.conftest import fresh_database
from tests.raw import OK, Origin, Wire, asked, refused
from tests.stack import PROJECT, Attempt, Stack, stack
from tests.tunnelled import (
    ESTABLISHED,
    ByHand,
    Tls,
    TlsOrigin,
    connected,
    context_of,
    head_of_connect,
    refused_by_upstream,
    slowly_sent,
    trusting,
)  # fmt: skip

ROUTES = """
[[route]]
host = "127.0.0.3"
effect = "deny"
name = "nobody goes there"

[[route]]
host = "127.0.0.1"
path = "/admin/**"
methods = ["DELETE"]
effect = "deny"
name = "no deletes"

[[route]]
name = "blind hosts"
host = ["localhost", "127.0.0.2", "169.254.*", "0.0.0.0"]
effect = "tunnel"
"""
#: So often the sidecar confirms leases: a third of it.
LEASE = 3


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("routes") / "twiceshy.toml"
    path.write_text(ROUTES)
    return path


@pytest.fixture(scope="module")
def module_stack(server: str, template: str, tmp_path_factory: pytest.TempPathFactory, routes: Path) -> Iterator[Stack]:
    for dsn in fresh_database(server, template):
        with stack(dsn, tmp_path_factory.mktemp("blind"), config=routes, lease=LEASE) as made:
            yield made


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    """A CA that the client trusts."""
    return Issuer("somebody's CA")


@pytest.fixture
def origin(issuer: Issuer, tmp_path: Path) -> Iterator[TlsOrigin]:
    context = context_of(issuer.issue(["localhost", "127.0.0.2"]), tmp_path)
    context.set_alpn_protocols(["h2"])
    with TlsOrigin(context) as made:
        yield made


@pytest.fixture
def plain() -> Iterator[Origin]:
    with Origin() as made:
        yield made


@pytest.fixture
def trust(issuer: Issuer, tmp_path: Path) -> ssl.SSLContext:
    path = tmp_path / "ca.pem"
    path.write_bytes(issuer.pem)
    context = ssl.create_default_context(cafile=str(path))
    context.set_alpn_protocols(["h2"])
    return context


def blind(origin: Origin) -> str:
    """*origin* by a name that is not opened."""
    return f"localhost:{origin.port}"


def report(attempt: Attempt) -> dict[str, Any]:
    found: dict[str, Any] = (
        Attempt(attempt.run, attempt.token, attempt.port).ask("GET", "http://twiceshy.internal/attempt").json()
    )
    return found


def reset(wire: Wire) -> bool:
    """Wait for the connection's end; True if it was a reset."""
    try:
        wire.rest()
    except ConnectionResetError:
        return True
    return False


# ---- what passes


def test_the_client_sees_the_upstreams_own_certificate(
    shared: Stack, run: str, origin: TlsOrigin, issuer: Issuer, trust: ssl.SSLContext
) -> None:
    attempt = shared.claim(run)
    wire = connected(attempt, blind(origin))
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
    told = report(attempt)
    assert told["arrived"] == {blind(origin): {"tunnel": 1}}
    assert told["hints"] == []


@pytest.mark.parametrize("size", [1, 1000], ids=["byte by byte", "at once"])
def test_what_comes_with_connect_passes_first(shared: Stack, run: str, plain: Origin, size: int) -> None:
    attempt = shared.claim(run)
    wire = Wire.to(attempt)
    ahead = b"\x16\x03\x01 no hello at all"
    slowly_sent(wire, head_of_connect(attempt, blind(plain)) + ahead, size)
    assert wire.head() == ESTABLISHED
    assert plain.accept().exactly(len(ahead)) == ahead


def test_the_server_may_speak_first(shared: Stack, run: str, plain: Origin) -> None:
    wire = connected(shared.claim(run), blind(plain))
    upstream = plain.accept()
    upstream.send(b"220 mail.test\r\n")
    assert wire.until(b"\r\n") == b"220 mail.test\r\n"


@pytest.mark.parametrize("first", ["client", "server"])
def test_bytes_are_exact_and_half_an_end_is_passed_on(shared: Stack, run: str, plain: Origin, first: str) -> None:
    wire = connected(shared.claim(run), blind(plain))
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
    wire.send(head_of_connect(attempt, blind(plain)))
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


# ---- what is refused


def inside(wire: Wire, stack: Stack, name: str = "localhost") -> Tls:
    """The TLS that the sidecar opens after all, for a refusal."""
    client = Tls(wire, trusting(stack), name)
    client.send(b"GET / HTTP/1.1\r\nHost: " + name.encode() + b"\r\n\r\n")
    return client


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        (b"X: none", 428, "no-run"),
        (b"Proxy-Authorization: Basic !!!", 400, "bad-identity"),
        (b"Proxy-Authorization: Basic cjE6bm9ib2R5cw==", 423, "fenced"),  # r1:nobodys
    ],
)
def test_who_may_not_pass_is_told_inside(
    shared: Stack, run: str, plain: Origin, line: bytes, status: int, code: str
) -> None:
    attempt = shared.claim(run)
    for ahead in (False, True):
        wire = Wire.to(attempt)
        hello = ByHand(trusting(shared), "localhost")
        wire.send(head_of_connect(None, blind(plain), line) + (hello.hello() if ahead else b""))
        assert wire.sock.recv(len(ESTABLISHED)) == ESTABLISHED
        asks = b"GET / HTTP/1.1\r\nHost: " + blind(plain).encode() + b"\r\n\r\n"
        if ahead:
            wire.send(hello.finish(wire))
            wire.send(hello.sealed(asks))
            assert hello.until(wire, b"\r\n\r\n").startswith(b"HTTP/1.1 %d " % status)
        else:
            client = Tls(wire, trusting(shared), "localhost")
            client.send(asks)
            refused(client, status, code)
    words = connected(attempt, blind(plain), line, bare=True)
    words.send(b"GET / HTTP/1.1\r\nHost: " + blind(plain).encode() + b"\r\n\r\n")
    refused(words, status, code)
    assert plain.nobody()


def test_a_run_that_is_over_passes_nothing(shared: Stack, run: str, plain: Origin) -> None:
    attempt = shared.claim(run)
    shared.end(attempt, "done", 0)
    refused(inside(connected(attempt, blind(plain)), shared), 423, "fenced")
    assert plain.nobody()
    assert report_of_tape(shared, run) == {}


def test_an_upstream_that_is_not_there(shared: Stack, run: str) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        wire = connected(shared.claim(run), f"localhost:{taken.getsockname()[1]}")
        client = inside(wire, shared)
        assert "Nothing was sent" in refused_by_upstream(client)


@pytest.mark.parametrize("to", ["169.254.169.254:443", "0.0.0.0:443", "localhost:{own}", "127.0.0.2:{own}"])
def test_addresses_that_nobody_may_reach(shared: Stack, run: str, to: str) -> None:
    to = to.format(own=shared.sidecar.port)
    refused(inside(connected(shared.claim(run), to), shared, to.partition(":")[0]), 403, "denied")


def test_plain_http_and_the_gateway_pass_unjournalled(shared: Stack, run: str, plain: Origin) -> None:
    attempt = shared.claim(run)
    client = asked(attempt, "POST", f"http://{blind(plain)}/x", body=b"1")
    upstream = plain.accept()
    assert b"roxy" not in upstream.head()
    upstream.send(OK)
    assert client.head().startswith(b"HTTP/1.1 200")
    gateway = Wire.to(attempt)
    gateway.send(
        f"POST /@{run}:{attempt.token}/http/{blind(plain)}/y HTTP/1.1\r\nHost: localhost:{attempt.port}\r\n"
        "Content-Length: 0\r\n\r\n".encode()
    )
    upstream.exactly(1)
    assert upstream.head().startswith(b"POST /y ")
    upstream.send(OK)
    assert gateway.head().startswith(b"HTTP/1.1 200")
    assert shared.fetch("SELECT FROM twiceshy.step WHERE run_id = $1", run) == []


def test_what_is_denied(shared: Stack, run: str, plain: Origin) -> None:
    attempt = shared.claim(run)
    client = Tls.through(attempt, f"127.0.0.3:{plain.port}", trusting(shared))
    client.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.3:%d\r\n\r\n" % plain.port)
    assert "nobody goes there" in refused(client, 403, "denied")
    assert "no deletes" in refused(asked(attempt, "DELETE", plain.url("/admin/x"), body=b""), 403, "denied")
    assert plain.nobody()
    allowed = asked(attempt, "DELETE", plain.url("/other"))
    plain.answer(OK)
    assert allowed.head().startswith(b"HTTP/1.1 200")
    assert report(attempt)["arrived"] == {
        f"127.0.0.3:{plain.port}": {"refused": 1}, f"127.0.0.1:{plain.port}": {"refused": 1, "journalled": 1}
    }  # fmt: skip


# ---- whose it is, as long as it lasts


def open_tunnel(stack: Stack, attempt: Attempt, origin: Origin) -> tuple[Wire, Wire]:
    """A tunnel that has passed a byte each way: client and upstream."""
    wire = connected(attempt, blind(origin))
    upstream = origin.accept()
    wire.send(b"1")
    assert upstream.exactly(1) == b"1"
    upstream.send(b"2")
    assert wire.exactly(1) == b"2"
    return wire, upstream


def test_a_zombies_tunnel_is_cut_when_another_attempt_speaks(shared: Stack, run: str, plain: Origin) -> None:
    wire, upstream = open_tunnel(shared, shared.claim(run), plain)
    second = shared.claim(run)
    assert second.ask("GET", "http://twiceshy.internal/run").status == 200
    assert reset(wire)
    assert reset(upstream)
    open_tunnel(shared, second, plain)


def test_and_when_another_has_claimed_and_says_nothing(shared: Stack, run: str, plain: Origin) -> None:
    wire, upstream = open_tunnel(shared, shared.claim(run), plain)
    shared.claim(run)
    assert reset(wire)  # a third of a lease later at most
    assert reset(upstream)


@pytest.mark.parametrize("how", ["end", "stop"])
def test_a_run_that_ends_or_stops_ends_its_tunnels(shared: Stack, run: str, plain: Origin, how: str) -> None:
    attempt = shared.claim(run)
    wire, upstream = open_tunnel(shared, attempt, plain)
    if how == "end":
        alone = Attempt(run, attempt.token, attempt.port)
        shared.end(alone, "done", 0)
    else:
        first = asked(attempt, "POST", plain.url("/mail"), b"Twiceshy-Step: one", body=b"1")
        plain.answer(OK)
        assert first.head().startswith(b"HTTP/1.1 200")
        refused(asked(attempt, "POST", plain.url("/other"), b"Twiceshy-Step: one", body=b"2"), 412, "diverged")
    assert reset(wire)
    assert reset(upstream)


def test_a_tunnel_holds_the_lease_of_a_run_without_a_token(
    dsn: str, tmp_path: Path, routes: Path, run: str, plain: Origin
) -> None:
    with stack(dsn, tmp_path, config=routes, lease=0.6, idle_timeout=0.6) as made:
        attempt = Attempt(run, None, made.sidecar.port)
        wire, upstream = open_tunnel(made, attempt, plain)
        until = made.fetch("SELECT lease_expires_at AS at FROM twiceshy.run WHERE id = $1", run)[0]["at"]
        longer = "SELECT FROM twiceshy.run WHERE id = $1 AND lease_expires_at > $2::timestamptz + interval '1.5 s'"
        made.sandbox.wait_for(lambda: made.fetch(longer, run, until), what="it lasts longer than idle_timeout")
        wire.send(b"still")
        assert upstream.exactly(5) == b"still"
        wire.close()
        assert upstream.rest() == b""
        upstream.close()
        made.sandbox.wait_for(
            lambda: made.fetch("SELECT FROM twiceshy.attempt WHERE run_id = $1 AND outcome = 'failed'", run),
            what="idle_timeout",
        )


def test_a_tunnel_in_which_nothing_moves_is_ended(
    dsn: str, tmp_path: Path, routes: Path, run: str, plain: Origin
) -> None:
    with stack(dsn, tmp_path, config=routes, tunnel_timeout=0.4) as made:
        attempt = made.claim(run)
        wire, upstream = open_tunnel(made, attempt, plain)
        assert reset(wire)
        assert reset(upstream)
        [hint] = report(attempt)["hints"]
        assert hint.startswith(f"localhost:{plain.port}: ")
        assert "0.4 s" in hint
        assert "tunnel_timeout" in hint


def test_nothing_leaves_while_nobody_knows_whose_it_is(
    dsn: str, tmp_path: Path, routes: Path, run: str, plain: Origin
) -> None:
    """The database is away for longer than the lease is confirmed."""
    with _Gate(dsn) as gate, stack(gate.dsn, tmp_path, config=routes, lease=0.6, database_wait=0.3) as made:
        made.dsn = dsn
        wire, upstream = open_tunnel(made, made.claim(run), plain)
        gate.shut()
        sent = 0
        with contextlib.suppress(ConnectionError):
            while True:  # until it is held, and then cut
                wire.send(b"x")
                sent += 1
                threading.Event().wait(0.02)
        with contextlib.suppress(ConnectionResetError):
            assert set(upstream.rest()) <= set(b"x")
        assert sent > 1
        assert "nobody could say whether its attempt is current" in made.sidecar.log.read_text()


def test_who_names_no_run_passes_where_that_is_allowed(
    dsn: str, tmp_path: Path, routes: Path, run: str, plain: Origin
) -> None:
    with stack(dsn, tmp_path, config=routes, unidentified="pass") as made:
        nobody = Attempt(run, None, made.sidecar.port)
        wire = connected(nobody, blind(plain), bare=True)
        upstream = plain.accept()
        wire.send(b"1")
        assert upstream.exactly(1) == b"1"
        denied = Wire.to(nobody)
        denied.send(b"GET http://127.0.0.3/ HTTP/1.1\r\nHost: 127.0.0.3\r\n\r\n")
        refused(denied, 403, "denied")


# ---- nothing is left


def connections(stack: Stack, origin: Origin) -> int:
    """How many sockets the sidecar has to its clients and to *origin*, closed ones too."""
    ports = (stack.sidecar.port, origin.port)
    place = Path(f"/proc/{stack.sidecar.process.pid}")
    mine = set()
    for each in (place / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was the listing's own, or has just been closed
            mine.add(os.readlink(each))
    found = 0
    for line in (place / "net/tcp").read_text().splitlines()[1:]:
        row = line.split()
        peers = [int(address.partition(":")[2], 16) for address in row[1:3]]
        listens = row[3] == "0A"
        found += not listens and f"socket:[{row[9]}]" in mine and bool(set(peers) & set(ports))
    return found


@pytest.mark.parametrize("who", ["client", "upstream"])
@pytest.mark.parametrize("how", ["close", "reset", "die"])
def test_nothing_is_left_of_a_tunnel(shared: Stack, run: str, plain: Origin, who: str, how: str) -> None:
    attempt = shared.claim(run)
    pairs = [open_tunnel(shared, attempt, plain) for _ in range(5)]
    assert connections(shared, plain) == 10
    for pair in pairs:
        one, other = pair if who == "client" else reversed(pair)
        if how == "die":
            one.send(b"x" * 300_000)  # of which nobody has read all
            other.exactly(1)
            other.send(b"y" * 1000)  # unread when it dies: its kernel resets the connection
        getattr(one, "reset" if how == "reset" else "close")()
        with contextlib.suppress(ConnectionResetError):
            other.rest()
        other.close()
    shared.sandbox.wait_for(lambda: connections(shared, plain) == 0, what="all is closed")


def test_nothing_is_left_of_a_killed_client_whose_upstream_stays(shared: Stack, run: str, plain: Origin) -> None:
    """It has closed, and its upstream has nothing to say and does not close: only its kernel knows that it is gone."""
    wire, upstream = open_tunnel(shared, shared.claim(run), plain)
    wire.send(b"bye")
    wire.close()
    assert upstream.exactly(3) == b"bye"
    assert upstream.rest() == b""  # half an end
    upstream.send(b"late")  # what nobody takes: answered by a reset
    shared.sandbox.wait_for(lambda: connections(shared, plain) == 0, what="all is closed")
    upstream.close()


def test_the_sidecar_ends_with_blind_tunnels_open(shared: Stack, run: str, plain: Origin) -> None:
    attempt = shared.claim(run)
    wire, upstream = open_tunnel(shared, attempt, plain)
    half = connected(attempt, blind(plain))
    plain.accept()
    half.sock.shutdown(socket.SHUT_WR)
    shared.restart(kill=False)
    for each in (wire, upstream, half):
        with contextlib.suppress(ConnectionResetError):
            assert each.rest() == b""
    assert "Traceback" not in shared.sidecar.log.read_text()


# ---- what is said of it


def report_of_tape(stack: Stack, run: str) -> dict[str, Any]:
    rows = stack.fetch("SELECT tape FROM twiceshy.attempt WHERE run_id = $1 ORDER BY n DESC LIMIT 1", run)
    return dict(json.loads(rows[0]["tape"] or b"{}").get("arrived", {}))


def test_the_summary_says_that_it_was_not_journalled(shared: Stack, run: str, plain: Origin) -> None:
    attempt = shared.claim(run)
    for _ in range(2):
        open_tunnel(shared, attempt, plain)
    report(attempt)
    shared.end(Attempt(run, attempt.token, attempt.port), "done", 0)
    environment = {**os.environ, "DATABASE_URL": shared.dsn, "TWICESHY_HOME": str(shared.folder)}
    show = [sys.executable, "-m", "proxy.cli", "show", run]
    shown = subprocess.run(show, capture_output=True, text=True, cwd=PROJECT, env=environment, check=True).stdout
    assert f"unjournalled: {blind(plain)} (2 tunnels)" in shown.splitlines()
    told = subprocess.run([*show, "--json"], capture_output=True, text=True, cwd=PROJECT, env=environment, check=True)
    assert json.loads(told.stdout)["attempts"][0]["unjournalled"] == {blind(plain): {"tunnel": 2}}


# ---- HTTP/2 only


def test_a_client_that_speaks_http2_only_is_told_the_remedy(shared: Stack, run: str) -> None:
    attempt = shared.claim(run)
    for offered, trusted in ((["h2"], True), (["h2"], False), (["h2", "http/1.1"], True)):
        context = trusting(shared) if trusted else ssl.create_default_context()
        context.set_alpn_protocols(offered)
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            Tls.through(attempt, "127.0.0.1:8443", context).close()
    hints = shared.sandbox.wait_for(lambda: report(attempt)["hints"], what="a note")
    assert hints[0] == (
        "127.0.0.1: this client speaks HTTP/2 only (gRPC?), which is not opened here. To pass it through, "
        'unjournalled: [[route]] host = "127.0.0.1:8443", effect = "tunnel" in twiceshy.toml'
    )
    assert not [hint for hint in hints if "trust the CA" in hint and "hung up right after" not in hint]


@pytest.mark.parametrize("how", ["alert", "frames", "frames at once"])
def test_an_upstream_that_speaks_http2_only_is_told_with_the_remedy(
    shared: Stack, run: str, plain: Origin, how: str
) -> None:
    attempt = shared.claim(run)
    scheme = "https" if how == "alert" else "http"
    client = Wire.to(attempt)
    client.send(
        f"POST /@{run}:{attempt.token}/{scheme}/127.0.0.1:{plain.port}/pkg.Service/Call HTTP/1.1\r\n"
        f"Host: localhost:{attempt.port}\r\nContent-Length: 2\r\n\r\nhi".encode()
    )
    upstream = plain.accept()
    if how == "alert":
        assert upstream.exactly(1) == b"\x16"
        upstream.send(b"\x15\x03\x03\x00\x02\x02\x78")  # no_application_protocol
    else:
        if how == "frames":
            upstream.head()
        upstream.send(b"\0\0\6\4\0\0\0\0\0\0\3\0\0\0d" + b"\0\0\x08\7\0\0\0\0\0\0\0\0\0\0\0\0\1")
    upstream.close()
    words = refused_by_upstream(client)
    assert f'[[route]] host = "127.0.0.1:{plain.port}", effect = "tunnel"' in words
    rows = shared.fetch("SELECT state FROM twiceshy.step WHERE run_id = $1", run)
    assert [row["state"] for row in rows] == ["not_sent"]


class _Gate:
    """A way to the database that can be shut."""

    def __init__(self, dsn: str) -> None:
        from urllib.parse import urlsplit, urlunsplit

        parts = urlsplit(dsn)
        self._to = (parts.hostname or "127.0.0.1", parts.port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        where = f"127.0.0.1:{self._listener.getsockname()[1]}"
        user = parts.netloc.rpartition("@")[0]
        self.dsn = urlunsplit(parts._replace(netloc=f"{user}@{where}" if user else where))
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one = self._listener.accept()[0]
                other = socket.create_connection(self._to)
                self._socks += [one, other]
                for pair in ((one, other), (other, one)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)

    def shut(self) -> None:
        for sock in (self._listener, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()
