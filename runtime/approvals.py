"""Approvals: waits of a run that a person ends. Each is one step's; the first decision counts.

All of it happens under the lock of the run's row, as does the record that nobody decided in time: one of the two wins.
Whoever decides later is told what was decided first. A parked run that waits for it is queued in the same transaction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import get_args

from runtime import payload, queue, rows
from runtime.database import Connection, sql
from runtime.entries import Decision, Verdict
from runtime.errors import Decided, NotFound, NotNow, UsageError
from runtime.runs import in_transaction
from runtime.step import RunStatus

#: How long the name of who decided, and the comment, may be, in characters.
BY_MAX, COMMENT_MAX = 200, 10_000


@dataclass(frozen=True, slots=True)
class Open:
    """An approval that nobody has decided yet. ``request``: JSON, as the agent wrote it; None: it gave none."""

    run: str
    id: str
    name: str
    request: bytes | None
    asked_at: datetime
    deadline: datetime | None

    @property
    def place(self) -> tuple[datetime, str, str]:
        """Where it stands in the list."""
        return self.asked_at, self.run, self.id


@in_transaction
async def open_ones(
    connection: Connection, *, run: str | None = None, name: str | None = None, limit: int = 50,
    behind: tuple[datetime, str, str] | None = None,
) -> list[Open]:  # fmt: skip
    """What can be decided, the oldest first; *behind* the ``place`` of the last one of the page before."""
    found = await connection.fetch(sql("open_approvals"), run, name, limit, *(behind or (None, None, None)))
    return [
        Open(row["run_id"], row["id"], row["name"], _request(row["request_body"]), row["asked_at"], row["deadline"])
        for row in found
    ]


def _request(body: bytes) -> bytes | None:
    return payload.member(body, "request") if body.strip() else None


async def decide(
    connection: Connection, run_id: str, named: str, decision: Verdict, *, by: str | None = None,
    comment: str | None = None,
) -> Decision:  # fmt: skip
    """Decide the approval of the run whose id, or name, is *named*.

    By its name only while the run has had no other of that name. Raises Decided, which has the first decision; NotNow
    when its time is over, or the run's, or when its name is not enough; NotFound; UsageError.
    """
    if decision not in get_args(Verdict):
        raise UsageError(f"decision {decision!r}: approve or decline")
    _check("by", by, BY_MAX)
    _check("comment", comment, COMMENT_MAX)
    decided, woken = await _decide(connection, run_id, named, decision, by, comment)
    if woken:
        await queue.told(connection, run_id)
    return decided


@in_transaction
async def _decide(
    connection: Connection, run_id: str, named: str, decision: Verdict, by: str | None, comment: str | None
) -> tuple[Decision, bool]:
    run = await connection.fetchrow(sql("lock_run"), run_id)
    if run is None:
        raise NotFound(f"there is no run {run_id!r}; twiceshy runs lists them")
    row = _the_one(run_id, named, await connection.fetch(sql("approvals_named"), run_id, named))
    what = f"run {run_id}: approval {row['name']} ({row['key']})"
    if row["decision"] == "timeout":
        raise NotNow(f"{what} was not decided in time: {row['deadline']}")
    if row["decision"] is not None:
        first = rows.decision(row)
        raise Decided(f"{what} was decided before: {first.decision}, by {first.by or 'nobody named'}", first)
    if run["status"] in (RunStatus.DONE, RunStatus.CANCELLED):
        raise NotNow(f"{what} is not open any more: the run is {run['status']}")
    at = await connection.fetchval(sql("decide"), run_id, row["key"], decision, by, comment)
    if at is None:
        raise NotNow(f"{what} was not decided in time: {row['deadline']}")
    waits_for = run["wake_on"] or ()  # it may do nothing but sleep, having given this wait up
    woken = run["status"] == RunStatus.PARKED and f"approval:{row['name']}" in waits_for
    if woken:
        await connection.execute(sql("wake_run"), run_id)
    return Decision(row["key"], row["name"], decision, by, comment, at), woken


def _the_one(run_id: str, named: str, found: Sequence[rows.Row]) -> rows.Row:
    exact = [row for row in found if row["key"] == named] or found
    if not exact:
        raise NotFound(f"run {run_id} has asked for no approval {named!r}")
    if len(exact) > 1:
        keys = ", ".join(row["key"] for row in exact)
        raise NotNow(f"run {run_id} has asked for approval {named!r} more than once; say which by its id: {keys}")
    return exact[0]


def _check(what: str, text: str | None, limit: int) -> None:
    if text is None:
        return
    if len(text) > limit or "\0" in text or any("\ud800" <= each <= "\udfff" for each in text):
        raise UsageError(f"{what}: at most {limit} characters, without NUL or lone surrogates")
