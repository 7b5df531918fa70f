"""Both ends of the sidecar as plain sockets: what a test writes is what is sent, what it reads is what came.

A client (``Wire.to`` the sidecar) and an upstream (``Origin``) in the hands of one test: it sees an event reach the
client before it lets the upstream send the next one. Every read is bounded.
"""

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import asyncpg

from tests.stack import Attempt, SidecarProcess, Stack

PATIENCE = 20.0
#: A small answer of an upstream.
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class Wire:
    """One connection, byte by byte. ``rest`` and what it is made of raise ConnectionResetError after a reset."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._ahead = b""

    @classmethod
    def to(cls, attempt: Attempt, *, receive_buffer: int | None = None) -> Self:
        """A client's connection to the sidecar."""
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.connect(("127.0.0.1", attempt.port))
        attempt.sockets.append(sock)
        return cls(sock)

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def _more(self) -> bool:
        data = self.sock.recv(1 << 16)
        self._ahead += data
        return bool(data)

    def _take(self, count: int) -> bytes:
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
        return taken

    def until(self, mark: bytes) -> bytes:
        """Everything up to and with *mark*."""
        while mark not in self._ahead:
            if not self._more():
                raise EOFError(f"ended before {mark!r}: {self._ahead!r}")
        return self._take(self._ahead.index(mark) + len(mark))

    def exactly(self, count: int) -> bytes:
        while len(self._ahead) < count:
            if not self._more():
                raise EOFError(f"{len(self._ahead)} of {count} bytes: {self._ahead!r}")
        return self._take(count)

    def head(self) -> bytes:
        return self.until(b"\r\n\r\n")

    def body_until(self, mark: bytes | None) -> bytes:
        """The body of a chunked answer up to the chunk in which *mark* ends; None: to its end."""
        body = b""
        while mark is None or mark not in body:
            count = int(self.until(b"\r\n"), 16)
            body += self.exactly(count)
            assert self.exactly(2) == b"\r\n"
            if count == 0:
                assert mark is None, f"ended before {mark!r}: {body!r}"
                break
        return body

    def rest(self) -> bytes:
        """Everything to the end of the connection."""
        while self._more():
            pass
        return self._take(len(self._ahead))

    def rest_of_cut(self) -> bytes:
        """Everything to the end of the connection, however it ends."""
        with contextlib.suppress(ConnectionResetError):
            while self._more():
                pass
        return self._take(len(self._ahead))

    def silent(self, seconds: float = 0.15) -> bool:
        """True if nothing comes, not even the end, for so long."""
        if self._ahead:
            return False
        self.sock.settimeout(seconds)
        try:
            self._more()
            return False
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(PATIENCE)

    def gone(self) -> bool:
        """Wait for the connection's end without more bytes; False if bytes come."""
        try:
            return not self._ahead and not self._more()
        except ConnectionResetError:
            return True

    def gone_after_head(self) -> bool:
        """Wait for the connection's end; True if nothing came but a head, or not even that."""
        return self.rest_of_cut().count(b"\r\n\r\n") <= 1

    def is_reset(self) -> bool:
        """Wait for the connection's end; True if it was a reset."""
        try:
            self.rest()
        except ConnectionResetError:
            return True
        return False

    def wait_for_bytes(self) -> None:
        """Wait until something has come, and leave it unread."""
        assert self.sock.recv(1, socket.MSG_PEEK)

    def close(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        """Close with a TCP reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class Origin:
    """An upstream whose connections the test serves."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((host, 0), backlog=64)
        self._listener.settimeout(PATIENCE)
        self.port: int = self._listener.getsockname()[1]
        self.taken: list[Wire] = []

    def url(self, target: str) -> str:
        return f"http://127.0.0.1:{self.port}{target}"

    def accept(self) -> Wire:
        """The next connection."""
        wire = Wire(self._listener.accept()[0])
        self.taken.append(wire)
        return wire

    def nobody(self, seconds: float = 0.1) -> bool:
        """True if nobody connects for so long."""
        self._listener.settimeout(seconds)
        try:
            self.accept()
        except TimeoutError:
            return True
        finally:
            self._listener.settimeout(PATIENCE)
        return False

    def answer(self, data: bytes, *, close: bool = False) -> bytes:
        """Take a connection, read one request without a body from it, answer with *data*; the request's head."""
        wire = self.accept()
        head = wire.head()
        wire.send(data)
        if close:
            wire.close()
        return head

    def close(self) -> None:
        self._listener.close()
        for wire in self.taken:
            wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def looked_at(attempt: Attempt) -> None:
    """Let the sidecar look whether answers were acknowledged, without a step of *attempt*.

    For much less than the second in which a reset counts.
    """
    until = time.monotonic() + 0.15
    while time.monotonic() < until:
        attempt.report()


@contextlib.contextmanager
def stopped(sidecar: SidecarProcess) -> Iterator[None]:
    """What happens meanwhile, *sidecar* finds all at once."""
    pid = sidecar.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def credentials(attempt: Attempt) -> bytes:
    pair = f"{attempt.run}:{attempt.token or 'none'}".encode()
    return b"Proxy-Authorization: Basic " + base64.b64encode(pair)


def request(
    attempt: Attempt, method: str, url: str, *lines: bytes, body: bytes | None = None, version: bytes = b"HTTP/1.1"
) -> bytes:
    """A request as a client gives it to its proxy."""
    authority = url.split("/")[2]
    head = [f"{method} {url} ".encode() + version, f"Host: {authority}".encode(), credentials(attempt), *lines]
    if body is not None:
        head.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*head, b"", body or b""])


def asked(attempt: Attempt, method: str, url: str, *lines: bytes, body: bytes | None = None) -> Wire:
    """A client that has sent a request."""
    wire = Wire.to(attempt)
    wire.send(request(attempt, method, url, *lines, body=body))
    return wire


def headers(head: bytes) -> list[tuple[bytes, bytes]]:
    """The header lines of a head, names as they came."""
    lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")[1:]
    return [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]


def unchunked(data: bytes) -> tuple[bytes, bool]:
    """The body that *data* carries in chunks, and whether its end is there."""
    body = b""
    while data:
        size, found, data = data.partition(b"\r\n")
        if not found:
            return body, False
        count = int(size, 16)
        if count == 0:
            assert data == b"\r\n", data
            return body, True
        body += data[:count]
        data = data[count + 2 :]
    return body, False


@contextlib.contextmanager
def locked(dsn: str, run: str, tables: str = "") -> Iterator["Lock"]:
    """The row of *run* is locked by another transaction: nothing of the run can be committed until ``release``.

    *tables*: these are locked instead, for readers too.
    """
    lock = Lock(dsn, run, tables)
    try:
        yield lock
    finally:
        lock.release()


class Lock:
    """A transaction that holds a run's row or some tables, and a look at who waits for it."""

    def __init__(self, dsn: str, run: str, tables: str = "") -> None:
        self._dsn = dsn
        self._run = run
        self._tables = tables
        self._held = threading.Event()
        self._released = threading.Event()
        self._ask = threading.Event()
        self._waited = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), daemon=True)
        self._thread.start()
        assert self._held.wait(PATIENCE)
        if self._error is not None:
            raise self._error

    async def _work(self) -> None:
        try:
            connection = await asyncpg.connect(self._dsn)
            looker = await asyncpg.connect(self._dsn)
        except BaseException as error:
            self._error = error
            self._held.set()
            raise
        try:
            async with connection.transaction():
                if self._tables:
                    await connection.execute(f"LOCK TABLE {self._tables} IN ACCESS EXCLUSIVE MODE")
                else:
                    await connection.execute("SELECT FROM twiceshy.run WHERE id = $1 FOR UPDATE", self._run)
                self._held.set()
                while not self._released.is_set():
                    if self._ask.is_set() and await looker.fetchval(
                        "SELECT count(*) FROM pg_stat_activity"
                        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
                    ):
                        self._waited.set()
                    await asyncio.sleep(0.01)
        finally:
            await connection.close()
            await looker.close()

    def wait_wanted(self) -> None:
        """Wait until somebody waits for the lock."""
        self._ask.set()
        assert self._waited.wait(PATIENCE), "nobody waits for the run's row"

    def release(self) -> None:
        self._released.set()
        self._thread.join(PATIENCE)


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
