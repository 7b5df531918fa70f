"""The step's state machine, as one table. Pure: no I/O, no clock.

Rules, in prose:

* A step is *sent* from the moment its intent is committed, before the first byte leaves. There is no
  state between "nobody may have seen it" and "somebody may have".
* Only the exchange that the row names may move a *sent* step (``WHERE exchange = …``); what an exchange
  that lost its step learns is evidence, and settles the step only if it is *ambiguous*.
* *answered* keeps a list of answers. A provisional last answer may be followed by another one under the
  same key: the step is *sent* again.
* *not_sent* means certainly no byte reached the upstream, or a person said "send again".
* *ambiguous* needs a person (or a probe): the effect may have happened, and asking again may repeat it. An
  answer that comes late settles it, even after "send again" until the next intent is written.

The SQL CHECK of ``step.state`` and the picture in the docs are tested against ``TRANSITIONS``.
"""

from enum import StrEnum


class Effect(StrEnum):
    """What may be done again (DESIGN: *effect class*)."""

    READ = "read"
    REPEATABLE = "repeatable"
    IDEMPOTENT = "idempotent"
    AT_MOST_ONCE = "at_most_once"
    PASSTHROUGH = "passthrough"

    @property
    def is_effect(self) -> bool:
        """True for the two classes whose repetition is felt outside: *effects* in the narrow sense."""
        return self in (Effect.IDEMPOTENT, Effect.AT_MOST_ONCE)


class Kind(StrEnum):
    """What a step is: an HTTP exchange, or one of the sidecar's own (DESIGN §6)."""

    HTTP = "http"
    LOCAL = "local"  # what the agent does itself, between a permit and its output
    SLEEP = "sleep"
    WAIT = "wait"  # for an event
    APPROVAL = "approval"  # a wait that a person ends
    START = "start"  # of a child run
    CHILD = "child"  # a wait for the end of a child run
    VALUE = "value"  # time, chance

    @property
    def waits(self) -> bool:
        """True for what a run may park on."""
        return self in (Kind.SLEEP, Kind.WAIT, Kind.APPROVAL, Kind.CHILD)


class State(StrEnum):
    """Where a journalled step stands. A step that has no row yet is ``None`` in ``TRANSITIONS``."""

    SENT = "sent"
    ANSWERED = "answered"
    NOT_SENT = "not_sent"
    AMBIGUOUS = "ambiguous"


class Event(StrEnum):
    """What moves a step."""

    INTENT = "intent"  # an exchange is about to send, its row is committed first
    TAKE_OVER = "take_over"  # another exchange goes on in place of one that is dead
    ANSWER = "answer"  # an answer was recorded
    NOTHING_LEFT = "nothing_left"  # certainly no byte reached the upstream
    LOST = "lost"  # bytes left, no whole answer, and the class forbids to ask again
    READ_RECORDED = "read_recorded"  # a read, which has no intent, was recorded when it ended
    ASSUME_DONE = "assume_done"  # a person, a probe or a late answer says what happened
    SEND_AGAIN = "send_again"  # a person says it did not happen
    DOUBTED = "doubted"  # the attempt failed after an answer that says nothing certain


TRANSITIONS: dict[tuple[State | None, Event], State] = {
    (None, Event.INTENT): State.SENT,
    (None, Event.READ_RECORDED): State.ANSWERED,
    (State.SENT, Event.TAKE_OVER): State.SENT,
    (State.SENT, Event.ANSWER): State.ANSWERED,
    (State.SENT, Event.NOTHING_LEFT): State.NOT_SENT,
    (State.SENT, Event.LOST): State.AMBIGUOUS,
    (State.NOT_SENT, Event.INTENT): State.SENT,
    (State.ANSWERED, Event.INTENT): State.SENT,
    (State.ANSWERED, Event.READ_RECORDED): State.ANSWERED,
    (State.ANSWERED, Event.DOUBTED): State.AMBIGUOUS,
    (State.AMBIGUOUS, Event.ASSUME_DONE): State.ANSWERED,
    (State.NOT_SENT, Event.ASSUME_DONE): State.ANSWERED,
    (State.AMBIGUOUS, Event.SEND_AGAIN): State.NOT_SENT,
}


class Finality(StrEnum):
    """How far an answer settles its step."""

    FINAL = "final"  # the outcome
    PROVISIONAL = "provisional"  # the step is open: asking again under the same key is safe and wanted
    DOUBTFUL = "doubtful"  # at_most_once only: open, but never asked again; a failed attempt makes it ambiguous


#: Statuses that say nothing about the outcome of a request below 500 (DESIGN §3.8).
UNSETTLED_4XX = frozenset({401, 403, 407, 408, 425, 429})
#: Statuses that say: the effect was certainly not made (DESIGN §3.8, *not processed*).
NOT_PROCESSED = frozenset({401, 403, 407, 429})


def finality(
    effect: Effect,
    status: int,
    *,
    stores_errors: bool = False,
    in_flight: frozenset[int] = frozenset(),
    not_processed: frozenset[int] = frozenset(),
) -> Finality:
    """Say how far an upstream answer with *status* settles a step of class *effect*.

    *stores_errors*, *in_flight*, *not_processed* come from the step's rule. Answers of our own (502, 504)
    are never passed here: they say of themselves whether a byte had left.
    """
    if effect is Effect.AT_MOST_ONCE:
        if status in NOT_PROCESSED or status in not_processed:
            return Finality.PROVISIONAL
        if status >= 500 or status in UNSETTLED_4XX or status in in_flight:
            return Finality.DOUBTFUL
        return Finality.FINAL
    if status in in_flight or status in UNSETTLED_4XX or status in not_processed:
        return Finality.PROVISIONAL
    if status >= 500 and not stores_errors:
        return Finality.PROVISIONAL
    return Finality.FINAL


class RunStatus(StrEnum):
    """Where a run stands (DESIGN §1). The *stopped* ones need a person."""

    QUEUED = "queued"
    RUNNING = "running"
    PARKED = "parked"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    AMBIGUOUS = "ambiguous"
    DIVERGED = "diverged"
    OVER_BUDGET = "over_budget"

    @property
    def stopped(self) -> bool:
        return self in (RunStatus.AMBIGUOUS, RunStatus.DIVERGED, RunStatus.OVER_BUDGET)

    @property
    def ended(self) -> bool:
        return self in (RunStatus.DONE, RunStatus.FAILED, RunStatus.CANCELLED)
