"""How often a local step may be begun, and how long it may take each time. Pure (DESIGN §6).

``max_tries``          permits in all; after the last one that nothing came of, that is recorded as the step's outcome
``timeout``            seconds from a permit to its output
``heartbeat_timeout``  seconds from a permit, or a heartbeat, to the next heartbeat or the output

They are no part of what the step is: a program that says more next time still means the same step.
"""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from runtime.errors import UsageError

FIELDS = ("max_tries", "timeout", "heartbeat_timeout")
#: What a rule ignores of the step's request.
IGNORED = tuple(f"$.{name}" for name in FIELDS)
TRIES_MAX = 1_000_000
#: A year, in seconds.
TIMEOUT_MAX = 366 * 86400.0


@dataclass(frozen=True, slots=True)
class Policy:
    """None: no limit."""

    max_tries: int | None = None
    timeout: float | None = None
    heartbeat_timeout: float | None = None

    def spent(self, tries: int) -> bool:
        """Whether a step that was begun *tries* times is not begun again."""
        return self.max_tries is not None and tries >= self.max_tries


NO_LIMITS = Policy()


@dataclass(slots=True)
class Permit:
    """A local step that its attempt does, and may hand in under ``exchange``. Times: seconds, monotonic."""

    exchange: UUID
    policy: Policy
    transaction: bool = False  # recorded by ``twiceshy.record_step``, in a transaction of the agent's own
    token: str | None = None  # with this
    given: float = 0.0
    beaten: float = 0.0

    def due(self) -> tuple[float, str] | None:
        """When its time is up, and what that means; None: never."""
        limits = []
        if self.policy.timeout is not None:
            limits.append((self.given + self.policy.timeout, f"took longer than timeout = {self.policy.timeout:g} s"))
        if self.policy.heartbeat_timeout is not None:
            words = f"was not heard of for heartbeat_timeout = {self.policy.heartbeat_timeout:g} s"
            limits.append((self.beaten + self.policy.heartbeat_timeout, words))
        return min(limits, default=None)


def read(given: dict[str, Any]) -> Policy:
    """The policy in the body of a step's request. Raises UsageError."""
    tries = given.get("max_tries")
    if tries is not None and (type(tries) is not int or not 1 <= tries <= TRIES_MAX):
        raise UsageError(f"max_tries: a whole number from 1 to {TRIES_MAX}")
    return Policy(tries, _seconds("timeout", given), _seconds("heartbeat_timeout", given))


def _seconds(name: str, given: dict[str, Any]) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value <= TIMEOUT_MAX:
        raise UsageError(f"{name}: a number of seconds above 0, up to {TIMEOUT_MAX:.0f}")
    return float(value)


def gave_up(run: str, key: str, name: str, tries: int, policy: Policy) -> str:
    """The outcome of a step that was begun often enough."""
    times = "once" if tries == 1 else f"{tries} times"
    return (
        f"Step {key} of run {run} (local {name}) was begun {times} (max_tries = {policy.max_tries}), and nothing came "
        "of it: its process died, was ended, or never said"
    )
