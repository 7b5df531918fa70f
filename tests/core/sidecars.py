"""A sidecar in memory: what ``proxy.exchange`` decides is carried out as ``proxy.journalled``, ``proxy.recorder``
and ``proxy.attempts`` do, but nothing moves by itself: each step of an exchange is one call, so that a test can
stop the world at any point between two of them.
"""

import itertools
from dataclasses import dataclass, field
from enum import Enum, auto
from uuid import UUID

from proxy.aftermath import Failure, Then, after
from proxy.exchange import (
    Ambiguous,
    Arrival,
    Beat,
    Decision,
    Diverged,
    Drop,
    Join,
    Mode,
    NoAttempt,
    Replay,
    Send,
    Wait,
    decide,
    is_repeat,
)
from proxy.tape import Part, Step, Tape, Where, build
from runtime.entries import (
    Answer,
    AnswerRow,
    Begun,
    Conflict,
    Entry,
    Fence,
    Intent,
    Outcome,
    PutBack,
    Read,
    Recorded,
    StepFacts,
    Stop,
)
from runtime.step import Effect, Finality, RunStatus, State, finality
from tests.core.world import RUN, Fault, Journal, Reply, Upstream, facts_of, name_of

_IDS = itertools.count(1)
RESEND = 1


class Stage(Enum):
    """Where an exchange is; the world may end between any two."""

    DECIDED = auto()  # on the tape, nothing written
    INTENDED = auto()  # the intent is committed, no byte has left
    OUT = auto()  # bytes have left, the answer is on its way
    OVER = auto()  # recorded, refused or lost


@dataclass(eq=False)
class Client:
    """A request of the agent that is being answered."""

    step: Step
    tape: Tape
    exchange: "Exchange | None"
    n: int
    row: AnswerRow | None = None  # what it is given, once that is known
    over: bool = False

    @property
    def ready(self) -> bool:
        """Its answer is recorded and can be delivered."""
        return not self.over and self.row is not None

    @property
    def hopeless(self) -> bool:
        """Its exchange ended without an answer."""
        return not self.over and self.row is None and self.exchange is not None and self.exchange.stage is Stage.OVER

    def deliver(self) -> AnswerRow:
        """The answer reaches the agent whole."""
        assert self.ready
        assert self.row is not None
        self._leave(delivered=True)
        return self.row

    def hang_up(self) -> None:
        """The agent goes away, or is cut off."""
        if not self.over:
            self._leave(delivered=False)

    def _leave(self, *, delivered: bool) -> None:
        self.over = True
        if self.exchange is not None:
            self.exchange.left(self)
        self.tape.detach(self.step, self.n, delivered=delivered)


@dataclass(eq=False)
class Exchange:
    """One conversation with the upstream, moved by ``advance``."""

    sidecar: "Sidecar"
    step: Step
    place: int
    replaces: UUID | None
    body: bytes
    fence: Fence
    attempt: int
    id: UUID = field(default_factory=lambda: UUID(int=next(_IDS)))
    stage: Stage = Stage.DECIDED
    clients: list[Client] = field(default_factory=list)
    heard: bool = False
    tries: int = 0
    reply: Reply | None = None
    row: AnswerRow | None = None
    lost: bool = False  # to another exchange: who waits for it decides again

    def has(self, step: Step) -> bool:
        """*step* is under way in this exchange, which this attempt began, or one before it."""
        return self.step is step or step.exchange == self.id

    def left(self, client: Client) -> None:
        """A read is cancelled with its last client."""
        self.clients.remove(client)
        if not self.clients and self.step.effect is Effect.READ and self.stage is not Stage.OVER:
            self._end()

    def advance(self, fault: Fault = Fault.NONE) -> None:
        """Go on by one step. *fault*: what happens to the request if it is sent now."""
        match self.stage:
            case Stage.DECIDED:
                self._intend()
            case Stage.INTENDED:
                self._send(fault)
            case Stage.OUT:
                self._receive()
            case Stage.OVER:
                raise AssertionError("it is over")

    def _intend(self) -> None:
        if self.step.effect is not Effect.READ:
            outcome = self._write(Intent(self.fence, self.step.facts, self.id, self.place, self.replaces))
            if not isinstance(outcome, Begun):
                self._end()
                return
            self.sidecar.tape.began(self.step, outcome.begun)
            self.step.first_sent_at = self.step.first_sent_at or outcome.first_sent_at.timestamp()
            self.step.state, self.step.exchange = State.SENT, self.id
        self.stage = Stage.INTENDED

    def _send(self, fault: Fault) -> None:
        step = self.step
        if step.effect is not Effect.READ:
            if not self.tries and not self.sidecar.believed:
                self._write(PutBack(RUN, step.key, self.id))
                step.state, step.exchange = State.NOT_SENT, None
                self._end()
                return
            row = self.sidecar.journal.rows[step.key]
            mine = (row.state, row.exchange) == (State.SENT, self.id)
            assert mine or not self.sidecar.believed, "sent without its intent"
        self.tries += 1
        self.reply = self.sidecar.upstream.take(
            name_of(step.facts.fingerprint), step.effect, step.facts.wire_key, self.body, fault
        )
        self.stage = Stage.OUT

    def _receive(self) -> None:
        assert self.reply is not None
        status, fault = self.reply.status, self.reply.fault
        if status is not None:
            self._record(status, self.reply.body, finality(self.step.effect, status))
            return
        self.heard = self.heard or (fault is Fault.CUT and bool(self.clients))
        failure = {
            Fault.REFUSED: Failure.NOT_SENT, Fault.SILENT: Failure.SILENT, Fault.CUT: Failure.CUT
        }.get(fault, Failure.INTERRUPTED)  # fmt: skip
        left = RESEND + 1 - self.tries
        then = after(failure, self.step.effect, left=left, heard=self.heard, mode=self.sidecar.mode)
        if then is Then.SEND_AGAIN:
            self.stage = Stage.INTENDED
        elif then is Then.AMBIGUOUS:
            self._stop()
        elif then is Then.CUT_ANSWER:
            self._record(200, b"cut", Finality.PROVISIONAL, whole=False)
        else:
            state = State.NOT_SENT if then is Then.OWN_NOT_SENT else State.ANSWERED
            state = State.ANSWERED if self.step.effect is Effect.READ else state
            self._record(502, fault.name.encode(), Finality.PROVISIONAL, own=True, state=state)

    def _record(
        self, status: int, body: bytes, settles: Finality, *, own: bool = False, whole: bool = True,
        state: State = State.ANSWERED,
    ) -> None:  # fmt: skip
        facts = facts_of(status, body, settles, own=own, whole=whole)
        entry: Entry
        if self.step.effect is Effect.READ:
            entry = Read(self.fence, self.step.facts, self.id, facts, self.place, self.attempt)
        else:
            entry = Answer(RUN, self.step.key, self.id, self.attempt, facts, state)
        outcome = self._write(entry)
        if isinstance(outcome, Recorded):
            self.row = AnswerRow(self.place, outcome.recorded, self.attempt, facts)
            for client in self.clients:
                client.row = self.row
            self.step.state = state
        self._end()

    def _stop(self) -> None:
        outcome = self._write(Stop(self.fence, RunStatus.AMBIGUOUS, self.step.key, "", self.id))
        if isinstance(outcome, Recorded):
            self.step.state = State.AMBIGUOUS
        self._end()

    def _write(self, entry: Entry) -> Outcome:
        outcome = self.sidecar.journal.write(entry)
        self.lost = isinstance(outcome, Conflict)
        self.sidecar.outdated = self.sidecar.outdated or self.lost
        return outcome

    def _end(self) -> None:
        self.stage = Stage.OVER
        self.sidecar.settled(self)


@dataclass(eq=False)
class Sidecar:
    """A sidecar process. ``believed``: it may think itself alive, because the others do."""

    id: str
    journal: Journal
    upstream: Upstream
    mode: Mode = "durable"
    believed: bool = True
    outdated: bool = False  # another process moved a step
    tape: Tape = field(default_factory=lambda: Tape(0))
    fence: Fence = field(default_factory=lambda: Fence(RUN, b"", ""))
    exchanges: dict[UUID, Exchange] = field(default_factory=dict)
    ended: set[UUID] = field(default_factory=set)

    def take(self, fence: Fence) -> None:
        """The first request of an attempt: what is under way here goes onto its tape."""
        self.fence = fence
        known = self.tape.steps if self.tape.attempt == self.journal.attempt - 1 else {}
        self.tape = build(self.journal.load(), set(self.exchanges))
        self.tape.unheard = frozenset(key for key in self.tape.steps if key not in known or not known[key].had)
        for exchange in self.exchanges.values():
            if exchange.step.effect is not Effect.READ and exchange.stage is not Stage.DECIDED:
                exchange.fence = fence  # an intent is still its own attempt's

    def decide(self, asked: Arrival) -> Decision:
        """What becomes of a request."""
        if self.outdated:
            self.refresh()
        due = decide(self.tape, asked, self.journal.now, self.mode)
        self.outdated = isinstance(due, Wait)
        return due

    def ask(self, asked: Arrival, body: bytes = b"") -> Client | Drop | Beat | Wait | NoAttempt | RunStatus:
        """Decide and do. RunStatus: the run stopped."""
        due = self.decide(asked)
        match due:
            case Drop() | Beat() | Wait() | NoAttempt():
                return due
            case Ambiguous() | Diverged():
                status = RunStatus.AMBIGUOUS if isinstance(due, Ambiguous) else RunStatus.DIVERGED
                exchange = due.step.exchange if due.step.state is State.SENT else None
                outcome = self.journal.write(Stop(self.fence, status, due.step.key, "", exchange))
                if not isinstance(outcome, Conflict):
                    return status
                self.outdated = True  # the step has moved on
                return self.ask(asked, body)
            case Replay(step, n):
                return self._serve(step, asked, Client(step, self.tape, None, n, step.answers[n]), Part.REPLAYED)
            case Join(step):
                exchange_ = next(one for one in self.exchanges.values() if one.has(step))
                return self._serve(step, asked, Client(step, self.tape, exchange_, exchange_.place), Part.JOINED)
            case Send():
                exchange_ = self._begin(due, asked, body)
                step = exchange_.step
                return self._serve(step, asked, Client(step, self.tape, exchange_, exchange_.place), Part.LIVE)

    def _begin(self, due: Send, asked: Arrival, body: bytes) -> Exchange:
        step = due.step
        self.tape.drift += due.drift
        if step is None:
            key = asked.explicit or f"{name_of(asked.fingerprint)}#{due.occurrence}"
            keyed = asked.effect.is_effect and self.mode == "durable"
            facts = StepFacts(
                key, asked.effect, asked.explicit is not None, asked.fingerprint, due.occurrence, asked.secondary, "",
                "", f"key of {key}" if keyed else None, b"", body, b"",
            )  # fmt: skip
            step = self.tape.add(Step(facts))
        sent = step.facts.request_body if due.first else body
        exchange = Exchange(self, step, due.place, due.replaces, sent, self.fence, self.tape.attempt)
        if due.place < len(step.answers):
            self.journal.replaced.append((step.key, due.place, self.tape.last_failed_barren, self.journal.counter))
        step.where, step.place = Where.HERE, due.place
        self.exchanges[exchange.id] = exchange
        return exchange

    def _serve(self, step: Step, asked: Arrival, client: Client, part: Part) -> Client:
        if asked.tokenless and asked.explicit is None and is_repeat(self.tape, asked, step):
            self.tape.repeated = True
        self.tape.attach(step, part)
        if asked.token is not None:
            self.tape.tokens[asked.token] = step.key
        if client.exchange is not None:
            client.exchange.clients.append(client)
        return client

    def settled(self, exchange: Exchange) -> None:
        """An exchange ended, perhaps one of an earlier attempt."""
        self.exchanges.pop(exchange.id, None)
        self.ended.add(exchange.id)
        step = self.tape.steps.get(exchange.step.key)
        if step is None or step.where is not Where.HERE or not exchange.has(step):
            return
        if exchange.row is not None and exchange.step.state is not None:
            self.tape.record(step, exchange.row, exchange.step.state)
            return
        step.where, step.state = Where.NOWHERE, exchange.step.state
        if step.state is not State.SENT:
            step.exchange = None

    def refresh(self) -> None:
        """What other processes wrote since: as ``Attempts.refresh``."""
        fresh = build(self.journal.load(), set(self.exchanges))
        for step in fresh.steps.values():
            known = self.tape.steps.get(step.key)
            if known is None:
                self.tape.add(step)
            elif known.where is not Where.HERE and step.exchange not in self.ended:
                known.state, known.exchange, known.where = step.state, step.exchange, step.where
                known.answers, known.place = step.answers, step.place
        self.tape.last_begun = max(self.tape.last_begun, fresh.last_begun)

    def die(self) -> None:
        """The process is gone, and with it every exchange and client."""
        for exchange in list(self.exchanges.values()):
            for client in list(exchange.clients):
                client.over = True
        self.exchanges.clear()
        self.believed = False
