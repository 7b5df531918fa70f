"""Runs: started, listed, shown, waited for, and what a person decides of them."""

import asyncio
import math
import socket
import time
from typing import Any

from runtime import attributes, events, forks, listing, queue, runs, settling, verbs
from runtime.agents import check_input, declared
from runtime.api import answers, asked
from runtime.api.call import Call
from runtime.api.json_text import stored
from runtime.api.problems import Problem
from runtime.api.routes import Answer, Routes
from runtime.errors import DatabaseAway, Held, UsageError
from runtime.shown import RunRow
from runtime.step import RunStatus

ROUTES = Routes("runs")
_NULL = b"null"
#: Seconds between two tries of who waits, while the database is away.
AWAY = 0.5


def line(row: RunRow) -> answers.RunLine:
    """A run as lists show it."""
    return answers.RunLine(**_shown(row))


def whole(row: RunRow) -> answers.Run:
    """A run as it is shown alone."""
    return answers.Run(**_shown(row), input=stored(row.input), result=stored(row.result))


def _shown(row: RunRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "agent": row.agent,
        "status": row.status,
        "error": row.error,
        "attempts": row.attempt,
        "priority": row.priority,
        "attributes": row.attributes,
        "created_at": row.created_at,
        "changed_at": row.changed_at,
        "ended_at": row.ended_at,
        "stop": answers.Stop(step=row.stop_step, message=row.stop_message) if row.status.stopped else None,
        "parked": answers.ParkedUntil(until=row.wake_at, events=list(row.wake_on or ()))
        if row.status is RunStatus.PARKED
        else None,
        "parent": row.parent,
        "continued_from": row.continued_from,
        "continued_as": row.continued_as,
    }


@ROUTES.add("POST", "/v1/runs", {201: answers.Run, 200: answers.Run}, problems=(404, 409), gives={"run": "/id"})
async def start_run(call: Call, headers: asked.IdempotencyKey, body: asked.StartRun) -> Answer:
    """Start a run, once.

    It is queued for the workers. Equal starts under one `Idempotency-Key` are one run; another start under that key is
    refused with 409. The agent must be declared, and the input fit its schema.
    """
    try:
        table = declared(call.house.agents(), body.agent)
    except UsageError as error:
        raise Problem(404, str(error)) from error
    given = call.raw.get("input")
    given = None if given == _NULL else given
    if given is not None and len(given) > call.settings.input_max:
        raise Problem(413, f"the input has {len(given)} bytes, more than input_max ({call.settings.input_max})")
    await asyncio.to_thread(check_input, body.agent, table, given)  # a large one takes seconds
    async with call.connection() as connection:
        started = await queue.start_once(
            connection, body.agent, given, run_id=body.run, key=headers.idempotency_key, priority=body.priority,
            attributes=body.attributes,
        )  # fmt: skip
        row = await runs.get_run(connection, started.run)
    return Answer(whole(row), 201 if started.fresh else 200, {"Location": f"/v1/runs/{row.id}"})


@ROUTES.add("GET", "/v1/runs", {200: answers.RunPage})
async def list_runs(call: Call, query: asked.RunFilters) -> Answer:
    """List runs, the newest first.

    In pages that do not shift when runs are added: `next` is the `cursor` of the page behind. Without input and result.
    """
    filters = listing.Filters(
        query.status, query.agent, [attributes.read(each) for each in query.attribute], query.created_after,
        query.created_before,
    )  # fmt: skip
    async with call.connection() as connection:
        page = await listing.page(connection, filters, limit=query.limit, cursor=query.cursor)
    return Answer(answers.RunPage(runs=[line(row) for row in page.runs], next=page.next))


@ROUTES.add("GET", "/v1/runs/{run}", {200: answers.Run}, problems=(404,))
async def get_run(call: Call, path: asked.OfRun) -> Answer:
    """Show a run."""
    async with call.connection() as connection:
        return Answer(whole(await runs.get_run(connection, path.run)))


@ROUTES.add("GET", "/v1/runs/{run}/result", {200: answers.Result, 202: answers.Result}, problems=(404,))
async def wait_for_result(call: Call, path: asked.OfRun, query: asked.Waiting) -> Answer:
    """Wait for what comes of a run.

    200 when it has ended (`done`, `failed`, `cancelled`), 202 while it goes on after `timeout` seconds. Where a run was
    continued as another one, that is waited for.
    """
    until = time.monotonic() + min(query.timeout, call.settings.api_wait_max)
    run, known = path.run, None
    while True:
        left = until - time.monotonic()
        over = left <= 0 or call.house.ending.is_set()
        try:
            async with call.connection() as connection:
                row = await listing.newest(connection, run)
                if row.status.ended:
                    result = stored((await runs.get_run(connection, row.id)).result)
                    return Answer(answers.Result(run=row.id, status=row.status, result=result, error=row.error))
        except DatabaseAway:
            if over:
                raise
            await asyncio.sleep(min(left, AWAY))
            continue
        if over:
            return Answer(answers.Result(run=row.id, status=row.status, result=None, error=row.error), 202)
        known = known if row.id == run else None
        run = row.id
        # What was read above may be older than the first look: then that is a change, and it is read once more.
        known = await call.house.watch.changed(run, known, left) or known


@ROUTES.add("GET", "/v1/runs/{run}/events", {200: answers.EventPage}, problems=(404,))
async def list_events(call: Call, path: asked.OfRun, query: asked.Paging) -> Answer:
    """List the events of a run, in the order in which they came."""
    behind = -1 if query.cursor is None else place(query.cursor)
    async with call.connection() as connection:
        await listing.line(connection, path.run)
        found = await listing.events(connection, path.run, behind=behind, limit=query.limit + 1)
    shown = [
        answers.Event(name=each.name, id=each.id, payload=stored(each.payload), at=each.at, taken_by=each.taken_by)
        for each in found[: query.limit]
    ]
    more = len(found) > query.limit
    return Answer(answers.EventPage(events=shown, next=str(found[query.limit - 1].sent) if more else None))


def place(cursor: str) -> int:
    """A place in the order of one run's steps, answers and events."""
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= 18):
        raise Problem(422, "query.cursor: not one that a page ended with")
    return int(cursor)


@ROUTES.add("POST", "/v1/runs/{run}/events", {201: answers.EventSent, 200: answers.EventSent}, problems=(404, 409))
async def send_event(call: Call, path: asked.OfRun, body: asked.SendEvent) -> Answer:
    """Send a run an event.

    It may come before, during or after the wait for it, and is taken once. 200: it was sent before, under this `id` and
    with this payload; under it another payload is refused with 409.
    """
    payload = call.raw.get("payload") or _NULL
    async with call.connection() as connection:
        sent = await events.send(connection, path.run, body.name, payload, body.id, limit=call.settings.payload_max)
    return Answer(answers.EventSent(name=body.name, id=sent.id, fresh=sent.fresh), 201 if sent.fresh else 200)


@ROUTES.add("POST", "/v1/runs/{run}/cancel", {200: answers.Standing}, problems=(404, 409))
async def cancel_run(call: Call, path: asked.OfRun) -> Answer:
    """End a run, however it stands.

    Its attempt is ended, and refused from now on. What has left already is recorded. 409: it is done or failed.
    """
    async with call.connection() as connection:
        was = await verbs.cancel(connection, path.run)
    return Answer(answers.Standing(run=path.run, status=RunStatus.CANCELLED, was=was))


@ROUTES.add("POST", "/v1/runs/{run}/retry", {200: answers.Standing}, problems=(404, 409))
async def retry_run(call: Call, path: asked.OfRun) -> Answer:
    """Let a failed, cancelled or diverged run go on from its journal.

    `ambiguous` afterwards: it is not known whether one of its effects was made, and a person must say so first.
    """
    async with call.connection() as connection:
        status = await verbs.retry(connection, path.run)
        row = await runs.get_run(connection, path.run)
        if row.for_workers and status is RunStatus.QUEUED:
            await queue.hint(connection, row.id)
    return Answer(answers.Standing(run=path.run, status=status))


@ROUTES.add("POST", "/v1/runs/{run}/claim", {200: answers.Claimed}, problems=(404, 409))
async def claim_run(call: Call, path: asked.OfRun) -> Answer:
    """Claim a run, to start its agent by other means than a worker.

    The token is the password of the run at the proxy; the attempt before is fenced. 409, with `Retry-After`: it may be
    alive still.
    """
    try:
        async with call.connection() as connection:
            claimed = await runs.claim(
                connection, path.run, kind="claim", host=socket.gethostname(), folder="", lease=call.settings.lease
            )
    except Held as error:
        raise Problem(409, str(error), headers={"Retry-After": str(math.ceil(error.wait))}) from error
    return Answer(answers.Claimed(run=claimed.run_id, attempt=claimed.n, token=claimed.token))


@ROUTES.add("POST", "/v1/runs/{run}/fork", {201: answers.Forked, 200: answers.Forked}, problems=(404, 409))
async def fork_run(call: Call, path: asked.OfRun, body: asked.ForkRun) -> Answer:
    """Fork a run before one of its steps.

    A new run gets what was answered before that step, and does the rest anew, under new keys. 200: a preview.
    """
    try:
        async with call.connection() as connection:
            made = await forks.fork(connection, path.run, before=body.before, run_id=body.run, preview=body.preview)
    except UsageError as error:  # it has no such step, so far
        raise Problem(409, str(error)) from error
    shown = answers.Forked(
        run=made.run,
        replayed=[answers.ForkStep(n=step.n, key=step.key, shown=step.shown) for step in made.replayed],
        sent=[answers.ForkStep(n=step.n, key=step.key, shown=step.shown) for step in made.sent],
    )
    return Answer(shown, 200 if made.run is None else 201)


@ROUTES.add("POST", "/v1/runs/{run}/steps/{step}/resolve", {200: answers.Standing}, problems=(404, 409))
async def resolve_step(call: Call, path: asked.OfStep, body: asked.Resolve) -> Answer:
    """Settle a step whose outcome is not known.

    Settling the last open one lets the run go on.
    """
    answer = body.root
    given = settling.Given() if isinstance(answer, asked.SendAgain) else _given(answer, call.raw.get("body"))
    async with call.connection() as connection:
        status = await settling.settle(connection, path.run, path.step, answer.how, given, call.house.assume)
        if status is RunStatus.QUEUED and (await runs.get_run(connection, path.run)).for_workers:
            await queue.hint(connection, path.run)
    return Answer(answers.Standing(run=path.run, status=status))


def _given(answer: asked.AssumeDone, text: bytes | None) -> settling.Given:
    """What a person says that the answer was; *text*: its body, as it is written."""
    if isinstance(answer.body, str):
        try:
            text = answer.body.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Problem(422, "body.body: a lone surrogate is no text") from error
    headers = tuple((name.encode("ascii"), value.strip().encode("ascii")) for name, value in answer.headers.items())
    return settling.Given(answer.status, headers, text)
