"""What a sidecar knows of a run: its steps, their answers, and what the current attempt has had. Pure.

A ``Tape`` is built from the journal's rows when an attempt first speaks and is kept in step with what the
sidecar writes. It holds no I/O: ``proxy.exchange`` decides on it, the shells tell it what happened.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import UUID

from runtime.entries import AnswerRow, StepFacts, TapeRows
from runtime.step import Effect, Finality, Kind, State


class Where(StrEnum):
    """Where the exchange of a step under way is."""

    NOWHERE = "nowhere"  # none is under way, or nobody alive has it
    HERE = "here"  # a task of this sidecar has it
    ELSEWHERE = "elsewhere"  # another live sidecar has it


class Part(StrEnum):
    """What a step was to an attempt."""

    LIVE = "live"
    REPLAYED = "replayed"
    JOINED = "joined"


@dataclass(slots=True)
class Step:
    """One step of the run. ``state`` None: not journalled (new, or a read under way)."""

    facts: StepFacts
    state: State | None = None
    begun: int = 0
    first_sent_at: float = 0.0  # seconds, the database's clock
    exchange: UUID | None = None
    where: Where = Where.NOWHERE
    place: int = 0
    tries: int = 0  # of a local step: how many permits were given
    answers: list[AnswerRow] = field(default_factory=list)
    # Of the current attempt:
    claimed: bool = False  # a request of this attempt was taken for this step
    had: int = 0  # answers delivered whole to this attempt
    clients: int = 0  # clients attached now
    lost: bool = False  # the last client went away before its answer was delivered whole

    @property
    def key(self) -> str:
        return self.facts.key

    @property
    def effect(self) -> Effect:
        return self.facts.effect

    @property
    def last(self) -> AnswerRow | None:
        return self.answers[-1] if self.answers else None

    @property
    def open(self) -> bool:
        """The last answer that this attempt had was not final, so an equal request asks for this step again."""
        return (
            self.claimed
            and self.clients == 0
            and 0 < self.had <= len(self.answers)
            and self.answers[self.had - 1].facts.finality is not Finality.FINAL
        )


@dataclass(slots=True)
class Tape:
    """A run in the memory of its sidecar, for one attempt."""

    attempt: int
    since: int = 0  # the run's counter when this attempt began here: what is recorded later came in this attempt
    last_failed_barren: bool = False
    unheard: frozenset[str] = frozenset()  # steps that the attempt before is not known to have asked for
    steps: dict[str, Step] = field(default_factory=dict)
    prints: dict[bytes, list[Step]] = field(default_factory=dict)
    tokens: dict[bytes, str] = field(default_factory=dict)  # retry token (random key, invocation id) -> step key
    parts: dict[str, Part] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)  # answered steps but reads, not asked for in this attempt yet
    inner: dict[str, list[str]] = field(default_factory=dict)  # recorded local step -> what began while it was open
    around: dict[str, list[str]] = field(default_factory=dict)  # the other way round
    drift: int = 0
    last_begun: int = 0  # the counter at which the latest step that is no read began
    effect_answered: bool = False  # an effect was answered in this attempt
    repeated: bool = False  # an LLM call or effect was asked again, one after the other, in this attempt
    calls_saved: int = 0  # LLM calls that this attempt did not have to make
    tokens_saved: int = 0

    def add(self, step: Step) -> Step:
        self.steps[step.key] = step
        if not step.facts.explicit:
            same = self.prints.setdefault(step.facts.fingerprint, [])
            insort(same, step, key=lambda other: other.facts.occurrence)
        return step

    def equals(self, fingerprint: bytes) -> list[Step]:
        """The steps named by *fingerprint*, by occurrence."""
        return self.prints.get(fingerprint, [])

    def mine(self, fingerprint: bytes) -> Iterator[Step]:
        """Those of ``equals`` that this attempt has asked for."""
        return (step for step in self.equals(fingerprint) if step.claimed)

    @property
    def effect_out(self) -> bool:
        """An effect that this attempt asked for is on its way."""
        return any(
            step.claimed and step.effect.is_effect and (step.where is Where.HERE or step.state is State.SENT)
            for step in self.steps.values()
        )

    # ---- what happened, told by the shells

    def attach(self, step: Step, part: Part) -> None:
        """A client of this attempt is served by *step*."""
        step.claimed = True
        step.lost = False
        self.missing.discard(step.key)
        step.clients += 1
        self.parts.setdefault(step.key, part)
        replayed = [step.key]
        while replayed:
            for key in self.inner.get(replayed.pop(), ()):
                # What was asked for within several local steps at once may be any one's: all must be there again.
                if key in self.missing and self.missing.isdisjoint(self.around[key]):
                    self.missing.discard(key)
                    replayed.append(key)

    def detach(self, step: Step, n: int, *, delivered: bool) -> None:
        """A client of *step* ended. *n*: the answer it was given; *delivered*: whole, acknowledged."""
        step.clients -= 1
        if delivered:
            step.had = max(step.had, n + 1)
            if step.effect.is_effect:
                self.effect_answered = True
        elif step.clients == 0 and step.had <= n:
            step.lost = True

    def undeliver(self, step: Step, n: int) -> None:
        """A delivery that was counted was reset by the client before anything else began: its retry is due."""
        if step.had == n + 1 and step.clients == 0:
            step.had = n
            step.lost = True

    def began(self, step: Step, begun: int) -> None:
        step.begun = step.begun or begun
        if step.effect is not Effect.READ:
            self.last_begun = max(self.last_begun, begun)

    def record(self, step: Step, row: AnswerRow, state: State = State.ANSWERED) -> None:
        """Answer *row* of *step* was committed at its place in the list."""
        if step.claimed and step.effect.is_effect:
            self.effect_answered = True
        if row.n < len(step.answers):
            step.answers[row.n] = row
        else:
            step.answers.append(row)
        step.state = state
        step.exchange = None
        step.where = Where.NOWHERE

    def ended(self, step: Step, row: AnswerRow | None, state: State | None) -> None:
        """The exchange of *step* ended with *row* recorded, or with none, and left the step in *state*."""
        if row is not None and state is not None:
            self.record(step, row, state)
            return
        step.where = Where.NOWHERE
        step.state = state
        if state is not State.SENT:
            step.exchange = None


def build(rows: TapeRows, here: frozenset[UUID] | set[UUID]) -> Tape:
    """Make the tape of *rows* for the run's current attempt, which lives with this sidecar.

    *here*: exchanges that tasks of this sidecar have. One of this sidecar that none of them has, nobody has.
    """
    tape = Tape(attempt=rows.attempt, last_failed_barren=rows.last_failed_barren)
    for row in rows.steps:
        where = Where.NOWHERE
        if row.state is State.SENT and row.exchange is not None:
            if row.exchange in here:
                where = Where.HERE
            elif row.facts.kind is not Kind.HTTP:
                where = Where.NOWHERE  # it never left the house: whoever has the attempt has it too
            elif not row.sidecar_dead and row.sidecar != rows.sidecar:
                where = Where.ELSEWHERE
        step = tape.add(
            Step(
                facts=row.facts,
                state=row.state,
                begun=row.begun,
                first_sent_at=row.first_sent_at.timestamp(),
                exchange=row.exchange,
                where=where,
                place=row.place,
                tries=row.tries,
                answers=list(row.answers),
            )
        )
        tape.began(step, row.begun)
        tape.since = max([tape.since, row.begun, *(answer.recorded for answer in row.answers)])
        if row.answers and row.facts.effect is not Effect.READ:
            tape.missing.add(step.key)
    _nest(tape)
    return tape


def _nest(tape: Tape) -> None:
    """Find out what began while local steps were open that are recorded: their replay stands for that, too."""
    open_: list[Step] = []
    for step in sorted(tape.steps.values(), key=lambda step: step.begun):
        open_ = [outer for outer in open_ if outer.answers[-1].recorded > step.begun]
        local = step.facts.kind is Kind.LOCAL and step.state is State.ANSWERED
        # A local step within another one ends before that; one that does not is beside it.
        end = step.answers[-1].recorded if local else step.begun
        around = [outer for outer in open_ if outer.answers[-1].recorded > end]
        if around and step.effect is not Effect.READ:
            tape.around[step.key] = [outer.key for outer in around]
            for outer in around:
                tape.inner.setdefault(outer.key, []).append(step.key)
        if local:
            open_.append(step)
