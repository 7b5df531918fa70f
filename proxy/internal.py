"""``http://twiceshy.internal/``: what an agent or its launcher asks the sidecar itself (DESIGN §6).

GET  /run       this run: id, attempt, agent, input, how many steps it has, and what it continues
GET  /attempt   what the attempt did so far (runtime.tape), how many exchanges are still out, and since
                when nothing came from it, in seconds (a question of its launcher's)
GET  /steps/KEY what is recorded of a local step; 204 while that is open
PUT  /steps/KEY what came of a local step (proxy.permits): {"output": …}, {"error": …}, or {"error": …, "again": true}
POST /steps/KEY/heartbeat   the step is being done; {"progress": …}: how far it is
POST /continue  the run is done, and goes on as another one (proxy.continuing)
PUT  /result    the run's result, JSON; the last one counts. An attempt that no launcher watches ends with it as done

``doctor.twiceshy.internal``, and any name below it, answers every GET with who is speaking and who answers: whoever
gets that was led here, for no DNS knows the name (``twiceshy doctor``).
"""

import asyncio
import functools
import json
from urllib.parse import unquote

from proxy.attempts import Attempts
from proxy.continuing import continue_as_new
from proxy.identity import INTERNAL
from proxy.incoming import Head
from proxy.message import Request
from proxy.permits import Permits
from proxy.refusals import Refusal, ways_out
from proxy.run import Run
from runtime import payload
from runtime.errors import UsageError
from runtime.journal import Journal
from runtime.settings import Settings

DOCTOR = f"doctor.{INTERNAL}"
#: A result larger than this is read beside the event loop: all other runs would wait for it.
_OFF_LOOP = 256 << 10
#: The head of an answer that says something.
TOLD = Head(200, b"OK", ((b"Content-Type", b"application/json"),))


async def answer(
    run: Run, request: Request, attempts: Attempts, journal: Journal, permits: Permits, settings: Settings
) -> tuple[Head, bytes]:
    """Answer *request* of *run*. Raises DatabaseAway."""
    found: bytes | Refusal | tuple[Head, bytes]
    match request.method, request.path:
        case method, path if request.host != INTERNAL:
            found = _met(run, request) or Refusal("not-found", f"There is no {method} {path} at {request.host}.")
        case "GET", "/attempt":
            await attempts.save(run)
            found = json.dumps(run.report() | {"idle": run.idle}).encode("ascii")
        case "GET", "/run":
            found = await _about(run, journal, settings)
        case "POST", path if path.startswith("/steps/") and path.endswith("/heartbeat"):
            key = unquote(path.removeprefix("/steps/").removesuffix("/heartbeat"))
            found = await permits.beat(run, key, request.body)
        case "GET", path if path.startswith("/steps/"):
            found = await permits.recorded(run, unquote(path.removeprefix("/steps/")))
        case "PUT", path if path.startswith("/steps/"):
            found = await permits.finish(run, unquote(path.removeprefix("/steps/")), request.body)
        case "POST", "/continue":
            found = await continue_as_new(run, request.body, journal, settings)
        case "PUT", "/result":
            found = await _result(run, request.body, attempts, journal, settings.result_max)
        case method, path:
            found = Refusal("not-found", f"There is no {method} {path} at twiceshy.internal.", run.run_id)
    if isinstance(found, Refusal):
        return Head(found.status, found.reason, found.headers()), found.body()
    if isinstance(found, tuple):
        return found
    return Head(204, b"No Content", ()) if not found else TOLD, found


def is_of_launchers(request: Request) -> bool:
    """Whether *request* is a launcher's question, which is no sign of life of its agent."""
    return (request.host, request.method, request.path) == (INTERNAL, "GET", "/attempt")


async def _about(run: Run, journal: Journal, settings: Settings) -> bytes:
    row = await journal.about(run.run_id)
    assert row is not None
    # What this attempt has asked for, not what the journal has: a restarted agent is told so where it was told before,
    # and not at its first look, when it has yet to remember what it did.
    asked_for = sum(step.claimed for step in run.tape.steps.values())
    shown = {
        "run": run.run_id, "attempt": run.tape.attempt, "agent": row["agent"], "steps": row["steps"],
        "should_continue_as_new": asked_for >= settings.continue_after,
        "continued_from": row["continued_from"],
    }  # fmt: skip
    return json.dumps(shown)[:-1].encode("ascii") + b', "input": ' + (row["input"] or b"null") + b"}"


def _met(run: Run, request: Request) -> bytes:
    """Who speaks and who answers, to whoever asks for ``doctor``; else nothing."""
    if request.method != "GET" or not f".{request.host}".endswith("." + DOCTOR):
        return b""
    return json.dumps({"run": run.run_id, "attempt": run.tape.attempt, "sidecar": run.fence.sidecar}).encode("ascii")


async def _result(run: Run, body: bytes, attempts: Attempts, journal: Journal, limit: int) -> bytes | Refusal:
    if len(body) > limit:
        return Refusal(
            "body-too-large",
            f"The result of run {run.run_id} has {len(body)} bytes, more than result_max ({limit}). Nothing was taken: "
            "keep it elsewhere, and say where as the result.",
            run.run_id,
        )
    read = functools.partial(payload.read, body, len(body), "the result")
    try:
        read() if len(body) <= _OFF_LOOP else await asyncio.to_thread(read)
    except UsageError as error:
        return Refusal("bad-request", f"{error}. Nothing was taken.", run.run_id)
    if run.stale:
        return Refusal(
            "no-attempt",
            f"The result of run {run.run_id} is not taken: {run.stale}. {ways_out(run.run_id)}",
            run.run_id,
        )
    if await journal.put_result(run.fence, body):
        await attempts.finish(run)
        return b""
    return await attempts.confirmed(run) or Refusal("internal", "The result was not taken; try again.", run.run_id)
