"""Two connections as one: what a client sends goes upstream as it comes, and back; nothing of it is journalled.

Tunnels that are not opened and WebSockets pass so. Each direction takes in no more than the other end lets go, and
the end of one is passed on while the other goes on. What a client sends leaves only while its attempt is current;
a fenced or stopped one is cut at once, as is a passage in which nothing moves for ``tunnel_timeout``.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Self, TypeAlias

from proxy.attempts import Attempts
from proxy.doors import Door
from proxy.identity import Target
from proxy.lines import cut
from proxy.run import Run
from proxy.upstream import PIECE
from runtime.errors import DatabaseAway
from runtime.settings import Settings

log = logging.getLogger("twiceshy.passage")

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


class Passage:
    """One client's way through. ``kind``: tunnel or WebSocket. While it is open, its run's client is attached.

    ``with`` ends the upstream's connection; the client's is ended by ``carry``.
    """

    def __init__(
        self, attempts: Attempts, settings: Settings, run: Run | None, target: Target, kind: str, door: Door,
        upstream: Writer,
    ) -> None:  # fmt: skip
        self._attempts = attempts
        self._limit = settings.tunnel_timeout
        self._run = run
        self._target = target
        self._kind = kind
        self._door = door
        self._upstream = upstream
        self._clock: asyncio.Timeout | None = None

    def __enter__(self) -> Self:
        if self._run is not None:
            self._run.passing.add(self)
            if self._run.refusal is not None:  # it was stopped while the upstream was reached
                self.cut()
        return self

    def __exit__(self, *_: object) -> None:
        cut(self._upstream.transport, reset=True)
        if self._run is not None:
            self._run.passing.discard(self)
            self._run.idle_since = time.monotonic()

    def cut(self) -> None:
        """End both connections at once, by a reset where that can be."""
        self._door.abort(reset=True)
        cut(self._upstream.transport, reset=True)

    async def may_go(self) -> bool:
        """Whether what the client sends may leave: its attempt is known to be current. Else the passage is cut."""
        run = self._run
        if run is None or (run.refusal is None and time.monotonic() <= run.trusted_until):
            return True
        try:
            if await self._attempts.trusted(run) is run:
                return True
        except DatabaseAway as error:
            self._say(f"a {self._kind} was ended, for nobody could say whether its attempt is current: {error}")
        self.cut()
        return False

    async def carry(self, client: Reader, answers: Reader) -> None:
        """Pass on what *client* sends and what the upstream *answers*, to the end of both connections."""
        if self._run is not None:
            self._run.count(self._target, self._kind)
        try:
            async with asyncio.timeout(self._limit) as self._clock:
                answering = asyncio.ensure_future(
                    self._pump(answers, self._door.write, self._door.room, self._door.end, None)
                )
                leaving = asyncio.ensure_future(self._leave(answering))
                try:
                    await self._pump(
                        client, self._upstream.write, self._upstream.drain, self._end_upstream, self.may_go
                    )
                    await asyncio.wait({answering})
                finally:
                    answering.cancel()
                    leaving.cancel()
                if not self._upstream.is_closing():  # a TLS transport that is closed twice cannot be aborted any more
                    self._upstream.close()
                await asyncio.gather(self._upstream.wait_closed(), self._door.close())
        except TimeoutError:
            self._say(f"a {self._kind} in which nothing moved for {self._limit:g} s was ended (tunnel_timeout)")
        except OSError:
            pass  # an end is gone
        finally:
            self.cut()

    async def leave_with_client(self) -> None:
        """Wait until the client has said all, or is gone, and cut the upstream then."""
        await self._door.ended()
        cut(self._upstream.transport, reset=True)

    async def _leave(self, answering: asyncio.Future[None]) -> None:
        """When the client is gone there is nobody to hear the answers; what it said before goes on its way."""
        await self._door.left()
        if self._door.reset:
            self.cut()
        answering.cancel()

    async def _pump(
        self, source: Reader, write: Callable[[bytes], None], room: Callable[[], Awaitable[None]],
        end: Callable[[], None], may_go: Callable[[], Awaitable[bool]] | None,
    ) -> None:  # fmt: skip
        try:
            while data := await source.read(PIECE):
                if may_go is not None and not await may_go():
                    return
                self._moved()
                write(data)
                await room()
        except OSError:
            self.cut()
            return
        end()

    def _moved(self) -> None:
        assert self._clock is not None
        if self._run is not None:
            self._run.idle_since = time.monotonic()
        if not self._clock.expired():
            self._clock.reschedule(asyncio.get_running_loop().time() + self._limit)

    def _end_upstream(self) -> None:
        if self._upstream.can_write_eof():
            self._upstream.write_eof()
        else:
            self._upstream.close()

    def _say(self, what: str) -> None:
        words = f"{self._target.shown}: {what}"
        log.warning("run %s: %s", self._run.run_id if self._run is not None else "?", words)
        if self._run is not None:
            self._run.note(words)
