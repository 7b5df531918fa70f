"""One request's way through the journal, decided. Pure: no I/O, no clock of its own.

``decide(tape, arrival, now, mode)`` answers in two moves:

1. *Which step is it?* (``identify``, DESIGN §3.3): an explicit key; a retry signal; an open step; the retry
   of a client that went away; the next step of an equal fingerprint; a new occurrence.
2. *What is due for it?* (``look_up``, DESIGN §3.4): replay, join, wait, send, or stop.

Between the two and a send stands the place of the determinism guard (DESIGN §4), which so far knows only an
explicit key's mismatch.

``decide`` changes nothing. The shell carries the decision out at once, without awaiting in between, so two
arrivals cannot both be given the same new occurrence.
"""

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from proxy.tape import Step, Tape, Where
from runtime.entries import AnswerRow
from runtime.step import Effect, Finality, Kind, State

Mode = Literal["durable", "journal", "naive"]

#: How much of a key's retention is not relied on: for clocks that differ, and for what a sending takes.
RETENTION_MARGIN = 0.1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as far as it matters to the decision."""

    effect: Effect
    fingerprint: bytes
    secondary: bytes
    explicit: str | None = None
    again: bool = False  # it says of itself that it is a retry
    token: bytes | None = None  # random idempotency key or invocation id, the same in a client's retries
    token_is_call: bool = False  # the SDK keeps that token over its retries, so another one is another call
    beaten: bool = False  # the beat for a FIN on its way was waited
    tokenless: bool = False  # its attempt was never claimed, so nobody vouches for what a repetition means
    retention: float = 0.0  # seconds that the upstream remembers a key, counted from the first sending
    signed: bool = False  # it carries a signature over itself and the time
    kind: Kind = Kind.HTTP
    gone: bool = False  # its client has gone away
    strays: bool = False  # others of its attempt came and were not understood, or are not yet: it may be one of those


# ---- decisions


@dataclass(frozen=True, slots=True)
class Replay:
    """Give answer *n* of the list, as recorded. Touches nothing upstream."""

    step: Step
    n: int


@dataclass(frozen=True, slots=True)
class Join:
    """Attach to the exchange under way here: what has come, then the rest live."""

    step: Step


@dataclass(frozen=True, slots=True)
class Wait:
    """Another live sidecar has the exchange: wait for its record, then decide again."""

    step: Step


@dataclass(frozen=True, slots=True)
class Send:
    """Write the intent, then send. *step* None: a new one, under *occurrence* or the explicit key.

    *first*: the bytes that went first go again (DESIGN §3.6), else those of this request. *replaces*: the dead
    exchange whose place is taken.
    """

    step: Step | None
    occurrence: int
    place: int
    replaces: UUID | None = None
    first: bool = False
    drift: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """An equal effect's client is attached: wait one beat for a FIN on its way, then decide again."""


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """The run stops: the outcome of *step* is unknown and must not be risked twice."""

    step: Step


@dataclass(frozen=True, slots=True)
class Diverged:
    """The run stops: the explicit key of *step* names another request."""

    step: Step


@dataclass(frozen=True, slots=True)
class NoAttempt:
    """Refuse (428): without a claimed attempt nobody can say whether this is a restart or a second effect."""

    why: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Its client has gone, and an equal request was understood before it: most likely the one that takes its place."""


Decision = Drop | Replay | Join | Wait | Send | Beat | Ambiguous | Diverged | NoAttempt


def decide(tape: Tape, arrival: Arrival, now: float, mode: Mode = "durable") -> Decision:
    """Say what becomes of *arrival*. *now*: seconds, the database's clock."""
    found = identify(tape, arrival)
    if isinstance(found, Beat | Diverged):
        return found
    if arrival.gone and _is_overtaken(tape, arrival, found):
        return Drop()
    refused = _vouched(tape, arrival, found)
    if refused is not None:
        return refused
    if found is None:
        return _new(tape, arrival)
    return look_up(tape, found, arrival, now, mode)


# ---- which step


def identify(tape: Tape, arrival: Arrival) -> Step | Beat | Diverged | None:
    """The step that *arrival* asks for; None: one that is not there yet."""
    if arrival.explicit is not None:
        step = tape.steps.get(arrival.explicit)
        if step is not None and step.facts.fingerprint != arrival.fingerprint:
            return Diverged(step)
        return step

    mine = list(tape.mine(arrival.fingerprint))
    if arrival.token is not None:
        known = tape.steps.get(tape.tokens.get(arrival.token, ""))
        if known is not None and known.facts.fingerprint == arrival.fingerprint:
            return known
        if arrival.token_is_call:
            return _next(tape, arrival)
    waiting = next((step for step in mine if step.open), None) or next((step for step in mine if step.lost), None)
    attached = next((step for step in mine if step.clients), None)
    if arrival.again and mine and waiting is None and not (arrival.strays and _answered_well(mine[-1])):
        # The client that this one takes the place of may not be seen to be gone yet.
        return attached or mine[-1]
    if waiting is not None:
        return waiting
    if attached is not None and arrival.effect.is_effect and not arrival.beaten:
        return Beat()
    return _next(tape, arrival)


def _is_overtaken(tape: Tape, arrival: Arrival, found: Step | None) -> bool:
    """It would be another step than the equal ones of this attempt, and nothing says that it is."""
    if arrival.explicit is not None or arrival.token_is_call or (found is not None and found.claimed):
        return False
    return any(True for _ in tape.mine(arrival.fingerprint))


def _answered_well(step: Step) -> bool:
    """Nobody tries again what this step was answered with; or it is not answered yet."""
    return step.last is None or step.last.facts.status < 400


def _next(tape: Tape, arrival: Arrival) -> Step | None:
    """The next unclaimed step of an equal fingerprint: one of an equal secondary print, else the lowest."""
    free = [step for step in tape.equals(arrival.fingerprint) if not step.claimed]
    for step in free:
        if step.facts.secondary == arrival.secondary:
            return step
    return free[0] if free else None


def _vouched(tape: Tape, arrival: Arrival, found: Step | None) -> NoAttempt | None:
    """DESIGN §2: what an attempt that nobody claimed may not do without naming its step."""
    if not arrival.tokenless or arrival.explicit is not None or not arrival.effect.is_effect:
        return None
    again = found is not None and found.claimed
    if tape.repeated and (tape.effect_answered or (tape.effect_out and not again)):
        return NoAttempt("an earlier LLM call or effect was repeated, and an effect was made or is on its way")
    if not again and any(True for _ in tape.mine(arrival.fingerprint)):
        return NoAttempt("an equal effect was already made by this process")
    return None


def is_repeat(tape: Tape, arrival: Arrival, found: Step | None) -> bool:
    """True if *arrival* asks again, one after the other, for an LLM call or effect like an earlier one."""
    if arrival.effect is Effect.READ or arrival.kind.waits or (found is not None and found.claimed):
        return False
    mine = list(tape.mine(arrival.fingerprint))
    return bool(mine) and all(step.clients == 0 for step in mine)


# ---- what is due


def look_up(tape: Tape, step: Step, arrival: Arrival, now: float, mode: Mode) -> Decision:
    """What is due for *step*, which is there."""
    if step.state is State.AMBIGUOUS:
        return Ambiguous(step)
    under_way = step.state is State.SENT or step.where is Where.HERE
    if under_way and step.had >= step.place:
        return _under_way(step, arrival, now, mode)
    last = step.last
    if step.had < len(step.answers):
        trailing = step.had == len(step.answers) - 1 and not under_way
        if trailing and last is not None and (_try_again(tape, step, last) or _settled_to_send(step, last)):
            return _again(step, arrival, place=step.had)
        return Replay(step, step.had)
    if step.state is State.ANSWERED and last is not None and last.facts.finality is not Finality.PROVISIONAL:
        return Replay(step, last.n)
    return _again(step, arrival, place=len(step.answers))


def _settled_to_send(step: Step, last: AnswerRow) -> bool:
    """A person said that what *last* left in doubt did not happen: it is no answer any more."""
    return step.state is State.NOT_SENT and last.facts.finality is Finality.DOUBTFUL


def _try_again(tape: Tape, step: Step, last: AnswerRow) -> bool:
    """DESIGN §3.8: a provisional last answer is asked again in a new attempt if nothing was built on it.

    Or if its replay was of no use: the attempt before had it and failed without a new step.
    """
    if last.facts.finality is not Finality.PROVISIONAL or last.recorded > tape.since:
        return False
    return (tape.last_failed_barren and step.key not in tape.unheard) or tape.last_begun <= last.recorded


def _under_way(step: Step, arrival: Arrival, now: float, mode: Mode) -> Decision:
    if step.where is Where.HERE:
        return Join(step)
    if step.where is Where.ELSEWHERE:
        return Wait(step)
    # The fate of what was sent is unknown.
    if step.effect is Effect.REPEATABLE or mode == "journal":
        drift = step.facts.kind is Kind.HTTP  # of what never left the house nothing was lost
        return _again(step, arrival, place=step.place, replaces=step.exchange, drift=drift)
    remembered = now - step.first_sent_at < arrival.retention * (1 - RETENTION_MARGIN)
    if step.effect is Effect.IDEMPOTENT and remembered and not arrival.signed:
        return _again(step, arrival, place=step.place, replaces=step.exchange)
    return Ambiguous(step)


def _again(step: Step, arrival: Arrival, *, place: int, replaces: UUID | None = None, drift: bool = False) -> Send:
    # Under one key an upstream expects one body, but a rule may ignore what differs between two.
    first = step.effect.is_effect and step.state is not None and not arrival.signed
    return Send(step, step.facts.occurrence, place, replaces, first, drift)


def _new(tape: Tape, arrival: Arrival) -> Send:
    same = tape.equals(arrival.fingerprint)
    occurrence = 0 if arrival.explicit is not None else (same[-1].facts.occurrence + 1 if same else 1)
    drift = arrival.effect is not Effect.READ and arrival.kind is Kind.HTTP and bool(tape.missing)
    return Send(None, occurrence=occurrence, place=0, drift=drift)
