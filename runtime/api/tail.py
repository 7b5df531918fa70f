"""The live tail of a run, as server-sent events.

``step``, ``answer`` and ``event`` come in the order in which the run's counter counted them, each with its place as
``id``: a client that lost the connection sends the last one as ``Last-Event-ID``, and gets what came after it. ``run``
says how the run stands, at the beginning and whenever that changes; ``end`` that nothing more will come here.
"""

import asyncio
import contextlib
import time
from typing import Any

from aiohttp import web

from runtime import listing, runs
from runtime.api import answers, asked
from runtime.api.call import Call
from runtime.api.json_text import encode
from runtime.api.of_runs import AWAY, line
from runtime.api.problems import Problem
from runtime.api.routes import Routes
from runtime.database import Connection, sql
from runtime.errors import DatabaseAway
from runtime.shown import RunRow

ROUTES = Routes("shown")

#: Lines of one look.
AT_ONCE = 500
#: Seconds after which a comment tells that the connection is alive.
SILENCE = 15.0
#: Seconds for a client to take what was sent; then it is cut off, and may resume.
PATIENCE = 30.0
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
#: What of a line is told, by what it is.
_MEMBERS = {
    "step": ("key", "attempt", "kind", "name", "method", "url", "effect", "at"),
    "answer": ("key", "attempt", "status", "finality", "tokens", "at"),
    "event": ("name", "at"),
}


@ROUTES.add("GET", "/v1/runs/{run}/tail", {200: "text/event-stream"}, problems=(404, 429))
async def tail_run(call: Call, path: asked.OfRun, headers: asked.LastEventId) -> web.StreamResponse:
    """Follow a run live, as server-sent events.

    `step`, `answer` and `event` carry an `id`; with the last one as `Last-Event-ID` the tail goes on behind it. `run`
    tells how the run stands, `end` that this tail is over: the run has ended, or `api_tail_max` has passed.
    """
    house = call.house
    async with call.connection() as connection:
        await listing.line(connection, path.run)
    if house.tails >= call.settings.api_tails:
        raise Problem(429, f"this process serves {house.tails} tails, which is api_tails", headers={"Retry-After": "5"})
    house.tails += 1
    try:
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(call.http)
        with contextlib.suppress(ConnectionError, TimeoutError):  # the client is gone, or takes nothing
            await _Tail(call, path.run, int(headers.last_event_id or 0), response).follow()
        return response
    finally:
        house.tails -= 1


class _Tail:
    def __init__(self, call: Call, run: str, place: int, response: web.StreamResponse) -> None:
        self._call = call
        self._run = run
        self._place = place
        self._response = response
        self._told: answers.RunLine | None = None

    async def follow(self) -> None:
        house, known = self._call.house, None
        until = time.monotonic() + self._call.settings.api_tail_max
        while True:
            try:
                async with self._call.connection() as connection:
                    row, lines = await _look(connection, self._run, self._place)
            except DatabaseAway:
                if time.monotonic() > until or house.ending.is_set():
                    return  # without an end: the client resumes
                await asyncio.sleep(AWAY)
                continue
            for each in lines:
                members = {name: each[name] for name in _MEMBERS[each["what"]]}
                if each["what"] == "event":
                    members["id"] = each["key"]
                await self._send(each["what"], members, each["place"])
                self._place = each["place"]
            if len(lines) == AT_ONCE:
                continue
            if (shown := line(row)) != self._told:
                self._told = shown
                await self._send("run", shown)
            left = until - time.monotonic()
            if row.status.ended or left <= 0 or house.ending.is_set():
                await self._send("end", {"status": row.status, "ended": row.status.ended})
                return
            look = await house.watch.changed(self._run, known, min(SILENCE, left))
            if look is None:
                await self._write(": nothing new\n\n")
            known = look or known

    async def _send(self, what: str, content: Any, place: int | None = None) -> None:
        name = "" if place is None else f"id: {place}\n"
        await self._write(f"{name}event: {what}\ndata: {encode(content).decode('utf-8')}\n\n")

    async def _write(self, text: str) -> None:
        async with asyncio.timeout(PATIENCE):
            await self._response.write(text.encode("utf-8"))


@runs.in_transaction
async def _look(connection: Connection, run: str, place: int) -> tuple[RunRow, list[Any]]:
    # The run comes first: what it says is never newer than the lines that follow it.
    row = await listing.line(connection, run)
    return row, await connection.fetch(sql("tail"), run, place, AT_ONCE)
