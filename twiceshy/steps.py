"""Steps that the agent does itself: a function between a permit and its output. Pure (``twiceshy.operation``).

What the function returns is given as it is in the journal, JSON, also the first time; and what it raises as
``StepFailed``, also the first time. So a program sees no difference between doing a step and being told of it.
"""

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from twiceshy import database, wire
from twiceshy.asking import ask, dump, seconds
from twiceshy.errors import Refused, StepFailed
from twiceshy.operation import PERMIT, Do, Never, Operation, Pause

#: The pause before a second try, in seconds; twice as long before each further one, at most a minute.
PAUSE, PAUSE_MAX = 1.0, 60.0
#: How much of an exception's words is kept, in characters.
MESSAGE_MAX = 10_000
#: How much later than the library the sidecar ends what takes too long, in seconds.
GRACE = 10.0


class Permit:
    """The right to do a step now."""

    def __init__(self, name: str, reply: wire.Reply) -> None:
        said = reply.json()
        self.name = name
        self.key: str = said["step"]
        self.idempotency_key: str = said.get("idempotency_key", "")
        self.progress: Any = said.get("progress")
        self.run: str = said.get("run", "")
        self.token: str = said.get("token", "")

    @property
    def path(self) -> str:
        return _path(self.key)


def _path(key: str) -> str:
    return f"/steps/{wire.quoted(key)}"


def step(
    name: str,
    work: Callable[..., Any],
    *args: Any,
    key: str | None = None,
    at_most_once: bool = False,
    max_tries: int | None = None,
    timeout: float | timedelta | None = None,
    heartbeat_timeout: float | timedelta | None = None,
) -> Operation[Any]:
    """Call ``work(*args)`` once, and give what it returned then, as JSON, whenever the agent comes here again.

    *name* and *args* tell it from other steps, and among equal ones their order; *key* names it outright. What it
    raises is its outcome (StepFailed), unless *max_tries* says how often it is tried. A try that takes longer than
    *timeout* is cancelled where *work* is asynchronous; else the attempt is ended, as where no heartbeat comes for
    *heartbeat_timeout*, and the next one tries again. With *at_most_once* a step of which nobody knows whether it was
    done stops the run, instead of being done again. Within *work*: ``heartbeat``, ``progress``, ``idempotency_key``.
    """
    limits = limits_of(work, max_tries, timeout, heartbeat_timeout)
    done = functools.partial(work, *args)
    return (yield from perform(name, list(args), done, limits, at_most_once=at_most_once, key=key))


def perform(
    name: str, given: Any, work: Callable[[], Any], limits: "Limits", *, at_most_once: bool = False,
    key: str | None = None,
) -> Operation[Any]:  # fmt: skip
    """The step *name* of what is *given*, which calling *work* does."""
    options = {"at_most_once": True} if at_most_once else {}
    return (yield from _done(name, given, options, limits, lambda _: work, key=key))


def limits_of(
    work: Callable[..., Any], max_tries: int | None = None, timeout: float | timedelta | None = None,
    heartbeat_timeout: float | timedelta | None = None,
) -> "Limits":  # fmt: skip
    """The limits of a step that is done by *work*."""
    heard = None if heartbeat_timeout is None else seconds(heartbeat_timeout)
    return Limits(max_tries, None if timeout is None else seconds(timeout), heard, inspect.iscoroutinefunction(work))


@dataclass(frozen=True, slots=True)
class Limits:
    """How often a step is tried, and how long. *cancelled*: the library itself can end a try that takes too long."""

    max_tries: int | None = None
    timeout: float | None = None
    heartbeat_timeout: float | None = None
    cancelled: bool = False

    def told(self) -> dict[str, Any]:
        """What the sidecar is told. Its clock starts with the permit, hence before the pause between two tries."""
        timeout = self.timeout
        if timeout is not None:
            timeout += self.pause((self.max_tries or 1) - 1) + (GRACE if self.cancelled else 0.0)
        said = {"max_tries": self.max_tries, "timeout": timeout, "heartbeat_timeout": self.heartbeat_timeout}
        return {name: value for name, value in said.items() if value is not None}

    def pause(self, failures: int) -> float:
        """How long to wait after so many failures."""
        if failures < 1:
            return 0.0
        pause = min(PAUSE * 2.0 ** min(failures - 1, 30), PAUSE_MAX)
        return pause if self.heartbeat_timeout is None else min(pause, self.heartbeat_timeout / 2)


def _done(
    name: str, given: Any, options: Mapping[str, Any], limits: Limits,
    work: Callable[[Permit], Callable[[], Any]], *, key: str | None = None, recorded: bool = False,
) -> Operation[Any]:  # fmt: skip
    """What came of the step, now or before. *recorded*: what *work* makes has recorded its output itself."""
    begin = {"name": name, "input": given, **options, **limits.told()}
    reply = yield from ask("POST", "/steps", dump(begin, f"the input of step {name}"), key=key)
    cause: Exception | None = None
    failures = 0
    while reply.status == 201:
        permit = Permit(name, reply)
        if failures:
            yield Pause(limits.pause(failures))
            if limits.heartbeat_timeout is not None:
                yield from ask("POST", f"{permit.path}/heartbeat")
        try:
            output = yield Do(work(permit), permit, limits.timeout)
            body, cause = dump({"output": output}, f"the output of step {name}"), None
        except Exception as error:
            body, cause = _failure(error, again=limits.max_tries is not None), error
            failures += 1
        except (SystemExit, KeyboardInterrupt, GeneratorExit):
            raise  # the process ends: the next attempt does it
        except BaseException:
            _CANCELLED.add(permit.path)
            raise
        if cause is None and recorded:
            return json.loads(body)["output"]
        # Where the fate of a commit is not known, the journal knows it: the first outcome counts.
        try:
            reply = yield from ask("PUT", permit.path, body)
        except Refused as error:
            if error.code != "bad-request":
                raise
            # It is too large, say. It was done all the same, and must not be done again for that.
            cause = error
            reply = yield from ask("PUT", permit.path, _failure(error, again=False))
    said = reply.json()
    if "error" in said:
        if said["error"] == _LET_GO and (mark := _mark(_path(reply.headers.get("twiceshy-step", "")))) not in _OVER:
            _OVER.add(mark)
            yield Never()  # as it was: it did not end before it was cancelled
        raise StepFailed(name, said["error"]) from cause
    return said["output"]


#: Steps whose task was cancelled (a time limit of the program's own, a task group that failed).
_CANCELLED: set[str] = set()
#: What is handed in for them. The next attempt, which comes there anew, is to see them cancelled again.
_LET_GO = {"type": "CancelledError", "message": "its task was cancelled"}
#: Those of which this attempt has seen that, and needs no more than be told.
_OVER: set[tuple[str, str]] = set()


def _mark(path: str) -> tuple[str, str]:
    return os.environ.get("TWICESHY_TOKEN", ""), path


def let_go() -> Operation[None]:
    """Hand in that nothing comes of cancelled steps, before a wait: a run with an open step cannot park.

    Not at once, for a process that ends cancels its tasks, too, and then the next attempt is to do them.
    """
    while _CANCELLED:
        path = _CANCELLED.pop()
        _OVER.add(_mark(path))
        try:
            yield from ask("PUT", path, dump({"error": _LET_GO}, "an error"))
        except Refused:
            pass  # it is not open any more


def _failure(error: Exception, *, again: bool) -> bytes:
    said: dict[str, Any] = {"error": {"type": type(error).__name__, "message": str(error)[:MESSAGE_MAX]}}
    return dump({**said, "again": True} if again else said, "an error")


# ---- within a step


def _permit(what: str) -> Permit:
    permit = PERMIT.get()
    if not isinstance(permit, Permit):
        raise RuntimeError(
            f"{what}: no step is being done here. It is for the function of a step, in the thread (or the task) that "
            "this function was called in"
        )
    return permit


def heartbeat(progress: Any = None) -> Operation[None]:
    """Within a step: it is being done; *progress*, JSON, is kept, and the next attempt's ``progress()``."""
    permit = _permit("heartbeat")
    body = None if progress is None else dump({"progress": progress}, f"the progress of step {permit.name}")
    yield from ask("POST", f"{permit.path}/heartbeat", body)
    if progress is not None:
        permit.progress = progress


def progress(default: Any = None) -> Any:
    """Within a step: what the last heartbeat kept, also that of an attempt that died; else *default*."""
    kept = _permit("progress").progress
    return default if kept is None else kept


def idempotency_key() -> str:
    """Within a step: the key to hand on, the same whenever this step is done."""
    return _permit("idempotency_key").idempotency_key


# ---- in a transaction of the agent's own


def transaction(
    name: str,
    connection: Any,
    work: Callable[..., Any],
    *args: Any,
    key: str | None = None,
    max_tries: int | None = None,
) -> Operation[Any]:
    """A step whose effect is rows in the database that twiceshy is in: they and its output are committed together.

    ``work(cursor, *args)`` with a connection of DB-API (psycopg, psycopg2, pg8000; not in autocommit), awaited with
    psycopg's AsyncConnection, ``work(connection, *args)`` with one of asyncpg.
    """
    perform = database.performer(connection)

    def within(permit: Permit) -> Callable[[], Any]:
        def parameters(output: Any) -> list[Any]:
            text = dump(output, f"the output of step {name}").decode("ascii")
            return [permit.run, permit.token, permit.key, text]

        return functools.partial(perform, connection, work, args, parameters)

    options = {"transaction": True}
    return (yield from _done(name, list(args), options, Limits(max_tries), within, key=key, recorded=True))
