"""Sending a request until an answer is here, or it is known why none is.

Sends again only where ``proxy.aftermath`` allows it, and only as long as no client has had anything of an answer.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from proxy.aftermath import Failure, Then, after, pause
from proxy.incoming import Incoming, Source
from proxy.mcp import Call
from proxy.message import Request
from proxy.profiles import Rule
from proxy.refusals import Refusal
from proxy.upstream import Cut, Interrupted, NotSent, Silent, Withheld
from runtime.journal import Journal
from runtime.settings import Settings
from runtime.step import Effect

log = logging.getLogger("twiceshy.exchange")

#: Why no whole answer is here.
Failed = tuple[Failure, str]
#: How many characters of an error's words are passed on: they may quote all that an upstream sent.
_WORDS_MAX = 300


class Sender(Protocol):
    """Who has a request answered: ``proxy.upstream.Upstream``, or ``proxy.inner.Inner`` in its place.

    ``limit``: seconds for all of it, None for as long as it takes.
    """

    @property
    def limit(self) -> float | None: ...

    async def send(
        self, run: str, request: Request, *, fresh: bool, last_word: Callable[[], None] | None = None
    ) -> Source: ...


class Conversation:
    """With the upstream of one step, or of a request that is only forwarded (*kept* False)."""

    def __init__(
        self, journal: Journal, upstream: Sender, settings: Settings, run_id: str, rule: Rule, effect: Effect,
        *, call: Call | None, kept: bool,
    ) -> None:  # fmt: skip
        self.sent = False
        self.heard = False  # a client was given part of this sending's answer
        self.over = False  # what it brought is about to be recorded
        self._journal = journal
        self._upstream = upstream
        self._settings = settings
        self._run_id = run_id
        self._rule = rule
        self._effect = effect
        self._call = call  # that an answer must respond to, in MCP
        self._kept = kept
        self.answer = self._nothing_yet()

    async def hold(
        self, request: Request, tell: Callable[[], None], stopped: Callable[[], bool], last_word: Callable[[], None]
    ) -> Failed | None:
        """Send *request*, *tell* of what comes; again, unless *stopped*. None: an answer is whole.

        *last_word* may raise Withheld before a first byte. Raises that, and Denied, when nothing was sent at all.
        """
        limit = self._upstream.limit
        try:
            async with asyncio.timeout(limit):
                return await self._until_answered(request, tell, stopped, last_word)
        except TimeoutError:
            return Failure.SILENT, f"the exchange took longer than {limit} s (exchange_timeout)"
        finally:
            self.over = True

    async def _until_answered(
        self, request: Request, tell: Callable[[], None], stopped: Callable[[], bool], last_word: Callable[[], None]
    ) -> Failed | None:
        tries = 0
        lost = ""  # what became of an earlier sending whose bytes may have arrived
        while True:
            tries += 1
            try:
                failed = await self._send(request, tell, last_word)
            except Withheld as error:
                if not lost:
                    raise
                return Failure.INTERRUPTED, f"{_words(error)}; before that: {lost}"
            if failed is None:
                return None
            if failed[0] is Failure.NOT_SENT and lost:
                failed = Failure.INTERRUPTED, f"{failed[1]}; before that: {lost}"
            elif failed[0] is not Failure.NOT_SENT:
                lost = failed[1]
            left = 0 if stopped() else self._settings.resend + 1 - tries
            if self.after(failed[0], left) is not Then.SEND_AGAIN:
                return failed
            log.info("run %s %s: %s (%s), sending again", self._run_id, request.authority, *failed)
            await self.start_over()
            await asyncio.sleep(pause(tries))

    async def _send(self, request: Request, tell: Callable[[], None], last_word: Callable[[], None]) -> Failed | None:
        answering: Source | None = None
        self.sent = True
        try:
            # Who named no run shares a connection with nobody.
            fresh = self._effect is Effect.AT_MOST_ONCE or not self._run_id
            answering = await self._upstream.send(self._run_id, request, fresh=fresh, last_word=last_word)
            await self.answer.take(answering, request.method, self._rule.ending, self._call, tell)
            return None
        except NotSent as error:
            return Failure.NOT_SENT, _words(error)
        except Interrupted as error:
            return Failure.INTERRUPTED, _words(error)
        except Silent as error:
            return Failure.SILENT, _words(error)
        except Cut as error:
            return Failure.CUT, _words(error)
        finally:
            if answering is not None:
                answering.close()

    def after(self, failure: Failure, left: int) -> Then:
        """What follows *failure* when *left* further sendings are allowed."""
        return after(failure, self._effect, left=left, heard=self.heard, mode=self._settings.mode)

    async def start_over(self, instead: Refusal | None = None) -> None:
        """Forget what came of the last sending, of which no client had anything; *instead*: the answer, of our own."""
        old, self.answer = self.answer, self._nothing_yet()
        await old.abandon()
        old.close()
        if instead is not None:
            self.answer.say(instead)

    def _nothing_yet(self) -> Incoming:
        return Incoming(self._journal, self._settings, self._run_id if self._kept else None)


def _words(error: Exception) -> str:
    """What *error* says, on one line, which an upstream cannot make long."""
    text = str(error)
    return " ".join(text[:_WORDS_MAX].split()) + ("…" if len(text) > _WORDS_MAX else "")
