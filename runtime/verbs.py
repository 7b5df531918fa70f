"""What a person decides of a whole run: that it ends now, is tried again, or forked. One transaction each.

A run that was continued by another stands for the newest of these when it is cancelled.
"""

import json

from runtime import events, rows, runs
from runtime.database import Connection, sql
from runtime.errors import NotFound, NotNow, Unreadable
from runtime.forks import fork
from runtime.runs import in_transaction
from runtime.step import Kind, RunStatus

__all__ = ["RETRIED", "cancel", "fork", "retry"]

#: What may be tried again. An ambiguous run needs an answer first (``runs.resolve``).
RETRIED = (RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.DIVERGED, RunStatus.OVER_BUDGET)


async def cancel(connection: Connection, run_id: str) -> RunStatus:
    """End the run and all that it has started, however they stand; returns what it was.

    Raises NotFound, and NotNow for one that is done or failed. Its attempt is refused from now on, and whoever launched
    it ends its process at the next look. What has left already ends, and is recorded. A run that was cancelled before
    stays so.
    """
    status = await _cancel(connection, run_id)
    await events.wake(connection)  # who waits for it
    return status


@in_transaction
async def _cancel(connection: Connection, run_id: str) -> RunStatus:
    run = await _lock_newest(connection, run_id)
    status = rows.known(RunStatus, run["status"], f"run {run['id']}")
    if status in (RunStatus.DONE, RunStatus.FAILED):
        raise NotNow(f"run {run['id']} is {status} already: there is nothing to cancel")
    if status is not RunStatus.CANCELLED:
        await connection.execute(sql("cancel_run"), run["id"])
    # Whose row is locked starts no more of them.
    locked = [run["id"]]
    while locked:
        for row in await connection.fetch(sql("children"), locked.pop()):
            child = await _lock_newest(connection, row["id"])
            if not rows.known(RunStatus, child["status"], f"run {child['id']}").ended:
                await connection.execute(sql("cancel_run"), child["id"])
                locked.append(child["id"])
    return status


@in_transaction
async def retry(connection: Connection, run_id: str) -> RunStatus:
    """Queue the run again, to go on from its journal; returns what it is now. Raises NotFound and NotNow.

    What was answered last, and not finally, is tried again; of a failed run also the local step or child that failed
    last. Where it is not known whether an effect was made, a person must say so first: the run is ambiguous.
    """
    run = await _lock(connection, run_id)
    status = rows.known(RunStatus, run["status"], f"run {run_id}")
    if status is RunStatus.AMBIGUOUS:
        raise NotNow(
            f"run {run_id} is ambiguous: say what happened, and it goes on by itself (twiceshy show {run_id}, then "
            f"twiceshy resolve {run_id} STEP assume_done|send_again)"
        )
    if status not in RETRIED:
        rest = "start another" if status is RunStatus.DONE else "it goes on by itself"
        if run["continued_as"] is not None:
            rest = f"it went on as run {run['continued_as']}"
        raise NotNow(f"run {run_id} is {status}: {rest}")
    await runs.doubt(connection, run_id, "a person wants it tried again")
    if status is RunStatus.FAILED:
        await _reopen(connection, run_id)
    await connection.execute(sql("retry_run"), run_id)
    return rows.known(RunStatus, await connection.fetchval(sql("settled"), run_id), f"run {run_id}")


async def _reopen(connection: Connection, run_id: str) -> None:
    """Have those steps tried again whose failure ended the run: nothing was built on it."""
    for step in await connection.fetch(sql("unbuilt_ends"), run_id):
        what = f"step {step['key']} of run {run_id}"
        try:
            said = json.loads(step["body"])
            local = rows.known(Kind, step["kind"], what) is Kind.LOCAL
            failed = "error" in said if local else said.get("status", RunStatus.DONE) != RunStatus.DONE
        except (ValueError, TypeError, AttributeError) as error:
            raise Unreadable(f"{what}: what came of it cannot be read") from error
        if failed:
            await connection.execute(sql("reopen_end"), run_id, step["key"], step["n"])


async def _lock(connection: Connection, run_id: str) -> rows.Row:
    row = await connection.fetchrow(sql("lock_run"), run_id)
    if row is None:
        raise NotFound(f"there is no run {run_id!r}; twiceshy runs lists them")
    return row


async def _lock_newest(connection: Connection, run_id: str) -> rows.Row:
    row = await _lock(connection, run_id)
    while row["continued_as"] is not None:
        row = await _lock(connection, await connection.fetchval(sql("newest"), row["id"]))
    return row
