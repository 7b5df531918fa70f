"""One request to twiceshy, and what its answer means. Pure: generators that ``twiceshy.drive`` carries out.

A request whose answer got lost is asked again, as the same step. Refusals become exceptions with the sidecar's words.
"""

import dataclasses
import json
from collections.abc import Mapping
from datetime import date, timedelta
from typing import Any
from uuid import UUID, uuid4

from twiceshy import wire
from twiceshy.errors import STOPS, Refused, Unreachable
from twiceshy.operation import Operation, Pause, Try

#: How often a request is tried whose answer got lost, or that found the database away. With the pauses between them:
#: a quarter of a minute, and the time for which the sidecar itself holds requests while its database is away.
TRIES = 8


def ask(method: str, path: str, body: bytes | None = None, *, key: str | None = None) -> Operation[wire.Reply]:
    """Ask the sidecar. *key*: a name of the step's own."""
    # Equal in all tries of this one request, and by chance: so that a try is known, however many others are equal.
    headers = {"Idempotency-Key": str(uuid4())} if method == "POST" else {}
    if key is not None:
        headers["Twiceshy-Step"] = key
    return (yield from insist(wire.Ask(method, wire.INTERNAL + path, body, headers)))


def insist(what: wire.Ask) -> Operation[wire.Reply]:
    """Ask until there is an answer, and judge it."""
    problem = ""
    for again in range(TRIES):
        if again:
            yield Pause(min(0.1 * 2**again, 5.0))
        try:
            reply: wire.Reply = yield Try(what, again)
        except (OSError, wire.Cut) as error:
            problem = f"{error}"
        else:
            if reply.status < 400:
                return reply
            if reply.status != 503:
                raise refused(reply)
            problem = reply.message
    raise Unreachable(f"{what.method} {what.url}, tried {TRIES} times: {problem}")


def refused(reply: wire.Reply) -> BaseException:
    """The exception that *reply*, an error, is."""
    code = reply.refusal or ""
    if code in STOPS:
        return STOPS[code](reply.message)
    return Refused(code or f"status {reply.status}", reply.message)


# ---- JSON


def dump(value: Any, what: str) -> bytes:
    """*value* as JSON. Raises TypeError that says of *what* that it is none."""
    try:
        return json.dumps(value, default=_plain, allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{what} is not JSON: {error}") from error


def _plain(value: Any) -> Any:
    """What is no JSON itself, but has one form that everybody expects."""
    if callable(made := getattr(value, "model_dump", None)):  # pydantic
        return made(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, date):  # and datetime
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def seconds(value: float | timedelta) -> float:
    """A span of time, as the agent API has it."""
    return value.total_seconds() if isinstance(value, timedelta) else value
