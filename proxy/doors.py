"""The front door: one port, an acceptor that looks at the first bytes, and what can be known of a client.

``Door`` stays the transport's protocol for the whole connection and hands bytes on to aiohttp's server
protocol, so that it sees every end: a FIN, a reset, and how much of an answer the client's kernel has
acknowledged. ``send()`` to a client that has already closed its end returns success, so a write that went
through says nothing about delivery.
"""

import asyncio
import fcntl
import select
import socket
import struct
import termios
from collections.abc import Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from proxy.peers import Process

_HIGH_WATER = 64 << 10
#: Polling for acknowledgement: seconds, doubled up to the last.
_POLL_FIRST, _POLL_LAST = 0.001, 0.02
_CONNECT_TEXT = (
    b"HTTP/1.1 501 Not Implemented by twiceshy: CONNECT\r\n"
    b"Content-Type: text/plain; charset=utf-8\r\nTwiceshy-Error: not-supported\r\n"
    b"x-should-retry: false\r\nstripe-should-retry: false\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
)
_CONNECT_WORDS = (
    b"This version of twiceshy does not open https tunnels. Use http:// upstreams, or the gateway address "
    b"http://SIDECAR/@RUN:TOKEN/https/HOST/PATH as the base URL of your SDK.\n"
)
_HEAD_MAX = 64 << 10


class Door(asyncio.Protocol):
    """One client connection."""

    def __init__(self, server: web.Server, doors: "set[Door]", lease: float) -> None:
        self._server = server
        self._doors = doors
        self._lease = lease
        self._inner: RequestHandler | None = None
        self._first = bytearray()
        self._paused = False
        self._watchers: set[asyncio.Event] = set()
        self._received = 0
        self.transport: asyncio.Transport | None = None
        self.gone = False  # FIN, reset, or aborted by us
        self.reset = False
        self.on_reset: Callable[[], None] | None = None  # called once when the client resets the connection
        self.peer: tuple[str, int] | None = None
        self.local: tuple[str, int] | None = None
        self.process: Process | None = None  # of a client that named no token, when it could be read
        self.written = 0  # bytes, over all answers
        self.answered = False  # the end of the answer under way is written, its acknowledgement is awaited
        self._believed = False
        self._fd = -1

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._doors.add(self)
        transport.set_write_buffer_limits(high=_HIGH_WATER)
        sock = transport.get_extra_info("socket")
        self._fd = sock.fileno()
        self.peer = transport.get_extra_info("peername")[:2]
        self.local = transport.get_extra_info("sockname")[:2]
        # A client counts as attached only while its socket answers.
        third = max(1, int(self._lease / 3))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, third)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, third)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._lease * 1000))

    def data_received(self, data: bytes) -> None:
        self._received += 1
        if self._inner is not None:
            self._inner.data_received(data)
            self._wake()
            return
        self._first += data
        if b"CONNECT ".startswith(bytes(self._first[:8])):
            if len(self._first) < 8:
                return
            self._refuse_connect()
            return
        self._inner = self._server()
        assert self.transport is not None
        self._inner.connection_made(self.transport)
        self._inner.data_received(bytes(self._first))
        self._first.clear()

    def _refuse_connect(self) -> None:
        assert self.transport is not None
        if b"\r\n\r\n" not in self._first and len(self._first) < _HEAD_MAX:
            return
        self.transport.write(_CONNECT_TEXT % (len(_CONNECT_WORDS), _CONNECT_WORDS))
        self.transport.close()

    def eof_received(self) -> bool | None:
        self._end()
        if self._inner is not None:
            self._inner.eof_received()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._doors.discard(self)
        self.reset = self.reset or isinstance(exc, OSError)
        self._end()
        if self._inner is not None:
            self._inner.connection_lost(exc)
        on_reset, self.on_reset = self.on_reset, None
        if self.reset and on_reset is not None:
            on_reset()

    def pause_writing(self) -> None:
        self._paused = True
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._paused = False
        if self._inner is not None:
            self._inner.resume_writing()
        self._wake()

    # ---- what the relay needs

    @property
    def writable(self) -> bool:
        return not self._paused

    def watch(self, event: asyncio.Event) -> None:
        """Set *event* whenever the client went away or can be written to again."""
        self._watchers.add(event)

    def unwatch(self, event: asyncio.Event) -> None:
        self._watchers.discard(event)

    def write(self, data: bytes) -> None:
        if not self.gone and self.transport is not None:
            self.written += len(data)
            self.transport.write(data)

    def abort(self) -> None:
        """Cut the connection so that the client sees its answer cut, never as complete."""
        self.gone = True
        if self.transport is not None:
            self.transport.abort()
        self._wake()

    def look(self) -> bool:
        """Peek for a FIN or reset that the loop has not seen yet; True if the client is gone."""
        if not self.gone and self._fd >= 0 and self.transport is not None:
            poll = select.poll()
            poll.register(self._fd, select.POLLRDHUP)
            for _, bits in poll.poll(0):
                if bits & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
                    self.reset = self.reset or bool(bits & select.POLLERR)
                    self._end()
        return self.gone

    def unacknowledged(self) -> int:
        """How many written bytes the client's kernel has not acknowledged."""
        if self.transport is None or self.transport.is_closing():
            return 0 if self.transport is None else self.transport.get_write_buffer_size()
        count: int = struct.unpack("i", fcntl.ioctl(self._fd, termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        return count + self.transport.get_write_buffer_size()

    async def acknowledged(self, limit: float = 1.0) -> bool:
        """Wait until all that was written is acknowledged (True), or the client is gone, or *limit* seconds.

        A further request on the connection is an acknowledgement as well, and so is ``believe``.
        """
        self._believed = False
        if not self.gone and self.unacknowledged() == 0:
            return True
        seen, event = self._received, asyncio.Event()
        self.watch(event)
        loop = asyncio.get_running_loop()
        deadline, step = loop.time() + limit, _POLL_FIRST
        try:
            while not self.gone and loop.time() < deadline:
                try:
                    async with asyncio.timeout(step):
                        await event.wait()
                except TimeoutError:
                    step = min(step * 2, _POLL_LAST)
                event.clear()
                if self._received > seen or self._believed or (not self.gone and self.unacknowledged() == 0):
                    return True
        finally:
            self.unwatch(event)
        return False

    async def answered_whole(self) -> bool:
        """The end of an answer was written: wait for its acknowledgement, as ``acknowledged`` does."""
        self.answered = True
        try:
            return await self.acknowledged()
        finally:
            self.answered = False

    def believe(self) -> None:
        """The client asks for something again elsewhere and has not closed this connection: it has its answer."""
        self._believed = True
        self._wake()

    def _end(self) -> None:
        if not self.gone:
            self.gone = True
            self._wake()

    def _wake(self) -> None:
        for event in self._watchers:
            event.set()


async def listen(server: web.Server, host: str, port: int, doors: set[Door], lease: float) -> asyncio.Server:
    """Open the port. Raises OSError when it is taken."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: Door(server, doors, lease), host, port, reuse_address=True, backlog=1024)


def door_of(request: web.BaseRequest) -> Door | None:
    """The door that *request* came through; None when its client is gone already."""
    transport = request.transport
    if transport is None:
        return None
    door = transport.get_protocol()
    assert isinstance(door, Door)
    return door
