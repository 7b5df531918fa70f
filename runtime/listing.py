"""Runs in a list: filtered, the newest first, in pages that do not shift when runs are added.

A page ends with a cursor, the place of its last run in the order. The next page holds what comes behind that place: no
run twice, and none left out that was there when the first page was read.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from runtime import attributes, shown
from runtime.database import Connection, sql
from runtime.errors import UsageError
from runtime.runs import in_transaction
from runtime.shown import RunRow
from runtime.step import RunStatus

#: Of a cursor, in characters: more is none of ours.
CURSOR_MAX = 1000


@dataclass(frozen=True, slots=True)
class Filters:
    """Which runs; what is None, or empty, lets all pass. ``created_after``: then or later."""

    status: RunStatus | None = None
    agent: str | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)
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
    behind = (None, None) if cursor is None else read_cursor(cursor)
    # Which index serves depends on the filters that are given: no plan is right for all of them.
    await connection.execute(sql("custom_plans"))
    rest = (filters.status, filters.agent, filters.created_after, filters.created_before, *behind, limit + 1)
    if filters.attributes:
        checked = attributes.check(filters.attributes)
        found = await connection.fetch(sql("runs_of_attributes"), *rest, list(checked), list(checked.values()))
    else:
        found = await connection.fetch(sql("runs"), *rest)
    runs = [shown.run(row) for row in found[:limit]]
    return Page(runs, make_cursor(runs[-1].created_at, runs[-1].id) if len(found) > limit else None)


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


def make_cursor(at: datetime, key: str) -> str:
    """A place in a list as a word that nobody need understand."""
    text = json.dumps([at.astimezone(UTC).isoformat(), key])
    return base64.urlsafe_b64encode(text.encode()).decode("ascii").rstrip("=")


def read_cursor(cursor: str) -> tuple[datetime, str]:
    """The place that *cursor* stands for. Raises UsageError."""
    try:
        if len(cursor) > CURSOR_MAX:
            raise ValueError
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        at, key = json.loads(base64.b64decode(padded, b"-_", validate=True))
        moment = datetime.fromisoformat(at)
        if not isinstance(key, str) or not key.isprintable() or moment.tzinfo is None:
            raise ValueError
        return moment.astimezone(UTC), key
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise UsageError("cursor: not one that a page ended with") from None
