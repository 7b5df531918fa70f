"""An answer as it comes from its upstream: the bytes, how far clients may have them, and their way to the journal.

What clients may have is ``released``: everything but the end signal (the last byte under Content-Length, the
terminal event of a known dialect; a final chunk, or a head where there is no body, is ``proxy.relay``'s), which
is held back until the record is committed. So an agent never acts on an end that a crash could take away.

A large body goes through a file, and in pieces to the journal, behind the upstream and never in its way.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID, uuid4

from proxy import dialects, streams, wire
from proxy.mcp import Call
from proxy.message import Headers
from proxy.refusals import Refusal
from proxy.spool import Spool
from proxy.upstream import Cut, Silent
from runtime.entries import AnswerFacts
from runtime.errors import DatabaseAway
from runtime.failpoints import reach
from runtime.journal import Journal
from runtime.settings import Settings
from runtime.step import Finality

log = logging.getLogger("twiceshy.exchange")
PART = 1 << 20
#: Before a piece is offered again to a database that is away.
_PAUSE = 1.0


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    reason: bytes
    headers: Headers

    def header(self, name: bytes) -> bytes | None:
        """The value of the last header *name* (lower case), or None."""
        return next((value for key, value in reversed(self.headers) if key.lower() == name), None)


class Source(Protocol):
    """Where an answer comes from, as ``proxy.upstream.Answering`` has it."""

    status: int
    reason: bytes
    headers: Headers

    def pieces(self) -> AsyncIterator[bytes]: ...
    def said_all(self) -> None: ...
    def close(self) -> None: ...


class Incoming:
    """One answer of an upstream, or one of our own. ``run_id`` None: it is passed on and not kept."""

    def __init__(self, journal: Journal, settings: Settings, run_id: str | None) -> None:
        self.head: Head | None = None
        self.spool = Spool(settings.memory_body)
        self.released = 0
        self.whole = False  # it is here whole, its record may be pending
        self.own = False  # it is one of our own
        self.failed = False  # whole as it is, it tells of an error in place of what was asked for
        self._journal = journal
        self._run_id = run_id
        self._body_id: UUID | None = None
        self._parts = 0
        self._saving: asyncio.Task[None] | None = None

    async def take(
        self, answering: Source, method: str, ending: str | None, asked: Call | None, tell: Callable[[], None]
    ) -> None:
        """Take the answer in, *tell* of each piece. Raises Cut or Silent when it does not come whole.

        *ending*, *asked*: see ``streams.Hold``.
        """
        head = Head(answering.status, answering.reason, wire.upstream_headers(answering.headers, answering.status))
        bodyless = wire.framing(method, head.status, head.headers, http10=False) is wire.Framing.NONE
        length = None if bodyless else wire.content_length(head.headers)
        hold = streams.Hold(
            ending if head.status < 300 else None,
            head.header(b"content-type") or b"",
            head.header(b"content-encoding"),
            asked,
        )
        self.head = head
        reach("head-received")
        tell()
        try:
            async for data in answering.pieces():
                self.spool.append(data)
                allowed = hold.feed(data)
                self.released = allowed if length is None else min(allowed, length - 1)
                tell()
                self._save_behind()
                reach("half-streamed")
                if hold.ended:
                    reach("marker-seen")
                    answering.said_all()
        except Silent:
            # SDKs read no further than the terminal event, so some servers never end such a stream.
            if not hold.ended or length is not None:
                raise
        if length is not None and self.spool.size < length:
            raise Cut(f"{self.spool.size} of {length} bytes came")
        if hold.strict and not hold.close():
            raise Cut(hold.lacks)
        self.failed = hold.failed
        self.whole = True

    def say(self, refusal: Refusal) -> None:
        """Make *refusal* the answer: one of our own, in place of the upstream's."""
        body = refusal.body()
        length = (b"Content-Length", b"%d" % len(body))
        # Which step it answers is said where it is given, as with any other answer.
        headers = tuple(pair for pair in refusal.headers() if pair[0] != b"Twiceshy-Step")
        self.head = Head(refusal.status, refusal.reason, (*headers, length))
        self.own = True
        self.spool.append(body)
        self.whole = True

    # ---- the record

    async def facts(self, finality: Finality, *, whole: bool, own: bool, dialect: str | None) -> AnswerFacts:
        """What is recorded of it. A large body's pieces are in the journal when this returns."""
        assert self.head is not None
        body: bytes | None = None
        if self.spool.in_memory:
            body = self.spool.read(0, self.spool.size)
        else:
            await self._caught_up()
            await self._save(to_the_end=True)
        tokens = 0
        if dialect is not None and body is not None and not own:
            kind, coding = self.head.header(b"content-type"), self.head.header(b"content-encoding")
            tokens = dialects.usage(dialect, kind or b"", body, coding)
        return AnswerFacts(
            self.head.status, self.head.reason, self.head.headers, body, self._body_id, self.spool.size, whole,
            finality, own, tokens,
        )  # fmt: skip

    async def cut(self, size: int) -> None:
        """Keep the first *size* bytes only."""
        await self.abandon()
        self.spool.cut(size)

    async def abandon(self) -> None:
        """No record names this body: take its pieces out of the journal."""
        body_id, self._body_id = self._body_id, None  # which ends what runs behind
        await self._caught_up()
        self._parts = 0
        if body_id is not None and self._run_id is not None:
            try:
                await self._journal.drop_body(self._run_id, body_id)
            except DatabaseAway as error:
                log.warning("run %s: pieces of body %s stay behind: %s", self._run_id, body_id, error)

    def close(self) -> None:
        """Nobody reads it any more."""
        self.spool.close()

    def _save_behind(self) -> None:
        if self._run_id is None or self.spool.in_memory or self.spool.size - self._parts * PART < 2 * PART:
            return
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save(to_the_end=False))

    async def _caught_up(self) -> None:
        """What runs behind the upstream has ended. A piece that it failed on is tried again, or abandoned."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await asyncio.gather(saving, return_exceptions=True)

    async def _save(self, *, to_the_end: bool) -> None:
        assert self._run_id is not None
        body_id = self._body_id = self._body_id or uuid4()
        while self._body_id is not None and self.spool.size - self._parts * PART >= (1 if to_the_end else PART):
            data = self.spool.read(self._parts * PART, PART)
            try:
                await self._journal.put_part(self._run_id, body_id, self._parts, data)
            except DatabaseAway as error:
                log.warning("run %s: a piece of an answer waits for Postgres: %s", self._run_id, error)
                await asyncio.sleep(_PAUSE)
            else:
                self._parts += 1
