"""The front door: one port, and an acceptor that looks at the first bytes.

``Door`` stays the transport's protocol for the whole connection, so that it sees every end of it (``proxy.lines``),
and hands bytes on to aiohttp's server protocol; or, where they are not read as requests, to whoever passes them on.
"""

import asyncio
import logging
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from proxy import wire
from proxy.hello import Hello, read_hello
from proxy.identity import Tunnel, connect
from proxy.lines import Line
from proxy.peers import Process
from proxy.refusals import Refusal

log = logging.getLogger("twiceshy.door")

HEAD_LIMIT = 64 << 10
HEADERS_LIMIT = 1000
_HIGH_WATER = 64 << 10
#: How many characters of the words about a request that cannot be read are said: they may quote all of it.
_QUOTED = 300
NO_TUNNEL_HERE = Refusal(
    "bad-request",
    "A CONNECT inside a tunnel, or behind another request, leads nowhere: give it a connection of its own. "
    "Nothing was sent.",
)
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_TLS_HANDSHAKE = 0x16


class Inside(Protocol):
    """What becomes of tunnels."""

    def begun(self, door: "Door") -> bool:
        """A CONNECT was accepted. True: the door waits until it is told to ``open_after_all`` or ``pass_through``."""

    def open(self, door: "Door", first: bytes, hello: Hello) -> None:
        """Go on with a tunnel whose client begins TLS. *first*: all that came of it, *hello* among it."""


@dataclass(frozen=True, slots=True)
class House:
    """What all doors share. ``lease``: seconds."""

    server: web.Server
    doors: "set[Door]"
    lease: float
    inside: Inside


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


class Door(Line, asyncio.Protocol):
    """One client connection."""

    def __init__(self, house: House, tunnel: Tunnel | None = None) -> None:
        super().__init__()
        self._house = house
        self.tunnel = tunnel  # what CONNECT said
        self._inner: RequestHandler | None = None
        self._first = bytearray()
        self._waits = False  # nobody knows yet whether this tunnel is opened
        self._past: asyncio.StreamReader | None = None  # takes what the client sends, past aiohttp
        self._half_closed = False  # of such a client: it has said all, and may still listen
        self.on_unused: Callable[[], None] | None = None  # called when a tunnel's TLS ends and nothing ever came
        self.peer: tuple[str, int] | None = None
        self.local: tuple[str, int] | None = None
        self.process: Process | None = None  # of a client that named no token, when it could be read

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._house.doors.add(self)
        transport.set_write_buffer_limits(high=_HIGH_WATER)
        sock = transport.get_extra_info("socket")
        # A number of its own: the loop closes a TLS connection's socket before it says so here, and what was left
        # unacknowledged must still be asked for. The connection ends when this one is closed, too.
        self._fd = sock.fileno() if self._under is None else os.dup(sock.fileno())
        self.peer = transport.get_extra_info("peername")[:2]
        self.local = transport.get_extra_info("sockname")[:2]
        # A client counts as attached only while its socket answers: see ``answers`` for one that has data to take.
        third = max(1, int(self._house.lease / 3))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, third)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, third)
        # A dead host is known after one lease, so that its run may be taken over after two.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        self._begin()

    def data_received(self, data: bytes) -> None:
        self._received += 1
        if self._past is not None:
            self._past.feed_data(data)
            return
        if self._inner is not None:
            self._inner.data_received(data)
            self._wake()
            return
        self._first += data
        # Inside a tunnel's TLS a request may come before the loop has said that the connection is made.
        if self.transport is None:
            return
        if not self._waits:
            self._begin()
        elif len(self._first) > HEAD_LIMIT:
            self.transport.pause_reading()

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
            self._waits = self._house.inside.begun(self)
            if not self._waits:
                self._begin()
            return
        if self.tunnel is not None and self._under is None and self._first[0] == _TLS_HANDSHAKE:
            hello = read_hello(bytes(self._first))
            if hello is not None:
                self.transport.pause_reading()
                self._house.inside.open(self, bytes(self._first), hello)
            return
        if self.tunnel is not None and self._under is None:
            self.tunnel = replace(self.tunnel, target=replace(self.tunnel.target, scheme="http"))
        self._inner = _Inner(
            self._house.server,
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
        self._house.doors.discard(self)
        inner = Door(self._house, self.tunnel)
        inner._under = self.transport
        return inner

    def open_after_all(self) -> None:
        """This tunnel is not passed through: what its client says is read as in any other one."""
        assert self.transport is not None
        self._waits = False
        if self._half_closed:
            self.abort()
        elif not self.gone:
            self.transport.resume_reading()
            self._begin()

    def pass_through(self, ahead: bytes = b"") -> asyncio.StreamReader:
        """From now on what the client sends comes out here, and is not read as requests. *ahead*: what came before.

        Its end is passed on with ``end``. Once it is read from here the client may be half closed and not ``gone``.
        """
        assert self.transport is not None
        self._waits = False
        self._past = asyncio.StreamReader(_HIGH_WATER)
        self._past.set_transport(self.transport)
        self.transport.resume_reading()
        self._past.feed_data(bytes(self._first) + ahead)
        self._first.clear()
        if self._half_closed or self.gone:
            self._past.feed_eof()
        return self._past

    def eof_received(self) -> bool | None:
        if self._past is not None or self._waits:
            self._half_closed = True
            if self._past is not None:
                self._past.feed_eof()
            self._wake()
            return self._under is None  # TLS has no halves that could be closed
        self.look()  # a reset may have followed
        self._end()
        if self._inner is not None:
            self._inner.eof_received()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._house.doors.discard(self)
        if isinstance(exc, OSError):
            self._was_reset()
        self.look()
        self.on_reset = None
        self._end()
        if self._under is not None and self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        on_unused, self.on_unused = self.on_unused, None
        if self._received == 0 and on_unused is not None:
            on_unused()
        if self._past is not None and exc is not None:
            self._past.set_exception(exc)
        elif self._past is not None:
            self._past.feed_eof()
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._paused = True
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._paused = False
        if self._inner is not None:
            self._inner.resume_writing()
        self._wake()

    # ---- what never became a request

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

    def answers(self) -> bool:
        """False when the client's kernel owes an acknowledgement for longer than a lease: its host is gone.

        Not left to TCP_USER_TIMEOUT: that also ends the connection of a client that merely reads slowly.
        """
        if self.gone or self.transport is None or self.transport.is_closing():
            return True
        if self._half_closed and self._is_dead():
            return False
        sock = self.transport.get_extra_info("socket")
        return not is_silent(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), self._house.lease)

    def _is_dead(self) -> bool:
        """Both halves are over. The loop does not look at a socket of which one half is."""
        poll = select.poll()
        poll.register(self._fd, 0)
        return any(bits & (select.POLLHUP | select.POLLERR) for _, bits in poll.poll(0))

    # ---- the end of what is passed through

    def end(self) -> None:
        """Nothing more will be written; what was goes out first."""
        if self.transport is not None and not self.transport.is_closing():
            if self._under is None:
                self._said_all = True
                self.transport.write_eof()
            else:
                self.transport.close()

    async def close(self) -> None:
        """Close the connection and wait until all that was written has gone out."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()
        await self.left()

    async def left(self) -> None:
        """Wait until the client is gone."""
        await self._until(lambda: self.gone)

    async def ended(self) -> None:
        """Wait until the client has said all, or is gone."""
        await self._until(lambda: self.gone or self._half_closed)


def is_silent(tcp_info: bytes, limit: float) -> bool:
    """True if a peer has left data or probes unanswered for *limit* seconds.

    A peer whose window is closed answers each probe, but these come as rarely as every two minutes: so a single
    one without an answer yet says nothing.
    """
    retransmits: int = tcp_info[2]
    probes: int = tcp_info[3]
    last_ack_received: int = struct.unpack_from("I", tcp_info, 8 + 12 * 4)[0]  # ms
    return (retransmits > 0 or probes > 1) and last_ack_received > limit * 1000


async def listen(house: House, host: str, port: int) -> asyncio.Server:
    """Open the port. Raises OSError when it is taken."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: Door(house), host, port, reuse_address=True, backlog=1024)


def door_of(request: web.BaseRequest) -> Door | None:
    """The door that *request* came through; None when its client is gone already."""
    transport = request.transport
    if transport is None:
        return None
    door = transport.get_protocol()
    assert isinstance(door, Door)
    return door
