"""Named points at which the sidecar can be made to die or to stand still: for tests, of ours and of its users.

``TWICESHY_FAILPOINT=NAME[:NTH][:kill|pause]``: when the process gets to point NAME for the NTH time (default: the
first), it is SIGKILLed, or SIGSTOPped until somebody sends SIGCONT. A keeper arms the first sidecar that it starts,
not those that it starts in the place of a dead one.
"""

import os
import signal
from dataclasses import dataclass

from runtime.errors import UsageError

VARIABLE = "TWICESHY_FAILPOINT"

#: All points, in the order in which a request that is sent comes to them.
POINTS = {
    "claimed": "an attempt is bound to this sidecar, and its journal read",
    "read-whole": "a request is read whole; nothing is decided",
    "before-intent": "it is decided that a request is sent; its intent is not written (never for a read)",
    "intent-written": "the intent is committed; nothing is sent (never for a read)",
    "before-first-byte": "the connection to the upstream stands; the next thing is the request",
    "request-written": "the kernel has the request (of a large one: its first part)",
    "head-received": "the answer's head is here",
    "half-streamed": "a piece of the answer's body is here; clients may have it",
    "marker-seen": "the terminal event of a known dialect is here; it is held back",
    "end-held": "a client has all of the answer but its end, which waits for the record",
    "before-record": "the answer is here whole; it is not recorded",
    "recorded": "the answer is recorded; no client has its end",
    "delivered": "a client's kernel has acknowledged the end",
}


@dataclass(slots=True)
class Armed:
    """What happens at one point."""

    name: str
    nth: int = 1
    number: int = signal.SIGKILL
    passed: int = 0

    def reach(self, name: str) -> None:
        if name != self.name:
            return
        self.passed += 1
        if self.passed == self.nth:
            os.kill(os.getpid(), self.number)


_armed: Armed | None = None


def read(text: str) -> Armed:
    """Parse the variable's value. UsageError names what is wrong and what there is."""
    name, *rest = text.split(":")
    if name not in POINTS:
        raise UsageError(f"{VARIABLE}={text}: there is no point {name!r}; there are: {', '.join(POINTS)}")
    armed = Armed(name)
    if rest and rest[0].isdecimal():
        armed.nth = int(rest.pop(0))
    if rest:
        how = rest.pop(0)
        if how not in ("kill", "pause"):
            rest = [how]
        elif how == "pause":
            armed.number = signal.SIGSTOP
    if rest or armed.nth < 1:
        raise UsageError(f"{VARIABLE}={text}: it reads NAME[:NTH][:kill|pause], NTH from 1")
    return armed


def arm() -> None:
    """Take the variable of this process. UsageError."""
    global _armed
    text = os.environ.get(VARIABLE)
    _armed = read(text) if text else None


def armed(name: str) -> bool:
    """True if something happens at point *name*: for those that cost something to see."""
    return _armed is not None and _armed.name == name


def reach(name: str) -> None:
    """The process is at point *name*."""
    if _armed is not None:
        _armed.reach(name)
