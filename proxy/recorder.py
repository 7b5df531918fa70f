"""One exchange: intent → upstream → record, in a task of its own that outlives the client.

A slow or gone client never stalls the record: the answer is taken in by ``proxy.incoming`` as fast as it comes,
and each client fed from it by its own task (``proxy.relay``).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from uuid import UUID, uuid4

from proxy.aftermath import Failure, Then
from proxy.conversation import Conversation
from proxy.incoming import Incoming
from proxy.inner import Inner
from proxy.mcp import Call
from proxy.message import Request
from proxy.own import Asked
from proxy.owner import Owner
from proxy.profiles import Rule
from proxy.pulse import Pulse
from proxy.refusals import Refusal
from proxy.stops import ambiguous_message
from proxy.tape import Step
from proxy.upstream import Denied, Upstream, Withheld
from proxy.wakes import Wakes
from runtime.entries import (
    Answer,
    AnswerFacts,
    AnswerRow,
    Begun,
    Conflict,
    Entry,
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
from runtime.failpoints import reach
from runtime.journal import Journal
from runtime.settings import Settings
from runtime.step import Effect, Finality, RunStatus, State, finality

log = logging.getLogger("twiceshy.exchange")

#: What an exchange leaves on the tape: its row, and the state of its step.
Result = tuple[AnswerRow | None, State | None]
NOTHING: Result = (None, None)


class Ending(Enum):
    WHOLE = "whole"  # recorded: the end may go out
    CUT = "cut"  # recorded as cut: what came goes out, then the connection is cut
    LOST = "lost"  # no answer of the run: clients are cut
    REFUSED = "refused"  # ``refusal`` says why


@dataclass(frozen=True, slots=True)
class Shell:
    """What every exchange of a sidecar needs."""

    journal: Journal
    upstream: Upstream
    settings: Settings
    pulse: Pulse
    wakes: Wakes


class Exchange:
    """The sidecar's conversation with the upstream for one step. ``owner`` None: forwarded only."""

    def __init__(
        self, shell: Shell, owner: Owner | None, run_id: str, request: Request, rule: Rule, step: Step | None,
        *, place: int = 0, replaces: UUID | None = None, recall: Callable[[], Awaitable[Request]] | None = None,
        call: Call | None = None, asked: Asked | None = None,
    ) -> None:  # fmt: skip
        self.id = uuid4()
        self.began = time.monotonic()
        self.request = request
        self.step = step
        self.rule = rule
        self.effect = step.effect if step is not None else Effect.PASSTHROUGH
        self.place = place
        self.run_id = run_id
        self.delivered = 0  # bytes of the body that a client's kernel acknowledged; counted for reads
        self.ending: Ending | None = None
        self.refusal: Refusal | None = None
        #: What answers in an upstream's place, for a step of the sidecar's own.
        self.inner: Inner | None = None
        if asked is not None and step is not None and owner is not None:
            self.inner = Inner(shell.journal, shell.wakes, asked, step.key, self.id, owner)
        self.call = call  # what the request is called in JSON-RPC
        self.heard: set[str | bytes] = set()  # requests of the server's own, in the answer, that were responded to
        self.row: AnswerRow | None = None
        self.clients = 0
        self.attempt = owner.tape.attempt if owner is not None else 0
        self._shell = shell
        self._owner = owner
        self._asked_under = owner.fence if owner is not None else None  # of the attempt that asked: it alone may begin
        self._fence = self._asked_under  # of the attempt that is served now
        self._replaces = replaces
        self._recall = recall  # brings the request that went first, which goes again in place of this one
        self._journalled = owner is not None
        self._watchers: set[asyncio.Event] = set()
        self._first_byte = -1  # counter of the run's steps when a read's first byte was delivered
        self._keeps_cut = False  # broken off by its client, and kept so
        self._named = False  # a record that was committed, or may be, names the answer's body
        self._settled = False
        self._over = False
        self._task: asyncio.Task[None] | None = None
        self._talk = Conversation(
            shell.journal, self.inner or shell.upstream, shell.settings, run_id, rule, self.effect,
            call=call, kept=self._journalled,
        )  # fmt: skip

    # ---- clients

    @property
    def answer(self) -> Incoming:
        """What has come so far."""
        return self._talk.answer

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"exchange {self.id}")

    def watch(self, event: asyncio.Event) -> None:
        self._watchers.add(event)

    def unwatch(self, event: asyncio.Event) -> None:
        self._watchers.discard(event)

    def owned_by(self, owner: Owner) -> None:
        """A new attempt of the run began: what this exchange learns goes onto its tape."""
        self._owner = owner
        self._fence = owner.fence

    def attach(self) -> None:
        """A client is fed from this exchange."""
        self.clients += 1

    def detach(self) -> bool:
        """A client is gone. A read, or what stays in the house, is broken off with its last one; all else is drained.

        True: what the client had of a read is kept as a cut answer, because a step was begun on it.
        """
        self.clients -= 1
        self._close_unread()
        undrained = self.inner is not None or self.effect in (Effect.READ, Effect.PASSTHROUGH)
        alone = self.clients == 0 and undrained
        if not alone or self._talk.over or self.ending is not None or self._task is None:
            return False
        self._keeps_cut = self._acted_on()
        self._end(Ending.LOST)
        if not self._keeps_cut:
            # At once: an equal request may come before the task has noticed, and must not join it.
            self._settle(NOTHING)
        self._task.cancel()
        return self._keeps_cut

    def give_up(self, refusal: Refusal) -> None:
        """The run is stopped: whoever waits here, for nothing that left the house, gets *refusal*."""
        if self.inner is None or self._talk.over or self.ending is not None or self._task is None:
            return
        self._refuse(refusal)
        self._settle(NOTHING)
        self._task.cancel()

    async def over(self) -> None:
        """Wait until nothing more will come of it."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def stop(self) -> None:
        """Give up without a record: the sidecar ends. What was sent stays *sent*."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def note_head(self) -> None:
        """A client was given the head."""
        self._talk.heard = True

    def note_first_byte(self) -> None:
        """A client was given the first byte of the body."""
        if self._first_byte < 0 and self._owner is not None:
            self._first_byte = self._owner.tape.last_begun

    def _acted_on(self) -> bool:
        """A step was begun since a client had the first byte."""
        return self._owner is not None and 0 <= self._first_byte < self._owner.tape.last_begun

    def _pulse(self) -> None:
        for event in self._watchers:
            event.set()

    # ---- the task

    async def _run(self) -> None:
        result = NOTHING
        try:
            result = await self._go_on_when_broken_off()
        except DatabaseAway as error:
            fate = "The request was sent." if self._talk.sent else "Nothing was sent."
            self._refuse(Refusal("database-away", f"{error} {fate}", self.run_id, self._key()))
        except Exception as error:
            log.exception("exchange of run %s step %s failed", self.run_id, self._key())
            self._refuse(Refusal("internal", f"twiceshy failed: {error!r}", self.run_id, self._key()))
        finally:
            self._settle(result)
            if self.inner is not None:
                self.inner.over()
            self._pulse()
        if not self._named:
            await self.answer.abandon()
        self._over = True
        self._close_unread()

    async def _go_on_when_broken_off(self) -> Result:
        try:
            return await self._go()
        except asyncio.CancelledError:
            self._end(Ending.LOST)
            return await self._keep_cut_read() if self._keeps_cut else NOTHING

    async def _go(self) -> Result:
        if self._owner is not None:
            await self._shell.pulse.revive()
        if self._recall is not None:
            self.request = await self._recall()
        if self._journalled and self.effect is not Effect.READ and not await self._intend():
            return NOTHING
        try:
            failed = await self._talk.hold(self.request, self._pulse, self._stopped, self._last_word)
        except Withheld as error:
            self._refuse(error.refusal)
            await self._put_back()
            return NOTHING
        except Denied as error:
            self._refuse(Refusal("denied", f"{error}. Nothing was sent.", self.run_id or None, self._key()))
            await self._put_back()
            return NOTHING
        return await self._record_whole() if failed is None else await self._failed(*failed)

    async def _intend(self) -> bool:
        """Write the intent. False: it was refused, and nothing may be sent."""
        assert self.step is not None and self._owner is not None and self._asked_under is not None
        facts = self.step.facts
        entry = Intent(self._asked_under, facts, self.id, self.place, self._replaces)
        reach("before-intent")
        outcome = await self._shell.journal.write(entry)
        if not isinstance(outcome, Begun):
            self._refused_by(outcome, entry)
            return False
        reach("intent-written")
        self._owner.tape.began(self.step, outcome.begun)
        self.step.first_sent_at = self.step.first_sent_at or _seconds(outcome.first_sent_at)
        self.step.state = State.SENT
        self.step.exchange = self.id
        if len(facts.request_body) > self._shell.settings.index_body:
            # From now on it is in the journal, and a tape lives long.
            self.step.facts = replace(facts, request_body=b"")
        return True

    def _last_word(self) -> None:
        """Raise Withheld when what is about to be sent is not ours to send any more. Nothing may be awaited after it.

        Since it was asked, the run may have been stopped or taken over, and this process have stood still.
        """
        if self._owner is None:
            return
        refusal = self._owner.refusal
        if refusal is None and not self._shell.pulse.alive():
            text = "The sidecar has not reached its database for too long to be sure that it is believed alive."
            refusal = Refusal("database-away", f"{text} Nothing was sent.", self.run_id, self._key())
        if refusal is not None:
            raise Withheld(refusal)

    def _stopped(self) -> bool:
        return self._owner is not None and self._owner.refusal is not None

    def _key(self) -> str | None:
        return self.step.key if self.step is not None else None

    # ---- the record

    async def _record_whole(self) -> Result:
        assert self.answer.head is not None
        if not self._journalled:
            return self._finish(Ending.WHOLE, NOTHING)
        rule = self.rule
        settles = finality(
            self.effect,
            # Had the error come before the stream, it would have had a status of its own.
            500 if self.answer.failed else self.answer.head.status,
            stores_errors=rule.stores_errors,
            in_flight=rule.in_flight,
            not_processed=rule.not_processed,
        )
        return await self._record(settles, ending=Ending.WHOLE)

    async def _record(
        self, settles: Finality, *, ending: Ending, own: bool = False, state: State = State.ANSWERED
    ) -> Result:
        facts = await self.answer.facts(settles, whole=ending is Ending.WHOLE, own=own, dialect=self.rule.dialect)
        self._named = True
        entry = self._entry(facts, state)
        reach("before-record")
        outcome = await self._shell.journal.write(entry)
        if not isinstance(outcome, Recorded):
            self._named = False
            self._refused_by(outcome, entry)
            return NOTHING
        reach("recorded")
        if facts.body is not None and facts.size > self._shell.settings.index_body:
            # The index keeps small bodies only; a larger one is fetched when it is replayed.
            facts = replace(facts, body=None)
        return self._finish(ending, (AnswerRow(self.place, outcome.recorded, self.attempt, facts), state))

    def _entry(self, facts: AnswerFacts, state: State) -> Answer | Read:
        assert self.step is not None
        if self.effect is Effect.READ:
            assert self._asked_under is not None
            return Read(self._asked_under, self.step.facts, self.id, facts, self.place, self.attempt)
        event, late = (None, False) if self.inner is None else (self.inner.event, self.inner.timed_out)
        return Answer(self.run_id, self.step.key, self.id, self.attempt, facts, state, event, late)

    def _finish(self, ending: Ending, result: Result) -> Result:
        self.row = result[0]
        self.answer.released = self.answer.spool.size
        # Before clients hear the end: their next request may come at once and must find this answer.
        self._settle(result)
        self._end(ending)
        return result

    def _settle(self, result: Result) -> None:
        if self._owner is not None and not self._settled:
            self._settled = True
            self._owner.settled(self, *result)

    async def _keep_cut_read(self) -> Result:
        """A read was broken off by its client after a step was begun on what it had read: that much is kept."""
        await self.answer.cut(self.delivered)
        return await self._record(Finality.FINAL, ending=Ending.CUT)

    # ---- failures

    async def _failed(self, failure: Failure, words: str) -> Result:
        then = self._talk.after(failure, 0)
        if then is Then.AMBIGUOUS and self._journalled:
            await self._stop_ambiguous(failure, words)
            return NOTHING
        if then is Then.CUT_ANSWER:
            if not self._journalled:
                return self._finish(Ending.CUT, NOTHING)
            return await self._record(Finality.PROVISIONAL, ending=Ending.CUT)
        code = "upstream-timeout" if failure is Failure.SILENT else "upstream"
        sent = "Nothing was sent." if failure is Failure.NOT_SENT else "The request was sent."
        words = f"{self.request.authority}: {words}. {sent}"
        await self._talk.start_over(instead=Refusal(code, words, self.run_id or None, self._key()))
        if not self._journalled:
            return self._finish(Ending.WHOLE, NOTHING)
        state = State.NOT_SENT if failure is Failure.NOT_SENT and self.effect is not Effect.READ else State.ANSWERED
        return await self._record(Finality.PROVISIONAL, ending=Ending.WHOLE, own=True, state=state)

    async def _stop_ambiguous(self, failure: Failure, words: str) -> None:
        assert self.step is not None and self._owner is not None and self._fence is not None
        request, answer = self.request, self.answer
        came = f"; {answer.spool.size} bytes of an answer with status {answer.head.status} came" if answer.head else ""
        message = ambiguous_message(self.run_id, self.step, f"{request.authority}: {words}{came}")
        evidence = f"{failure}: {words}{came}"
        entry = Stop(self._fence, RunStatus.AMBIGUOUS, self.step.key, message, self.id, evidence)
        outcome = await self._shell.journal.write(entry)
        if isinstance(outcome, Recorded):
            self.step.state = State.AMBIGUOUS
            refusal = Refusal("ambiguous", message, self.run_id, self.step.key)
            self._owner.refuse(refusal)
            self._refuse(refusal)
        else:
            self._refused_by(outcome, entry)

    async def _put_back(self) -> None:
        if self._journalled and self.effect is not Effect.READ and self.step is not None:
            await self._shell.journal.write(PutBack(self.run_id, self.step.key, self.id))
            self.step.state, self.step.exchange = State.NOT_SENT, None

    def _refused_by(self, outcome: Outcome, entry: Entry) -> None:
        """The journal did not take *entry*: say so to clients that had nothing, cut the others."""
        if isinstance(outcome, Fenced | Stopped) and self._owner is not None:
            refusal = self._owner.outcome_refusal(outcome)
            # A new attempt may have come in between, which the fence does not speak of.
            if not isinstance(entry, Answer | PutBack) and entry.fence == self._owner.fence:
                self._owner.refuse(refusal)
            self._refuse(refusal)
            return
        assert isinstance(outcome, Conflict)
        log.warning("run %s step %s: the journal names another exchange", self.run_id, self._key())
        if self._owner is not None:
            self._owner.outdated = True
        self._end(Ending.LOST)

    # ---- the end

    def _refuse(self, refusal: Refusal) -> None:
        self.refusal = refusal
        self._end(Ending.REFUSED)

    def _end(self, ending: Ending) -> None:
        self.ending = self.ending or ending
        self._pulse()

    def _close_unread(self) -> None:
        """The answer's file goes with whoever needs it last: the record, or a client."""
        if self._over and self.clients == 0:
            self.answer.close()


def _seconds(moment: datetime) -> float:
    return moment.timestamp()
