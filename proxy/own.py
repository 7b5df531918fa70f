"""Which requests to twiceshy.internal are steps, what they ask for, and how they are answered. Pure (DESIGN §6).

GET, POST  /now, /random, /uuid   a value, recorded once
POST       /sleep                 {"seconds": 3.5} or {"until": "2026-01-31T09:00:00Z"}
POST       /events/NAME/wait      {"timeout": seconds or null}, or no body
POST       /approvals/NAME/wait   {"timeout": seconds or null, "request": …}, or no body
POST       /runs                  {"agent": …, "input": …, "priority": n}: a child run, started once
POST       /runs/ID/wait          {"timeout": seconds or null}, or no body: for its end
POST       /steps                 {"name": …, "input": …, "at_most_once": false}: what the agent does itself; with
                                  "transaction": true what it records by SQL; how often and how long: ``proxy.policy``

They go through the journal as requests do that leave the house, under keys of the same kind; only the upstream is the
sidecar. Bodies are JSON whatever their content type says: curl calls everything a form.
"""

import base64
import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from typing import Any
from urllib.parse import unquote

from proxy import policy
from proxy.message import Request
from proxy.policy import NO_LIMITS, Policy
from proxy.profiles import Rule
from proxy.refusals import Refusal
from runtime import payload
from runtime.entries import ChildEnd, Decision, Event, Own
from runtime.errors import UsageError
from runtime.names import PRIORITY_MAX, check_name, shortened
from runtime.step import Effect, Kind
from runtime.tokens import check_id

#: The longest wait, in seconds: a hundred years, which every calendar can count.
SECONDS_MAX = 100 * 366 * 86400.0
#: The most random bytes in one value.
RANDOM_BYTES_MAX = 4096
VALUES = ("now", "random", "uuid")


@dataclass(frozen=True, slots=True)
class Asked:
    """A step that was asked for, and the rule it is under. ``size``: of a random value, in bytes; None: a number.

    Of a local step: ``transaction``: its output is recorded by SQL; ``token``: with what. Of a child run: ``input``,
    ``priority``. ``refused``: why there may be no new step of it.
    """

    own: Own
    rule: Rule
    size: int | None = None
    input: bytes | None = None
    priority: int | None = None
    refused: Refusal | None = None
    policy: Policy = NO_LIMITS
    transaction: bool = False
    token: str | None = None


def read(request: Request, limit: int) -> Asked | Refusal | None:
    """What *request*, to twiceshy.internal, asks for; None: no step. *limit*: bytes of its body (payload_max)."""
    parts = request.path.strip("/").split("/")
    try:
        match request.method, parts:
            case "GET" | "POST", [name] if name in VALUES:
                return _value(name, _body(request, limit))
            case "POST", ["sleep"]:
                return _sleep(_body(request, limit))
            case "POST", ["events", name, "wait"]:
                return _wait(check_name("event", unquote(name)), _body(request, limit))
            case "POST", ["approvals", name, "wait"]:
                return _approval(check_name("approval", unquote(name)), _body(request, limit))
            case "POST", ["runs"]:
                return _start(request.body, _body(request, limit))
            case "POST", ["runs", run, "wait"]:
                return _child(check_id(unquote(run)), _body(request, limit))
            case "POST", ["steps"]:
                return _local(_body(request, limit))
    except UsageError as error:
        return Refusal("bad-request", f"{request.method} {request.path}: {error}.")
    return None


def as_json(request: Request) -> Request:
    """*request* as what it is, whatever its content type says."""
    headers = tuple(pair for pair in request.headers if pair[0].lower() != b"content-type")
    return replace(request, headers=(*headers, (b"Content-Type", b"application/json")))


def _body(request: Request, limit: int) -> dict[str, Any]:
    if not request.body.strip():
        return {}
    value = payload.read(request.body, limit, "the body")
    if not isinstance(value, dict):
        raise UsageError("the body is no JSON object")
    return value


def _only(given: dict[str, Any], *names: str) -> None:
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise UsageError(f"{shortened(unknown[0])!r} is unknown here; there is: {', '.join(names) or 'nothing'}")


def _value(name: str, given: dict[str, Any]) -> Asked:
    _only(given, *(["bytes"] if name == "random" else []))
    size = given.get("bytes")
    if size is not None and (type(size) is not int or not 1 <= size <= RANDOM_BYTES_MAX):
        raise UsageError(f"bytes: a whole number from 1 to {RANDOM_BYTES_MAX}")
    return Asked(Own(Kind.VALUE, name), _RULES[Kind.VALUE], size)


def _sleep(given: dict[str, Any]) -> Asked:
    _only(given, "seconds", "until")
    if ("seconds" in given) == ("until" in given):
        raise UsageError('either {"seconds": 3.5} or {"until": "2026-01-31T09:00:00Z"}')
    if "seconds" in given:
        own = Own(Kind.SLEEP, seconds=_seconds("seconds", given["seconds"]))
    else:
        own = Own(Kind.SLEEP, until=_moment(given["until"]))
    return Asked(own, _RULES[Kind.SLEEP])


def _wait(name: str, given: dict[str, Any]) -> Asked:
    _only(given, "timeout")
    return Asked(Own(Kind.WAIT, name, seconds=_timeout(given)), _RULES[Kind.WAIT])


def _approval(name: str, given: dict[str, Any]) -> Asked:
    _only(given, "timeout", "request")
    return Asked(Own(Kind.APPROVAL, name, seconds=_timeout(given)), _RULES[Kind.APPROVAL])


def _start(body: bytes, given: dict[str, Any]) -> Asked:
    _only(given, "agent", "input", "priority")
    agent, priority = given.get("agent"), given.get("priority")
    if not isinstance(agent, str):
        raise UsageError("agent: the name of one that is declared")
    if priority is not None and (type(priority) is not int or not -PRIORITY_MAX <= priority <= PRIORITY_MAX):
        raise UsageError(f"priority: a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX}")
    own = Own(Kind.START, check_name("agent", agent))
    return Asked(own, _RULES[Kind.START], input=payload.member(body, "input"), priority=priority)


def _child(run: str, given: dict[str, Any]) -> Asked:
    _only(given, "timeout")
    return Asked(Own(Kind.CHILD, run, seconds=_timeout(given)), _RULES[Kind.CHILD])


def _local(given: dict[str, Any]) -> Asked:
    _only(given, "name", "input", "at_most_once", "transaction", *policy.FIELDS)
    name, once, transaction = given.get("name"), given.get("at_most_once", False), given.get("transaction", False)
    if not isinstance(name, str):
        raise UsageError("a local step has a name")
    if not isinstance(once, bool):
        raise UsageError("at_most_once: true or false")
    if not isinstance(transaction, bool):
        raise UsageError("transaction: true or false")
    if once and transaction:
        raise UsageError("at_most_once is of no use to a transaction: it is done once or not at all")
    own, rule = Own(Kind.LOCAL, check_name("step", name)), _ONCE if once else _RULES[Kind.LOCAL]
    return Asked(own, rule, policy=policy.read(given), transaction=transaction)


def _timeout(given: dict[str, Any]) -> float | None:
    return None if given.get("timeout") is None else _seconds("timeout", given["timeout"])


def _seconds(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= SECONDS_MAX:
        raise UsageError(f"{name}: a number of seconds from 0 to {SECONDS_MAX:.0f}")
    assert isfinite(value)
    return float(value)


#: What was before this has passed as well, and years near the first are no business of a database's.
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


def _moment(value: Any) -> datetime:
    try:
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            raise ValueError
        return max(moment.astimezone(UTC), _LONG_AGO)
    except (TypeError, ValueError, OverflowError):
        raise UsageError("until: a moment with its offset from UTC, such as 2026-01-31T09:00:00Z") from None


# ---- rules

_RULES = {
    Kind.VALUE: Rule("twiceshy.internal value", Effect.READ),
    Kind.SLEEP: Rule("twiceshy.internal sleep", Effect.REPEATABLE),
    Kind.WAIT: Rule("twiceshy.internal wait", Effect.REPEATABLE),
    Kind.APPROVAL: Rule("twiceshy.internal approval", Effect.REPEATABLE),
    # Its id is its step's alone, so that it is started once however often that is asked for.
    Kind.START: Rule("twiceshy.internal start", Effect.REPEATABLE),
    Kind.CHILD: Rule("twiceshy.internal child", Effect.REPEATABLE),
    Kind.LOCAL: Rule("twiceshy.internal step", Effect.REPEATABLE, ignore=policy.IGNORED),
}
_ONCE = Rule("twiceshy.internal step, at most once", Effect.AT_MOST_ONCE, ignore=policy.IGNORED)


# ---- answers


def stamp(moment: datetime) -> str:
    """*moment* as RFC 3339 has it, in UTC, to the microsecond."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def now(moment: datetime) -> bytes:
    """The time."""
    return _written({"now": stamp(moment)})


def chance(number: float, data: bytes | None) -> bytes:
    """A number from 0 to 1 (without 1), or *data* as base64."""
    return _written({"random": number if data is None else base64.b64encode(data).decode("ascii")})


def uuid(name: str) -> bytes:
    """A UUID."""
    return _written({"uuid": name})


def slept(deadline: datetime | None) -> bytes:
    """The end of a sleep."""
    return _written({"slept_until": None if deadline is None else stamp(deadline)})


def started(child: str) -> bytes:
    """A child run is there."""
    return _written({"run": child})


def came(name: str, found: Event | Decision | ChildEnd | None) -> bytes:
    """The event with its payload as it was sent, a decision, how a child ended, or that none of it came in time."""
    match found:
        case None:
            return b'{"timeout": true}'
        case Event():
            head = json.dumps({"id": found.id, "name": name, "at": stamp(found.at)})
            return b'{"event": ' + head[:-1].encode("ascii") + b', "payload": ' + found.payload + b"}}"
        case ChildEnd():
            head = json.dumps({"run": name, "status": found.status, "error": found.error})
            return head[:-1].encode("ascii") + b', "result": ' + (found.result or b"null") + b"}"
        case Decision():
            said = {"decision": found.decision, "by": found.by, "comment": found.comment, "at": stamp(found.at)}
            return _written({"approval": {"id": found.id, "name": found.name, **said}})


def _written(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode("ascii")
