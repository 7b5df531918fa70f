"""A small HTTP/1.1 server: takes requests exactly as they came, gives answers exactly as asked.

Not a framework's server, for two reasons. The sandbox is the judge of what the sidecar sent, and the
sidecar is built on aiohttp: a judge made of the same parts would be blind to what they both get wrong.
And it must be able to answer as no framework wants to: cut short, closed without a word, reset, framed by
the connection's end.

It refuses with 400 what no client of good faith sends (two lengths, folded headers, bare line feeds), and
handles the requests of one connection one after the other.
"""

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

HEAD_MAX = 256 << 10
Headers = tuple[tuple[bytes, bytes], ...]


class Gone(Exception):
    """The client has closed its connection."""


class Malformed(Exception):
    """What came is no request."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it came over the wire. ``body`` is without transfer coding, else untouched."""

    method: str
    target: str
    headers: Headers
    body: bytes
    connection: int  # number of the connection, from 1
    turn: int  # the how-manieth request of its connection, from 1
    whole: bool = True  # False: the client went before the body was complete

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    def header(self, name: str) -> str | None:
        """The first value of header *name* (any casing) as latin-1, or None."""
        wanted = name.lower().encode("latin-1")
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), None)


class Line:
    """The way back to the client of one connection."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._writable = asyncio.Event()
        self._writable.set()
        self.gone = asyncio.Event()
        self.sent = 0

    async def send(self, data: bytes) -> None:
        """Write *data* and wait until the client has taken most of what was written. Raises Gone."""
        if self.gone.is_set() or self._transport.is_closing():
            raise Gone
        self._transport.write(data)
        self.sent += len(data)
        await self._writable.wait()
        if self.gone.is_set():
            raise Gone

    def close(self, *, reset: bool = False) -> None:
        """End the connection after what was written, or at once with a TCP reset."""
        if reset:
            raw = cast(socket.socket, self._transport.get_extra_info("socket"))
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        else:
            self._transport.close()

    def writable(self, yes: bool) -> None:
        if yes:
            self._writable.set()
        else:
            self._writable.clear()

    def lost(self) -> None:
        self.gone.set()
        self._writable.set()


#: Serves one request; True keeps the connection for the next one.
Serve = Callable[[Asked, Line], Awaitable[bool]]


class _Body:
    """Takes a request's body out of a buffer, by length or by chunks."""

    def __init__(self, headers: Headers) -> None:
        lengths = [value for key, value in headers if key.lower() == b"content-length"]
        codings = [value.lower() for key, value in headers if key.lower() == b"transfer-encoding"]
        if len(lengths) > 1 or (lengths and codings) or codings not in ([], [b"chunked"]):
            raise Malformed("body length is not clear")
        if lengths and not lengths[0].isdigit():
            raise Malformed("Content-Length is no number")
        self._chunked = bool(codings)
        self._left = int(lengths[0]) if lengths else 0
        self._trailer = False
        self.taken = bytearray()

    def feed(self, buffer: bytearray) -> bool:
        """Take from the front of *buffer* what belongs to the body; True when that is all of it."""
        if not self._chunked:
            self._take(buffer)
            return self._left == 0
        while True:
            if self._left:  # the chunk's data and the CRLF behind it
                if len(buffer) < self._left + 2:
                    return False
                end = self._left
                self._take(buffer)
                if buffer[:2] != b"\r\n":
                    raise Malformed(f"chunk of {end} bytes is not followed by CRLF")
                del buffer[:2]
            line, found, _ = buffer.partition(b"\r\n")
            if not found:
                return False
            del buffer[: len(line) + 2]
            if self._trailer:
                if not line:
                    return True
                continue
            try:
                self._left = int(line.partition(b";")[0], 16)
            except ValueError:
                raise Malformed("chunk size is no number") from None
            self._trailer = self._left == 0

    def _take(self, buffer: bytearray) -> None:
        piece = buffer[: self._left]
        self.taken += piece
        self._left -= len(piece)
        del buffer[: len(piece)]


def _read_head(head: bytes) -> tuple[str, str, Headers]:
    first, *lines = head.split(b"\r\n")
    parts = first.split(b" ")
    if len(parts) != 3 or parts[2] != b"HTTP/1.1" or b"\n" in head.replace(b"\r\n", b""):
        raise Malformed("no request line")
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name.strip() != name:
            raise Malformed("no header line")
        headers.append((name, value.strip(b" \t")))
    return parts[0].decode("latin-1"), parts[1].decode("latin-1"), tuple(headers)


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, serve: Serve, number: int) -> None:
        self._serve = serve
        self._number = number
        self._turn = 0
        self._buffer = bytearray()
        self._head: tuple[str, str, Headers] | None = None
        self._body: _Body | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._line = Line(self._transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._advance()

    def pause_writing(self) -> None:
        self._line.writable(False)

    def resume_writing(self) -> None:
        self._line.writable(True)

    def connection_lost(self, _error: Exception | None) -> None:
        self._line.lost()
        if self._head is not None and self._task is None:
            self._start(whole=False)

    def _advance(self) -> None:
        if self._task is not None or self._transport.is_closing():
            return  # what comes early (pipelining) waits for its turn
        try:
            if self._head is None:
                end = self._buffer.find(b"\r\n\r\n")
                if end < 0:
                    if len(self._buffer) > HEAD_MAX:
                        raise Malformed("head too large")
                    return
                self._head = _read_head(bytes(self._buffer[:end]))
                del self._buffer[: end + 4]
                self._body = _Body(self._head[2])
                if any(key.lower() == b"expect" for key, _ in self._head[2]):
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert self._body is not None
            if self._body.feed(self._buffer):
                self._start(whole=True)
        except Malformed as error:
            self._head = None
            body = f"{error}\n".encode()
            head = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self._transport.write(head.encode() + body)
            self._transport.close()

    def _start(self, *, whole: bool) -> None:
        assert self._head is not None
        assert self._body is not None
        self._turn += 1
        method, target, headers = self._head
        asked = Asked(method, target, headers, bytes(self._body.taken), self._number, self._turn, whole)
        self._head = self._body = None
        self._task = asyncio.get_running_loop().create_task(self._run(asked))

    async def _run(self, asked: Asked) -> None:
        keep = False
        try:
            keep = await self._serve(asked, self._line)
        except Gone:
            pass
        finally:
            self._task = None
            if not keep:
                self._transport.close()
        self._advance()


async def listen(serve: Serve, host: str, port: int, tls: ssl.SSLContext | None = None) -> asyncio.Server:
    """Listen on *host*:*port* (0: a free one), inside *tls* if given, and hand every request to *serve*."""
    numbers = iter(range(1, 1 << 62))
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: Connection(serve, next(numbers)), host, port, backlog=1024, ssl=tls)
