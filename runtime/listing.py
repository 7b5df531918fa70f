"""Runs in a list: filtered, the newest first, in pages that do not shift when runs are added.

A page ends with a cursor, the place of its last run in the order. The next page holds what comes behind that place: no
run twice, and none left out that was there when the first page was read.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from runtime import shown
from runtime.database import Connection, sql
from runtime.errors import NotFound, UsageError
from runtime.runs import in_transaction
from runtime.shown import RunRow
from runtime.step import RunStatus

#: What a cursor may be.
CURSOR = re.compile(r"[0-9]{1,17}(\.([2-7][0-9a-f]){1,200})+")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Filters:
    """Which runs; what is None, or empty, lets all pass. *attributes*: all of these; *created_after*: then or later."""

    status: RunStatus | None = None
    agent: str | None = None
    attributes: Sequence[tuple[str, str]] = ()
    created_after: datetime | None = None
    created_before: datetime | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Some runs, without input and result. ``next``: the cursor of the page behind it; None: this is the last one."""

    runs: list[RunRow]
    next: str | None


@in_transaction
async def page(connection: Connection, filters: Filters, *, limit: int, cursor: str | None = None) -> Page:
    """A page of at most *limit* runs. Raises UsageError for what is no cursor."""
    behind = [None, None] if cursor is None else read_cursor(cursor, keys=1)
    # Which index serves depends on the filters that are given: no plan is right for all of them.
    await connection.execute(sql("custom_plans"))
    rest = (filters.status, filters.agent, filters.created_after, filters.created_before, *behind, limit + 1)
    if filters.attributes:
        names, values = zip(*filters.attributes, strict=True)
        found = await connection.fetch(sql("runs_of_attributes"), *rest, names, values)
    else:
        found = await connection.fetch(sql("runs"), *rest)
    runs = [shown.run(row) for row in found[:limit]]
    return Page(runs, make_cursor(runs[-1].created_at, runs[-1].id) if len(found) > limit else None)


@in_transaction
async def line(connection: Connection, run_id: str) -> RunRow:
    """One run, without input and result. Raises NotFound."""
    row = await connection.fetchrow(sql("run_line"), run_id)
    if row is None:
        raise NotFound(f"there is no run {run_id!r}; twiceshy runs lists them")
    return shown.run(row)


@in_transaction
async def newest(connection: Connection, run_id: str) -> RunRow:
    """The run, or the one that it was continued as in the end; without input and result. Raises NotFound."""
    return await line(connection, await connection.fetchval(sql("newest"), run_id) or run_id)


@dataclass(frozen=True, slots=True)
class Event:
    """An event as it was sent. ``sent``: its place in the run; ``taken_by``: the step that took it."""

    name: str
    id: str
    payload: bytes
    at: datetime
    taken_by: str | None
    sent: int


@in_transaction
async def events(connection: Connection, run_id: str, *, behind: int, limit: int) -> list[Event]:
    """The first events of the run behind a place, in the order in which they came."""
    return [
        Event(row["name"], row["id"], row["payload"], row["at"], row["consumed_by"], row["sent"])
        for row in await connection.fetch(sql("events"), run_id, behind, limit)
    ]


def make_cursor(at: datetime, *keys: str) -> str:
    """A place in a list as a word that nobody need understand: microseconds, and the bytes of each key."""
    moment = (at - _EPOCH) // timedelta(microseconds=1)
    return ".".join([str(moment), *(key.encode("ascii").hex() for key in keys)])


def read_cursor(cursor: str, *, keys: int) -> list[Any]:
    """The place that *cursor* stands for: a moment and so many keys. Raises UsageError."""
    moment, *found = cursor.split(".")
    if not CURSOR.fullmatch(cursor) or len(found) != keys:
        raise UsageError("cursor: not one that a page ended with")
    return [_EPOCH + timedelta(microseconds=int(moment)), *(bytes.fromhex(key).decode("ascii") for key in found)]
