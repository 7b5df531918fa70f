"""How long to wait before trying again, and when trying again is in vain. Pure: chance comes from outside."""

from typing import Final

CAP: Final = 60.0


def backoff(n: int, jitter: float = 0.0, *, base: float = 1.0, cap: float = CAP) -> float:
    """Seconds to wait before try *n* + 1, when *n* went wrong in a row: none, then 1, 2, 4 … up to *cap*.

    *jitter*: a random number from 0 to 1, which takes away up to half, so that many do not come at once.
    """
    if n <= 0:
        return 0.0
    # The exponent is bounded: 2.0 ** 1024 is an error, not a long time.
    return float(min(cap, base * 2.0 ** min(n - 1, 64)) * (1.0 - 0.5 * min(1.0, max(0.0, jitter))))


#: Outcomes of an attempt that speak against its run; the others (parks, hand-overs, interruptions) do not count.
FAILURES: Final = frozenset({"died", "failed"})


def barren(before: int, outcome: str | None, *, progress: bool) -> int:
    """How many attempts in a row ended in death or failure with no new step, counted at the next claim.

    *before*: the count at the claim of the attempt that ended with *outcome*; None: there was none.
    *progress*: a new step began in it.
    """
    if outcome is None or progress:
        return 0
    return before + 1 if outcome in FAILURES else before
