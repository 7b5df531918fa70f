"""Clients and upstreams that speak TLS, in the hands of one test: what goes in which packet is the test's choice."""

import http.client
import json
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from proxy import authority
from tests.raw import PATIENCE, Origin, Wire, credentials, headers
from tests.stack import Attempt, Stack

ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


def trusting(stack: Stack) -> ssl.SSLContext:
    """A client's context that trusts the sidecar's CA, and nobody else."""
    return ssl.create_default_context(cafile=str(authority.ensure(stack.folder) / authority.CERTIFICATE))


def head_of_connect(attempt: Attempt | None, to: str, *lines: bytes) -> bytes:
    named = [] if attempt is None else [credentials(attempt)]
    return b"\r\n".join([f"CONNECT {to} HTTP/1.1".encode(), b"Host: " + to.encode(), *named, *lines, b"", b""])


def connected(attempt: Attempt, to: str, *lines: bytes, bare: bool = False) -> Wire:
    """A connection whose CONNECT was answered. *bare*: it names no run."""
    wire = Wire.to(attempt)
    wire.send(head_of_connect(None if bare else attempt, to, *lines))
    assert wire.head() == ESTABLISHED
    return wire


class Tls(Wire):
    """A TLS connection in a tunnel. What it reads raises ``ssl.SSLEOFError`` where the end is not a clean one."""

    def __init__(self, wire: Wire, context: ssl.SSLContext, name: str) -> None:
        sock = context.wrap_socket(wire.sock, server_hostname=name, suppress_ragged_eofs=False)
        super().__init__(sock)

    @property
    def tls(self) -> ssl.SSLSocket:
        assert isinstance(self.sock, ssl.SSLSocket)
        return self.sock

    @classmethod
    def through(
        cls, attempt: Attempt, to: str, context: ssl.SSLContext, *lines: bytes, name: str = "", bare: bool = False
    ) -> Self:
        """A tunnel to *to* with TLS for *name* (its host) inside."""
        host = to.rpartition(":")[0].strip("[]")
        made = cls(connected(attempt, to, *lines, bare=bare), context, name or host)
        attempt.sockets.append(made.sock)
        return made


class ByHand:
    """A client's TLS without a socket: its bytes are taken and given by the test."""

    def __init__(self, context: ssl.SSLContext, name: str) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.object = context.wrap_bio(self._in, self._out, server_hostname=name)

    def hello(self) -> bytes:
        try:
            self.object.do_handshake()
        except ssl.SSLWantReadError:
            pass
        return self._out.read()

    def finish(self, wire: Wire) -> bytes:
        """Read from *wire* until the handshake is done here; what is to be sent to end it there."""
        while True:
            self._in.write(wire.sock.recv(1 << 16))
            try:
                self.object.do_handshake()
            except ssl.SSLWantReadError:
                wire.sock.sendall(self._out.read())
            else:
                return self._out.read()

    def sealed(self, data: bytes) -> bytes:
        self.object.write(data)
        return self._out.read()

    def until(self, wire: Wire, mark: bytes) -> bytes:
        got = b""
        while mark not in got:
            try:
                got += self.object.read(1 << 16)
            except ssl.SSLWantReadError:
                data = wire.sock.recv(1 << 16)
                assert data, got
                self._in.write(data)
        return got


class TlsOrigin(Origin):
    """An upstream that speaks TLS. Connections whose handshake fails are counted, and not taken."""

    def __init__(self, context: ssl.SSLContext, host: str = "127.0.0.1") -> None:
        super().__init__(host)
        self._context = context

    def url(self, target: str) -> str:
        return f"https://127.0.0.1:{self.port}{target}"

    @property
    def authority(self) -> str:
        return f"127.0.0.1:{self.port}"

    def accept(self) -> Wire:
        sock = self._listener.accept()[0]
        sock.settimeout(PATIENCE)
        wire = Wire(self._context.wrap_socket(sock, server_side=True))
        self.taken.append(wire)
        return wire

    def offended(self) -> str:
        """Take a connection, and say how its client ended it before it sent anything."""
        try:
            wire = self.accept()
            data = wire.sock.recv(1)
        except (ssl.SSLError, ConnectionError) as error:
            return getattr(error, "reason", None) or type(error).__name__
        assert not data, f"bytes came: {data!r}"
        return "closed"


@dataclass
class Secure(Attempt):
    """An attempt that speaks to one https upstream through tunnels, as SDKs do: credentials with CONNECT only."""

    host: str = "127.0.0.1"
    at: int = 443
    context: ssl.SSLContext = field(default_factory=ssl.create_default_context)

    @classmethod
    def of(cls, attempt: Attempt, stack: Stack, context: ssl.SSLContext) -> Self:
        return cls(attempt.run, attempt.token, attempt.port, attempt.sockets, at=stack.sandbox.port, context=context)

    def connect(self, timeout: float = 30.0) -> http.client.HTTPConnection:
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout, context=self.context)
        connection.set_tunnel(self.host, self.at, super().headers())
        connection.connect()
        self.sockets.append(connection.sock)
        return connection

    def headers(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        return dict(extra or {})


def slowly_sent(wire: Wire, data: bytes, size: int = 1) -> None:
    """Send *data* in pieces of *size*, each in a packet of its own."""
    wire.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(0, len(data), size):
        wire.sock.sendall(data[at : at + size])


def context_of(certificate: tuple[bytes, bytes], folder: Path, also: Iterable[bytes] = ()) -> ssl.SSLContext:
    """A server's context with this certificate and key."""
    path = folder / "server.pem"
    path.write_bytes(b"".join([*certificate, *also]))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


def here(stack: Stack) -> str:
    """The sandbox as CONNECT names it."""
    return f"127.0.0.1:{stack.sandbox.port}"


def plain(method: str, path: str, host: str, *lines: bytes, body: bytes | None = None) -> bytes:
    """A request as it is sent inside a tunnel."""
    head = [f"{method} {path} HTTP/1.1".encode(), b"Host: " + host.encode(), *lines]
    if body is not None:
        head.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*head, b"", body or b""])


def refused_by_upstream(client: Wire) -> str:
    """The words of a 502 that *client* gets."""
    head = client.head()
    found = {name.lower(): value for name, value in headers(head)}
    assert (head.split(b" ")[1], found[b"twiceshy-error"]) == (b"502", b"upstream"), head
    return str(json.loads(client.exactly(int(found[b"content-length"])))["message"])


def unopened(origin: Origin) -> str:
    """*origin* by a name that the rules of tests/proxy/blind leave unopened."""
    return f"localhost:{origin.port}"


def passing(attempt: Attempt, origin: Origin) -> tuple[Wire, Wire]:
    """A tunnel that has passed a byte each way: client and upstream."""
    wire = connected(attempt, unopened(origin))
    upstream = origin.accept()
    wire.send(b"1")
    assert upstream.exactly(1) == b"1"
    upstream.send(b"2")
    assert wire.exactly(1) == b"2"
    return wire, upstream
