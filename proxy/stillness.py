"""When an attempt does nothing but wait, so that its run may park. Pure (DESIGN §6)."""

from collections.abc import Mapping
from dataclasses import dataclass

#: An agent that takes more of a processor than this works.
IDLE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Going:
    """What of an attempt is going on."""

    waits: Mapping[str, float]  # steps that its clients are held by: sleeps and waits, and for how many seconds so far
    others: int  # requests that are answered, and calls to upstreams
    local: int  # local steps that it has begun and not finished
    quiet: float  # seconds since anything came from it


def held(going: Going, hold: float, quiet: float) -> tuple[str, ...]:
    """The steps that the run may park on; none: it may not.

    Each sleep or wait must have been held for *hold* seconds, and nothing have come for *quiet* seconds.
    """
    still = not going.others and not going.local and going.quiet >= quiet
    return tuple(going.waits) if still and all(since >= hold for since in going.waits.values()) else ()


def works(used_before: float, used_now: float, seconds: float) -> bool:
    """Whether processes whose processor time went from *used_before* to *used_now* within *seconds* do something."""
    return used_now - used_before > seconds * IDLE_SHARE
