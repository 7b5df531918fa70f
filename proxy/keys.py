"""The idempotency key of a step on the wire: whose it is, and where it goes. Pure.

* A key that the program chose says which effect is meant: it takes part in the fingerprint and goes out.
* A key that an SDK made up is new in each process: the first one sent for a step is journalled (*pinned*) and
  put over every later one.
* Where there is none, ours is derived from the step: the same in every attempt, without being stored first.
* A signed request is left as it is.
"""

from __future__ import annotations

import hmac
import re
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


NO_KEY = KeyChoice(None, None, "none")


@dataclass(frozen=True, slots=True)
class RetrySignal:
    """What a request says of itself: ``again``: it is a retry. ``token``: equal in all tries of one call."""

    again: bool
    token: bytes | None


# Any version: Stripe's are random bytes under the name of a UUID. Quotes: the IETF draft writes them. 32 hex
# digits without dashes are not taken for random: they may be the program's own hash of what it orders.
_RANDOM = re.compile(
    rb'(?P<quote>"?)(?:stripe-node-retry-|stainless-[A-Za-z0-9_.]+-retry-)?'
    rb"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}(?P=quote)"
)
_SIGNED_AUTHORIZATION = re.compile(rb"\s*(?:AWS4-|AWS\s|Signature\s|OAuth\s|SharedKey)", re.IGNORECASE)
_SIGNED_HEADERS = ("signature-input", "x-client-signature", "x-jws-signature")
_SIGNED_QUERY = re.compile(r"(?:^|&)(?:x-amz-signature|x-goog-signature)=", re.IGNORECASE)
_ATTEMPT = re.compile(rb"\s*attempt\s*=\s*([0-9]{1,9})\s*(?:;|$)")
_COUNT = re.compile(rb"\s*0*([1-9][0-9]*)\s*")


def is_random(value: bytes) -> bool:
    """True for a key that an SDK made up: a UUID of any version, alone or behind an SDK's prefix."""
    return _RANDOM.fullmatch(value.strip(b" \t")) is not None


def signed(request: Request) -> bool:
    """True if the request carries a signature over itself: never rewritten, never sent late."""
    authorization = request.header("authorization")
    return (
        (authorization is not None and _SIGNED_AUTHORIZATION.match(authorization) is not None)
        or any(request.header(name) is not None for name in _SIGNED_HEADERS)
        or (bool(request.query) and _SIGNED_QUERY.search(request.query) is not None)
    )


def derive(secret: bytes, run_uuid: UUID, step_key: str) -> str:
    """The step's own key: a UUID with version-4 bits that nobody without *secret* can guess."""
    text = run_uuid.bytes + step_key.encode("utf-8", "surrogatepass")
    return str(UUID(bytes=hmac.digest(secret, text, "sha256")[:16], version=4))


def choose(request: Request, rule: Rule, pinned: str | None, derived: str) -> KeyChoice:
    """Say which key goes out with *request*. *pinned*: the one journalled with the step, if any."""
    if rule.key is None or signed(request):
        return NO_KEY
    name = rule.key.name
    there = [value.strip(b" \t") for value in _all(request.headers, name)]
    there = [value for value in there if value]
    for value in there:
        if not is_random(value):
            return KeyChoice(name, value.decode("latin-1"), "chosen")
    if pinned is not None:
        return KeyChoice(name, pinned, "pinned")
    if there:
        return KeyChoice(name, there[0].decode("latin-1"), "random")
    return KeyChoice(name, derived, "derived")


def place(headers: Headers, choice: KeyChoice) -> Headers:
    """*headers* with exactly one header of the chosen name, where the first of them stood, else at the end."""
    if choice.name is None or choice.value is None:
        return headers
    wanted = choice.name.lower().encode("latin-1")
    value = choice.value.encode("latin-1")
    placed: list[tuple[bytes, bytes]] = []
    done = False
    for name, old in headers:
        if name.lower() != wanted:
            placed.append((name, old))
        elif not done:
            done = True
            placed.append((name, value))
    if not done:
        placed.append((choice.name.encode("latin-1"), value))
    return tuple(placed)


def retry_signal(request: Request, rule: Rule) -> RetrySignal:
    """Read the marks that SDKs put on their own retries."""
    again = False
    for name in rule.headers.retry_count:
        value = request.header(name)
        if value is not None:
            attempt = _ATTEMPT.match(value)
            again = again or (int(attempt[1]) > 1 if attempt else _COUNT.fullmatch(value) is not None)
    names = ("idempotency-key",) if rule.key is None else (rule.key.name, "idempotency-key")
    for name in names:
        value = request.header(name)
        if value is not None and is_random(value):
            return RetrySignal(again, value.strip(b" \t"))
    for name in sorted(rule.headers.retry_id):
        value = request.header(name)
        if value is not None and value.strip():
            return RetrySignal(again, value.strip())
    return RetrySignal(again, None)


def _all(headers: Headers, name: str) -> list[bytes]:
    wanted = name.lower().encode("latin-1")
    return [value for key, value in headers if key.lower() == wanted]
