"""One exchange: intent → upstream → record, in a task of its own that outlives the client.

A slow or gone client never stalls the record. What clients may have is ``released``: everything but the end
signal (the last byte under Content-Length, the terminal event of a known dialect, the head where there is no
body; a final chunk is ``proxy.relay``'s), which is held back until the record is committed. So an agent never
acts on an end that a crash could take away.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Protocol
from uuid import UUID, uuid4

from proxy import streams, wire
from proxy.aftermath import Failure, Then, after, pause
from proxy.message import Headers, Request
from proxy.profiles import Rule
from proxy.refusals import Refusal
from proxy.spool import Spool
from proxy.tape import Step, Tape
from proxy.upstream import Answering, Cut, Denied, Interrupted, NotSent, Silent, Upstream
from runtime.entries import (
    Answer,
    AnswerFacts,
    AnswerRow,
    Begun,
    Conflict,
    Fence,
    Fenced,
    Intent,
    Outcome,
    PutBack,
    Read,
    Recorded,
    Stop,
    Stopped,
)
from runtime.errors import DatabaseAway
from runtime.journal import Journal
from runtime.settings import Settings
from runtime.step import Effect, Finality, RunStatus, State, finality

log = logging.getLogger("twiceshy.exchange")
PART = 1 << 20


class Ending(Enum):
    WHOLE = "whole"  # recorded: the end may go out
    CUT = "cut"  # recorded as cut: what came goes out, then the connection is cut
    LOST = "lost"  # no answer of the run: clients are cut
    REFUSED = "refused"  # ``refusal`` says why


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    reason: bytes
    headers: Headers


@dataclass(frozen=True, slots=True)
class Shell:
    """What every exchange of a sidecar needs."""

    journal: Journal
    upstream: Upstream
    settings: Settings
    #: True while the sidecar may be believed alive by others: checked before the first byte.
    alive: Callable[[], bool]


class Owner(Protocol):
    """The run that an exchange belongs to, as the sidecar knows it."""

    run_id: str
    fence: Fence
    tape: Tape
    outdated: bool

    def refuse(self, refusal: Refusal) -> None: ...
    def outcome_refusal(self, outcome: Fenced | Stopped) -> Refusal: ...
    def settled(self, exchange: "Exchange", row: AnswerRow | None, state: State | None) -> None: ...


class Exchange:
    """The sidecar's conversation with the upstream for one step. ``journalled`` False: forwarded only."""

    def __init__(
        self, shell: Shell, owner: Owner | None, run_id: str, request: Request, rule: Rule, step: Step | None,
        *, place: int = 0, replaces: UUID | None = None, journalled: bool = True,
        recall: Callable[[], Awaitable[Request]] | None = None,
    ) -> None:  # fmt: skip
        self.id = uuid4()
        self.request = request
        self.step = step
        self.rule = rule
        self.effect = step.effect if step is not None else Effect.PASSTHROUGH
        self.place = place
        self.run_id = run_id
        self.head: Head | None = None
        self.spool = Spool(shell.settings.memory_body)
        self.released = 0
        self.whole = False  # the upstream's answer is here whole, its record may be pending
        self.heard = False  # a client was given part of this sending's answer
        self.delivered = 0  # bytes of the body that a client's kernel acknowledged
        self.ending: Ending | None = None
        self.refusal: Refusal | None = None
        self.row: AnswerRow | None = None
        self.clients = 0
        self.attempt = owner.tape.attempt if owner is not None else 0
        self.first_byte_counter = -1  # counter of the run's steps when a read's first byte was delivered
        self._shell = shell
        self._owner = owner
        self._fence = owner.fence if owner is not None else None
        self._replaces = replaces
        self._recall = recall  # brings the request that went first, which goes again in place of this one
        self._journalled = journalled and owner is not None
        self._watchers: set[asyncio.Event] = set()
        self._body_id: UUID | None = None
        self._parts = 0
        self._settled = False
        self._task: asyncio.Task[None] | None = None

    # ---- clients

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"exchange {self.id}")

    def watch(self, event: asyncio.Event) -> None:
        self._watchers.add(event)

    def unwatch(self, event: asyncio.Event) -> None:
        self._watchers.discard(event)

    def owned_by(self, owner: Owner) -> None:
        """A new attempt of the run began: what this exchange learns goes onto its tape."""
        self._owner = owner
        if self.effect is not Effect.READ:
            self._fence = owner.fence

    def client_left(self) -> None:
        """A client is gone. A read is cancelled with its last one; everything else is drained."""
        alone = self.effect in (Effect.READ, Effect.PASSTHROUGH) and self.clients == 0
        if alone and self.ending is None and not self.whole and self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Give up without a record: the sidecar ends. What was sent stays *sent*."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def note_first_byte(self) -> None:
        if self.first_byte_counter < 0 and self._owner is not None:
            self.first_byte_counter = self._owner.tape.last_begun

    def _pulse(self) -> None:
        for event in self._watchers:
            event.set()

    # ---- the task

    async def _run(self) -> None:
        row: AnswerRow | None = None
        state: State | None = None
        try:
            async with asyncio.timeout(self._shell.settings.exchange_timeout):
                row, state = await self._go()
        except TimeoutError:
            limit = f"{self._shell.settings.exchange_timeout:g} s (exchange_timeout)"
            row, state = await self._failed(Failure.SILENT, f"the exchange took longer than {limit}")
        except asyncio.CancelledError:
            self._end(Ending.LOST)
            if self.effect is Effect.READ and self._delivered_before_a_step():
                row, state = await asyncio.shield(self._keep_cut_read())
        except DatabaseAway as error:
            self._refuse(Refusal("database-away", f"{error} Nothing was sent.", self.run_id, self._key()))
        except Exception as error:
            log.exception("exchange of run %s step %s failed", self.run_id, self._key())
            self._refuse(Refusal("internal", f"twiceshy failed: {error!r}", self.run_id, self._key()))
        finally:
            self._settle(row, state)
            self._pulse()

    async def _go(self) -> tuple[AnswerRow | None, State | None]:
        if self._journalled and self.effect is not Effect.READ and not await self._intend():
            return None, None
        if self._recall is not None:
            self.request = await self._recall()
        tries = 0
        while True:
            tries += 1
            answering: Answering | None = None
            try:
                answering = await self._shell.upstream.send(
                    self.run_id, self.request, fresh=self.effect is Effect.AT_MOST_ONCE
                )
                await self._receive(answering)
            except NotSent as error:
                failure, words = Failure.NOT_SENT, str(error)
            except Denied as error:
                await self._put_back()
                self._refuse(Refusal("denied", f"{error}. Nothing was sent.", self.run_id, self._key()))
                return None, None
            except Interrupted as error:
                failure, words = Failure.INTERRUPTED, str(error)
            except Silent as error:
                failure, words = Failure.SILENT, str(error)
            except Cut as error:
                failure, words = Failure.CUT, str(error)
            else:
                return await self._record_whole()
            finally:
                if answering is not None:
                    answering.close()
            left = self._shell.settings.resend + 1 - tries
            if self._after(failure, left) is Then.SEND_AGAIN:
                log.info("run %s step %s: %s (%s), sending again", self.run_id, self._key(), failure, words)
                self._forget()
                await asyncio.sleep(pause(tries))
                continue
            return await self._failed(failure, words)

    def _key(self) -> str | None:
        return self.step.key if self.step is not None else None

    def _after(self, failure: Failure, left: int) -> Then:
        return after(failure, self.effect, left=left, heard=self.heard, mode=self._shell.settings.mode)

    async def _intend(self) -> bool:
        """Write the intent. False: it was refused, and nothing may be sent."""
        assert self.step is not None and self._owner is not None and self._fence is not None
        outcome = await self._shell.journal.write(
            Intent(self._fence, self.step.facts, self.id, self.place, self._replaces)
        )
        if not isinstance(outcome, Begun):
            self._refused_by(outcome)
            return False
        if not self._shell.alive():
            await self._put_back()
            text = "The sidecar has not reached its database for too long to be sure that it is believed alive."
            self._refuse(Refusal("database-away", f"{text} Nothing was sent.", self.run_id, self._key()))
            return False
        self._owner.tape.began(self.step, outcome.begun)
        self.step.first_sent_at = self.step.first_sent_at or _seconds(outcome.first_sent_at)
        self.step.state = State.SENT
        self.step.exchange = self.id
        return True

    async def _receive(self, answering: Answering) -> None:
        """Take the answer in. Raises Cut or Silent when it does not come whole."""
        headers = wire.upstream_headers(answering.headers, answering.status)
        self.head = Head(answering.status, answering.reason, headers)
        bodyless = wire.framing(self.request.method, answering.status, headers, http10=False) is wire.Framing.NONE
        length = None if bodyless else wire.content_length(headers)
        fields = {name.lower(): value for name, value in headers}
        hold = streams.Hold(
            self.rule.dialect if answering.status < 300 else None,
            fields.get(b"content-type", b""),
            fields.get(b"content-encoding"),
        )
        self._pulse()
        async for data in answering.pieces():
            self.spool.append(data)
            allowed = hold.feed(data)
            self.released = allowed if length is None else min(allowed, length - 1)
            self._pulse()
            if self._journalled and self.spool.size - self._parts * PART >= 2 * PART:
                await self._put_parts(whole=False)
        if length is not None and self.spool.size < length:
            raise Cut(f"{self.spool.size} of {length} bytes came")
        if hold.strict and not hold.close():
            raise Cut("the stream ended without its end marker")
        self.whole = True

    def _forget(self) -> None:
        """Before sending again: what came of the last sending, of which no client had anything."""
        self.spool.close()
        self.spool = Spool(self._shell.settings.memory_body)
        self.head = None
        self.released = 0
        self._body_id, self._parts = None, 0

    # ---- the record

    async def _put_parts(self, *, whole: bool) -> None:
        self._body_id = self._body_id or uuid4()
        while self.spool.size - self._parts * PART >= (1 if whole else PART):
            data = self.spool.read(self._parts * PART, PART)
            await self._shell.journal.put_part(self.run_id, self._body_id, self._parts, data)
            self._parts += 1

    async def _record_whole(self) -> tuple[AnswerRow | None, State | None]:
        assert self.head is not None
        if not self._journalled:
            return self._finish(Ending.WHOLE, None, None)
        rule = self.rule
        settles = finality(
            self.effect,
            self.head.status,
            stores_errors=rule.stores_errors,
            in_flight=rule.in_flight,
            not_processed=rule.not_processed,
        )
        return await self._record(settles, whole=True, ending=Ending.WHOLE)

    async def _record(
        self, settles: Finality, *, whole: bool, ending: Ending, own: bool = False, state: State = State.ANSWERED
    ) -> tuple[AnswerRow | None, State | None]:
        assert self.head is not None
        body: bytes | None = None
        if self.spool.in_memory:
            body = self.spool.read(0, self.spool.size)
        else:
            await self._put_parts(whole=True)
        tokens = 0
        if self.rule.dialect is not None and body is not None and not own:
            kind = next((v for n, v in self.head.headers if n.lower() == b"content-type"), b"")
            tokens = streams.usage(self.rule.dialect, kind, body)
        facts = AnswerFacts(
            self.head.status, self.head.reason, self.head.headers, body, self._body_id, self.spool.size, whole,
            settles, own, tokens,
        )  # fmt: skip
        outcome = await self._shell.journal.write(self._entry(facts, state))
        if isinstance(outcome, Recorded):
            # The index keeps small bodies only; a larger one is fetched when it is replayed.
            kept = facts
            if body is not None and len(body) > self._shell.settings.index_body:
                kept = AnswerFacts(
                    facts.status, facts.reason, facts.headers, None, None, facts.size, whole, settles, own, tokens
                )
            row = AnswerRow(self.place, outcome.recorded, self.attempt, kept)
            return self._finish(ending, row, state)
        self._refused_by(outcome)
        return None, None

    def _entry(self, facts: AnswerFacts, state: State) -> Answer | Read:
        assert self.step is not None
        if self.effect is Effect.READ:
            assert self._fence is not None
            return Read(self._fence, self.step.facts, self.id, facts, self.place, self.attempt)
        return Answer(self.run_id, self.step.key, self.id, self.attempt, facts, state)

    def _finish(
        self, ending: Ending, row: AnswerRow | None, state: State | None
    ) -> tuple[AnswerRow | None, State | None]:
        self.row = row
        self.released = self.spool.size
        # Before clients hear the end: their next request may come at once and must find this answer.
        self._settle(row, state)
        self._end(ending)
        return row, state

    def _settle(self, row: AnswerRow | None, state: State | None) -> None:
        if self._owner is not None and not self._settled:
            self._settled = True
            self._owner.settled(self, row, state)

    def _delivered_before_a_step(self) -> bool:
        if not self._journalled or self._owner is None or self.head is None or self.first_byte_counter < 0:
            return False
        return self._owner.tape.last_begun > self.first_byte_counter

    async def _keep_cut_read(self) -> tuple[AnswerRow | None, State | None]:
        """A read was broken off by its client after a step was begun on what it had read: that much is kept."""
        kept = Spool(self._shell.settings.memory_body)
        for offset in range(0, self.delivered, PART):
            kept.append(self.spool.read(offset, min(PART, self.delivered - offset)))
        self.spool, self._body_id, self._parts = kept, None, 0
        return await self._record(Finality.FINAL, whole=False, ending=Ending.LOST)

    # ---- failures

    async def _failed(self, failure: Failure, words: str) -> tuple[AnswerRow | None, State | None]:
        then = self._after(failure, 0)
        if then is Then.AMBIGUOUS and self._journalled:
            await self._stop_ambiguous(failure, words)
            return None, None
        if then is Then.CUT_ANSWER:
            if not self._journalled:
                return self._finish(Ending.CUT, None, None)
            return await self._record(Finality.PROVISIONAL, whole=False, ending=Ending.CUT)
        code = "upstream-timeout" if failure is Failure.SILENT else "upstream"
        sent = "Nothing was sent." if failure is Failure.NOT_SENT else "The request was sent."
        refusal = Refusal(code, f"{self.request.authority}: {words}. {sent}", self.run_id or None, self._key())
        self._forget()
        body = refusal.body()
        length = (b"Content-Length", b"%d" % len(body))
        self.head = Head(refusal.status, refusal.reason, (*refusal.headers(), length))
        self.spool.append(body)
        self.whole = True
        if not self._journalled:
            return self._finish(Ending.WHOLE, None, None)
        state = State.NOT_SENT if failure is Failure.NOT_SENT and self.effect is not Effect.READ else State.ANSWERED
        return await self._record(Finality.PROVISIONAL, whole=True, ending=Ending.WHOLE, own=True, state=state)

    async def _stop_ambiguous(self, failure: Failure, words: str) -> None:
        assert self.step is not None and self._owner is not None and self._fence is not None
        request = self.request
        came = f"; {self.spool.size} bytes of an answer with status {self.head.status} came" if self.head else ""
        message = ambiguous_message(self.run_id, self.step, f"{request.authority}: {words}{came}")
        outcome = await self._shell.journal.write(
            Stop(self._fence, RunStatus.AMBIGUOUS, self.step.key, message, self.id, f"{failure}: {words}{came}")
        )
        if isinstance(outcome, Recorded):
            self.step.state = State.AMBIGUOUS
            refusal = Refusal("ambiguous", message, self.run_id, self.step.key)
            self._owner.refuse(refusal)
            self._refuse(refusal)
        else:
            self._refused_by(outcome)

    async def _put_back(self) -> None:
        if self._journalled and self.effect is not Effect.READ and self.step is not None:
            await self._shell.journal.write(PutBack(self.run_id, self.step.key, self.id))
            self.step.state, self.step.exchange = State.NOT_SENT, None

    def _refused_by(self, outcome: Outcome) -> None:
        """The journal did not take an entry: say so to clients that had nothing, cut the others."""
        if isinstance(outcome, Fenced | Stopped) and self._owner is not None:
            refusal = self._owner.outcome_refusal(outcome)
            self._owner.refuse(refusal)
            self._refuse(refusal)
            return
        assert isinstance(outcome, Conflict)
        log.warning("run %s step %s: the journal names another exchange", self.run_id, self._key())
        if self._owner is not None:
            self._owner.outdated = True
        self._end(Ending.LOST)

    def _refuse(self, refusal: Refusal) -> None:
        self.refusal = refusal
        self._end(Ending.REFUSED)

    def _end(self, ending: Ending) -> None:
        self.ending = self.ending or ending
        self._pulse()


def ambiguous_message(run_id: str, step: Step, what: str) -> str:
    """The words of an ambiguous stop."""
    return (
        f"Run {run_id} is stopped: nobody can say whether step {step.key} ({step.facts.method} {step.facts.url}) "
        f"was done ({what}), and it must not be done twice. Look it up there, then: "
        f"twiceshy resolve {run_id} {step.key} assume_done, or send_again."
    )


def _seconds(moment: datetime) -> float:
    return moment.timestamp()
