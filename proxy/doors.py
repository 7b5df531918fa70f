"""The front door: one port, an acceptor that looks at the first bytes, and what can be known of a client.

``Door`` stays the transport's protocol for the whole connection and hands bytes on to aiohttp's server
protocol, so that it sees every end: a FIN, a reset, and how much of an answer the client's kernel has
acknowledged. ``send()`` to a client that has already closed its end returns success, so a write that went
through says nothing about delivery.
"""

import asyncio
import fcntl
import logging
import os
import select
import socket
import struct
import termios
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from proxy import wire
from proxy.hello import server_name
from proxy.identity import Tunnel, connect
from proxy.peers import Process
from proxy.refusals import Refusal

log = logging.getLogger("twiceshy.door")

HEAD_LIMIT = 64 << 10
HEADERS_LIMIT = 1000
_HIGH_WATER = 64 << 10
#: Polling for acknowledgement: seconds, doubled up to the last.
_POLL_FIRST, _POLL_LAST = 0.001, 0.1
#: How many characters of the words about a request that cannot be read are said: they may quote all of it.
_QUOTED = 300
NO_TUNNEL_HERE = Refusal(
    "bad-request",
    "A CONNECT inside a tunnel, or behind another request, leads nowhere: give it a connection of its own. "
    "Nothing was sent.",
)
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_TLS_HANDSHAKE = 0x16


#: Goes on with a tunnel whose client begins TLS: the door, the first bytes of the handshake, the name in them.
OpenTls: TypeAlias = "Callable[[Door, bytes, str], None]"


class Written(web.StreamResponse):
    """Tells aiohttp that the answer's bytes have gone out already (see proxy.wire)."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._kept = keep_alive

    @property
    def keep_alive(self) -> bool | None:
        return self._kept

    async def prepare(self, request: web.BaseRequest) -> None:  # noqa: ARG002
        return None

    async def write_eof(self, data: bytes = b"") -> None:  # noqa: ARG002
        return None


class _Inner(RequestHandler):
    """aiohttp's server protocol, which answers what it cannot read in our words."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        door = door_of(request)
        if door is not None and status == 400:
            why = " ".join((message or str(exc))[:_QUOTED].split())
            door.refuse(Refusal("bad-request", f"twiceshy cannot read this request: {why}. Nothing was sent."))
        elif door is not None:
            log.error("a request failed", exc_info=exc)
            door.abort()
        return Written(keep_alive=False)


class Door(asyncio.Protocol):
    """One client connection."""

    def __init__(
        self, server: web.Server, doors: "set[Door]", lease: float, open_tls: OpenTls, tunnel: Tunnel | None = None
    ) -> None:
        self._server = server
        self._open_tls = open_tls
        self._under: asyncio.Transport | None = None  # the connection that carries the TLS of this one
        self.tunnel = tunnel  # what CONNECT said
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
        self.on_unused: Callable[[], None] | None = None  # called when a tunnel's TLS ends and nothing ever came
        self.peer: tuple[str, int] | None = None
        self.local: tuple[str, int] | None = None
        self.process: Process | None = None  # of a client that named no token, when it could be read
        self.written = 0  # bytes, over all answers
        self.answered = False  # the end of the answer under way is written, its acknowledgement is awaited
        self._believed = False
        self._left = 0  # bytes that were unacknowledged when the client went
        self._fd = -1

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._doors.add(self)
        transport.set_write_buffer_limits(high=_HIGH_WATER)
        sock = transport.get_extra_info("socket")
        # A number of its own: the loop closes a TLS connection's socket before it says so here, and what was left
        # unacknowledged must still be asked for. The connection ends when this one is closed, too.
        self._fd = sock.fileno() if self._under is None else os.dup(sock.fileno())
        self.peer = transport.get_extra_info("peername")[:2]
        self.local = transport.get_extra_info("sockname")[:2]
        # A client counts as attached only while its socket answers: see ``answers`` for one that has data to take.
        third = max(1, int(self._lease / 3))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, third)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, third)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._begin()

    def data_received(self, data: bytes) -> None:
        self._received += 1
        if self._inner is not None:
            self._inner.data_received(data)
            self._wake()
            return
        self._first += data
        # Inside a tunnel's TLS a request may come before the loop has said that the connection is made.
        if self.transport is not None:
            self._begin()

    def _begin(self) -> None:
        assert self.transport is not None
        if not self._first:
            return
        if self.tunnel is None and b"CONNECT ".startswith(bytes(self._first[:8])):
            head, whole, rest = self._first.partition(b"\r\n\r\n")
            if not whole:
                if len(self._first) > HEAD_LIMIT:
                    self.abort()
                return
            self.tunnel = connect(bytes(head))
            self._first = rest
            self.transport.write(ESTABLISHED)
            self._begin()
            return
        if self.tunnel is not None and self._under is None and self._first[0] == _TLS_HANDSHAKE:
            name = server_name(bytes(self._first))
            if name is not None:
                self.transport.pause_reading()
                self._open_tls(self, bytes(self._first), name)
            return
        if self.tunnel is not None and self._under is None:
            self.tunnel = replace(self.tunnel, target=replace(self.tunnel.target, scheme="http"))
        self._inner = _Inner(
            self._server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # as web.Server passes it on
            auto_decompress=False,
            max_line_size=HEAD_LIMIT,
            max_field_size=HEAD_LIMIT,
            max_headers=HEADERS_LIMIT,
        )
        self._inner.connection_made(self.transport)
        self._inner.data_received(bytes(self._first))
        self._first.clear()

    def inside(self) -> "Door":
        """The door of what comes out of this tunnel's TLS; this one is out of use."""
        self._doors.discard(self)
        inner = Door(self._server, self._doors, self._lease, self._open_tls, self.tunnel)
        inner._under = self.transport
        return inner

    def eof_received(self) -> bool | None:
        self._end()
        if self._inner is not None:
            self._inner.eof_received()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._doors.discard(self)
        self.reset = self.reset or isinstance(exc, OSError)
        self._end()
        if self._under is not None and self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        on_unused, self.on_unused = self.on_unused, None
        if self._received == 0 and on_unused is not None:
            on_unused()
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

    # ---- what is written

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

    def go_on(self) -> None:
        """Ask for the body of a request that waits to be asked. No part of the answer."""
        if not self.gone and self.transport is not None:
            self.transport.write(wire.CONTINUE)

    def refuse(self, refusal: Refusal) -> None:
        """Answer what never became a request, and close."""
        body = refusal.body()
        headers = (*refusal.headers(), (b"Content-Length", b"%d" % len(body)))
        self.write(wire.head(refusal.status, refusal.reason, headers, wire.Framing.LENGTH, keep_alive=False) + body)
        if self.transport is not None:
            self.transport.close()

    def abort(self, *, reset: bool = False) -> None:
        """Cut the connection so that the client sees its answer cut, never as complete.

        *reset*: for a client to whom the connection's plain end is the answer's end.
        """
        self._end()
        if self.transport is not None:
            if reset and not self.transport.is_closing():
                sock = self.transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    # ---- what is known of the client

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
        """How many written bytes the client's kernel has not acknowledged, or had not when the client went."""
        if self.gone or self.transport is None:
            return self._left
        try:
            count: int = struct.unpack("i", fcntl.ioctl(self._fd, termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        except OSError:
            count = 0
        under = self._under.get_write_buffer_size() if self._under is not None else 0
        return count + under + self.transport.get_write_buffer_size()

    async def acknowledged(self, *, strictly: bool = False) -> bool:
        """Wait until all that was written is acknowledged (True), or the client is gone without.

        A client that takes its time takes all the time it needs. Unless *strictly*, a further request on the
        connection is an acknowledgement as well, and so is ``believe``.
        """
        self._believed = False
        if self.unacknowledged() == 0:
            return True
        seen, event = self._received, asyncio.Event()
        self.watch(event)
        step = _POLL_FIRST
        try:
            while not self.gone:
                try:
                    async with asyncio.timeout(step):
                        await event.wait()
                except TimeoutError:
                    step = min(step * 2, _POLL_LAST)
                event.clear()
                if self.unacknowledged() == 0 or (not strictly and (self._received > seen or self._believed)):
                    return True
        finally:
            self.unwatch(event)
        # Who has read everything may close at once: a FIN acknowledges what came before it.
        return self.unacknowledged() == 0

    async def answered_whole(self) -> bool:
        """The end of an answer was written: wait for its acknowledgement, as ``acknowledged`` does."""
        self.answered = True
        try:
            return await self.acknowledged()
        finally:
            self.answered = False

    async def room(self) -> None:
        """Wait until more may be written, or the client is gone."""
        if self.writable or self.gone:
            return
        event = asyncio.Event()
        self.watch(event)
        try:
            while not self.writable and not self.gone:
                await event.wait()
                event.clear()
        finally:
            self.unwatch(event)

    def believe(self) -> None:
        """The client asks for something again elsewhere and has not closed this connection: it has its answer."""
        self._believed = True
        self._wake()

    def answers(self) -> bool:
        """False when the client's kernel owes an acknowledgement for longer than a lease: its host is gone.

        Not left to TCP_USER_TIMEOUT: that also ends the connection of a client that merely reads slowly.
        """
        if self.gone or self.transport is None or self.transport.is_closing():
            return True
        sock = self.transport.get_extra_info("socket")
        return not is_silent(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), self._lease)

    def _end(self) -> None:
        if not self.gone:
            self._left = self.unacknowledged()
            self.gone = True
            self._wake()

    def _wake(self) -> None:
        for event in self._watchers:
            event.set()


def is_silent(tcp_info: bytes, limit: float) -> bool:
    """True if a peer has left data or probes unanswered for *limit* seconds.

    A peer whose window is closed answers each probe, but these come as rarely as every two minutes: so a single
    one without an answer yet says nothing.
    """
    retransmits: int = tcp_info[2]
    probes: int = tcp_info[3]
    last_ack_received: int = struct.unpack_from("I", tcp_info, 8 + 12 * 4)[0]  # ms
    return (retransmits > 0 or probes > 1) and last_ack_received > limit * 1000


async def listen(
    server: web.Server, host: str, port: int, doors: set[Door], lease: float, open_tls: OpenTls
) -> asyncio.Server:
    """Open the port. Raises OSError when it is taken."""
    loop = asyncio.get_running_loop()

    def door() -> Door:
        return Door(server, doors, lease, open_tls)

    return await loop.create_server(door, host, port, reuse_address=True, backlog=1024)


def door_of(request: web.BaseRequest) -> Door | None:
    """The door that *request* came through; None when its client is gone already."""
    transport = request.transport
    if transport is None:
        return None
    door = transport.get_protocol()
    assert isinstance(door, Door)
    return door
