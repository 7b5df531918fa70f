"""What an agent asks of twiceshy, each a step of its run: values, waits, other runs. Pure (``twiceshy.operation``)."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NoReturn
from uuid import UUID

from twiceshy.asking import ask, dump, seconds
from twiceshy.errors import ChildFailed, Continued, TimedOut
from twiceshy.operation import Operation
from twiceshy.steps import let_go
from twiceshy.wire import quoted


@dataclass(frozen=True, slots=True)
class Event:
    """What somebody sent to the run."""

    id: str
    name: str
    at: datetime
    payload: Any


@dataclass(frozen=True, slots=True)
class Approval:
    """What somebody decided."""

    id: str
    name: str
    approved: bool
    by: str | None
    comment: str | None
    at: datetime

    def __bool__(self) -> bool:
        return self.approved


# ---- values, recorded once


def now() -> Operation[datetime]:
    """The time, with its zone (UTC)."""
    reply = yield from ask("POST", "/now")
    return datetime.fromisoformat(reply.json()["now"])


def random() -> Operation[float]:
    """A number, at least 0 and below 1."""
    reply = yield from ask("POST", "/random")
    return float(reply.json()["random"])


def uuid4() -> Operation[UUID]:
    """A random UUID."""
    reply = yield from ask("POST", "/uuid")
    return UUID(reply.json()["uuid"])


# ---- waits


def sleep(how_long: float | timedelta | datetime) -> Operation[None]:
    """Sleep so many seconds, or until a moment (with its zone). Long sleeps hold no process."""
    yield from let_go()
    if isinstance(how_long, datetime):
        if how_long.tzinfo is None:
            raise ValueError(f"sleep until {how_long}: of which time zone?")
        yield from ask("POST", "/sleep", dump({"until": how_long.isoformat()}, "the moment"))
    else:
        yield from ask("POST", "/sleep", dump({"seconds": seconds(how_long)}, "the time"))


def wait_event(name: str, *, timeout: float | timedelta | None = None) -> Operation[Event]:
    """The next event *name* that nobody has taken; raises TimedOut where none came in time."""
    yield from let_go()
    said = (yield from ask("POST", f"/events/{quoted(name)}/wait", _limit(timeout))).json()
    if said.get("timeout"):
        raise TimedOut(f"no event {name!r} came within {timeout}")
    event = said["event"]
    return Event(event["id"], event["name"], datetime.fromisoformat(event["at"]), event["payload"])


def wait_approval(name: str, request: Any = None, *, timeout: float | timedelta | None = None) -> Operation[Approval]:
    """Ask people for a decision, and wait for it; *request*: what they are shown. Raises TimedOut."""
    yield from let_go()
    limit = None if timeout is None else seconds(timeout)
    body = dump({"timeout": limit, "request": request}, f"the request of approval {name}")
    said = (yield from ask("POST", f"/approvals/{quoted(name)}/wait", body)).json()
    if said.get("timeout"):
        raise TimedOut(f"nobody decided {name!r} within {timeout}")
    made = said["approval"]
    return Approval(
        made["id"], made["name"], made["decision"] == "approve", made.get("by"), made.get("comment"),
        datetime.fromisoformat(made["at"]),
    )  # fmt: skip


# ---- this run


def input() -> Operation[Any]:  # noqa: A001 - what agents call it
    """What the run was started with."""
    reply = yield from ask("GET", "/run")
    return reply.json()["input"]


def set_result(value: Any) -> Operation[None]:
    """Keep *value* as the run's result; the last one counts."""
    yield from ask("PUT", "/result", dump(value, "the result"))


def should_continue_as_new() -> Operation[bool]:
    """Whether the run's journal has grown so long that it should go on as a new one."""
    reply = yield from ask("GET", "/run")
    return bool(reply.json().get("should_continue_as_new", False))


def continue_as_new(given: Any = None) -> Operation[NoReturn]:
    """End this run, and go on as a new one with *given* as its input and the events that nobody has read."""
    reply = yield from ask("POST", "/continue", dump({"input": given}, "the input"))
    raise Continued(f"this run goes on as run {reply.json()['run']}")


# ---- other runs


def start(agent: str, given: Any = None, *, priority: int | None = None) -> Operation[str]:
    """Start a run of *agent*, done by a worker wherever; its id. ``[agents.NAME] children`` says who may."""
    body = {"agent": agent, "input": given, **({} if priority is None else {"priority": priority})}
    reply = yield from ask("POST", "/runs", dump(body, f"the input of {agent}"))
    return str(reply.json()["run"])


def result(run: str, *, timeout: float | timedelta | None = None) -> Operation[Any]:
    """Wait for the result of *run*, which this run has started. Raises ChildFailed, TimedOut."""
    yield from let_go()
    said = (yield from ask("POST", f"/runs/{quoted(run)}/wait", _limit(timeout))).json()
    if said.get("timeout"):
        raise TimedOut(f"run {run} did not end within {timeout}")
    if said["status"] != "done":
        raise ChildFailed(run, said["status"], said.get("error"))
    return said["result"]


def _limit(timeout: float | timedelta | None) -> bytes | None:
    return None if timeout is None else dump({"timeout": seconds(timeout)}, "the time limit")
