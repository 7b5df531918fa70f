"""What follows when an exchange brought no whole answer. Pure (DESIGN §3.7, §3.8)."""

from enum import StrEnum

from proxy.exchange import Mode
from runtime.step import Effect


class Failure(StrEnum):
    """How an exchange failed."""

    NOT_SENT = "not_sent"  # certainly no byte reached the upstream
    INTERRUPTED = "interrupted"  # bytes out, no head back
    SILENT = "silent"  # a time limit passed after bytes had left
    CUT = "cut"  # the body ended before its end


class Then(StrEnum):
    """What the sidecar does about it."""

    SEND_AGAIN = "send_again"  # the same bytes, at once or after a pause
    OWN_NOT_SENT = "own_not_sent"  # an answer of our own; the step is free to go again
    OWN_ANSWERED = "own_answered"  # an answer of our own, provisional
    CUT_ANSWER = "cut_answer"  # the cut answer is what the agent was given
    AMBIGUOUS = "ambiguous"  # the run stops


#: What the sidecar itself sends again after a network failure; of what is passed through it knows nothing.
_SENT_AGAIN = frozenset({Effect.READ, Effect.REPEATABLE, Effect.IDEMPOTENT})


def after(failure: Failure, effect: Effect, *, left: int, heard: bool, mode: Mode = "durable") -> Then:
    """Say what follows *failure*. *left*: further sendings allowed; *heard*: a client was given part of it."""
    if left > 0 and effect in _SENT_AGAIN and failure is not Failure.SILENT and not heard:
        return Then.SEND_AGAIN
    if failure is Failure.NOT_SENT:
        return Then.OWN_NOT_SENT
    if effect is Effect.AT_MOST_ONCE and mode == "durable":
        return Then.AMBIGUOUS
    return Then.CUT_ANSWER if heard else Then.OWN_ANSWERED


#: Pauses before the sidecar sends again, in seconds; the last holds for all further ones.
PAUSES = (0.1, 0.5, 2.0)


def pause(tries: int) -> float:
    """Seconds to wait before sending number ``tries + 1`` (*tries* >= 1 sendings failed)."""
    return PAUSES[min(tries, len(PAUSES)) - 1]
