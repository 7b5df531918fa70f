"""One client connection: what is written to it, and what can be known of who is at its other end.

``send()`` to a client that has already closed its end returns success, so a write that went through says nothing
about delivery: how much of an answer the client's kernel has acknowledged does, and whether a FIN or a reset came.
"""

import asyncio
import fcntl
import select
import socket
import struct
import termios
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
#: Polling for acknowledgement: seconds, doubled up to the last.
_POLL_FIRST, _POLL_LAST = 0.001, 0.1


def cut(transport: asyncio.WriteTransport, *, reset: bool) -> None:
    """End a connection at once. *reset*: so that the plain end of it is not what the other end sees."""
    if reset and not transport.is_closing():
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class Unheard(Exception):
    """The client has gone while its answer was still to be found."""


class Line:
    """A client's connection, as far as it is written to. ``proxy.doors`` makes it a protocol, and tells of events."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.gone = False  # FIN, reset, or aborted by us
        self.reset = False
        self.on_reset: Callable[[], None] | None = None  # called once when it is seen that the client reset it
        self.written = 0  # bytes, over all answers
        self.answered = False  # the end of the answer under way is written, its acknowledgement is awaited
        self._under: asyncio.Transport | None = None  # the connection that carries the TLS of this one
        self._paused = False
        self._watchers: set[asyncio.Event] = set()
        self._received = 0
        self._believed = False
        self._said_all = False  # our half of the connection was ended
        self._left = 0  # bytes that were unacknowledged when the client went, or written after that
        self._fd = -1

    # ---- what is written

    @property
    def writable(self) -> bool:
        return not self._paused

    def watch(self, event: asyncio.Event) -> None:
        """Set *event* whenever the client went away, has said all, or can be written to again."""
        self._watchers.add(event)

    def unwatch(self, event: asyncio.Event) -> None:
        self._watchers.discard(event)

    def write(self, data: bytes) -> None:
        if not self.gone and self.transport is not None:
            self.written += len(data)
            self.transport.write(data)
        else:
            self._left += len(data)  # nobody will ever acknowledge it

    def abort(self, *, reset: bool = False) -> None:
        """Cut the connection so that the client sees its answer cut, never as complete.

        *reset*: for a client to whom the connection's plain end is the answer's end.
        """
        self._end()
        if self.transport is not None:
            cut(self._under or self.transport, reset=reset)

    # ---- what is known of the client

    def look(self) -> bool:
        """Peek for a FIN or reset that the loop has not seen, or not told of yet; True if the client is gone."""
        if not self.reset and self._fd >= 0 and self.transport is not None and not (self.gone and self._under):
            poll = select.poll()
            poll.register(self._fd, select.POLLRDHUP)
            for _, bits in poll.poll(0):
                # The loop takes the error when it reads, and tells of it some turns later (inside TLS). Until then
                # both halves are over, which nothing but a reset does while ours is not.
                if bits & select.POLLERR or (bits & select.POLLHUP and not self._said_all):
                    self._was_reset()
                if bits & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
                    self._end()
        return self.gone

    def unacknowledged(self) -> int:
        """How many bytes meant for the client its kernel has not acknowledged, or had not when the client went."""
        if self.gone or self.transport is None:
            return self._left
        try:
            count: int = struct.unpack("i", fcntl.ioctl(self._fd, termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        except OSError:
            count = 0
        under = self._under.get_write_buffer_size() if self._under is not None else 0
        try:
            return count + under + self.transport.get_write_buffer_size()
        except AttributeError:  # asyncio's TLS transport, once it was closed twice: aiohttp closes it whatever we did
            return count + under

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

    async def heard(self, work: Awaitable[T]) -> T:
        """What *work* brings. Where the client goes before that, *work* is cancelled: raises Unheard.

        Who has gone must not seem to be attached for as long as a database takes: its retry would be another step.
        """
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self._until(lambda: self.gone))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Unheard
            return working.result()
        finally:
            working.cancel()
            leaving.cancel()

    async def room(self) -> None:
        """Wait until more may be written, or the client is gone."""
        await self._until(lambda: self.writable or self.gone)

    def believe(self) -> None:
        """The client asks for something again elsewhere and has not closed this connection: it has its answer."""
        self._believed = True
        self._wake()

    def _was_reset(self) -> None:
        """The client closed without having read. Not so where it had ended TLS, and was sent the other half of that."""
        if self.gone and self._under is not None:
            return
        self.reset = True
        on_reset, self.on_reset = self.on_reset, None
        if on_reset is not None:
            on_reset()

    def _end(self) -> None:
        if not self.gone:
            self._left = self.unacknowledged()
            self.gone = True
            self._wake()

    def _wake(self) -> None:
        for event in self._watchers:
            event.set()

    async def _until(self, happened: Callable[[], bool]) -> None:
        """Wait until *happened*, which is asked whenever there is news of the client."""
        event = asyncio.Event()
        self.watch(event)
        try:
            while not happened():
                await event.wait()
                event.clear()
        finally:
            self.unwatch(event)
