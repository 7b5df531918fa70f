"""The idempotency key of a step on the wire: whose it is, and where it goes. Pure."""

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from proxy.message import Headers, Request
from proxy.profiles import Rule


@dataclass(frozen=True, slots=True)
class KeyChoice:
    """The key that goes out. ``name`` None: leave the request as it is."""

    name: str | None
    value: str | None
    #: chosen: the program's own. random: an SDK's, the first of this step. pinned: journalled, put over a
    #: random one or put where none is. derived: ours.
    source: Literal["none", "chosen", "pinned", "random", "derived"]


@dataclass(frozen=True, slots=True)
class RetrySignal:
    """What a request says of itself: ``again``: it is a retry. ``token``: equal in all tries of one call."""

    again: bool
    token: bytes | None


def is_random(value: bytes) -> bool:
    """True for a key that an SDK made up: a UUID of any version, alone or behind an SDK's prefix."""
    raise NotImplementedError


def signed(request: Request) -> bool:
    """True if the request carries a signature over itself: never rewritten, never sent late."""
    raise NotImplementedError


def derive(secret: bytes, run_uuid: UUID, step_key: str) -> str:
    """The step's own key: a UUID with version-4 bits that nobody without *secret* can guess."""
    raise NotImplementedError


def choose(request: Request, rule: Rule, pinned: str | None, derived: str) -> KeyChoice:
    """Say which key goes out with *request*. *pinned*: the one journalled with the step, if any."""
    raise NotImplementedError


def place(headers: Headers, choice: KeyChoice) -> Headers:
    """*headers* with exactly one header of the chosen name."""
    raise NotImplementedError


def retry_signal(request: Request, rule: Rule) -> RetrySignal:
    """Read the marks that SDKs put on their own retries."""
    raise NotImplementedError
