"""What a person decides of a whole run: that it ends now, or that it is tried again. One transaction each."""

from runtime import rows, runs
from runtime.database import Connection, sql
from runtime.errors import NotFound, NotNow
from runtime.forks import fork as fork
from runtime.runs import in_transaction
from runtime.step import RunStatus

#: What may be tried again. An ambiguous run needs an answer first (``runs.resolve``).
RETRIED = (RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.DIVERGED, RunStatus.OVER_BUDGET)


@in_transaction
async def cancel(connection: Connection, run_id: str) -> RunStatus:
    """End the run, however it stands; returns what it was. Raises NotFound, and NotNow for one that is done or failed.

    Its attempt is refused from now on, and whoever launched it ends its process at the next look. What has left already
    ends, and is recorded. A run that was cancelled before stays so.
    """
    status = await _lock(connection, run_id)
    if status in (RunStatus.DONE, RunStatus.FAILED):
        raise NotNow(f"run {run_id} is {status} already: there is nothing to cancel")
    if status is not RunStatus.CANCELLED:
        await connection.execute(sql("cancel_run"), run_id)
    return status


@in_transaction
async def retry(connection: Connection, run_id: str) -> RunStatus:
    """Queue the run again, to go on from its journal; returns what it is now. Raises NotFound and NotNow.

    What was answered last, and not finally, is tried again. Where it is not known whether an effect was made, a person
    must say so first: the run is ambiguous.
    """
    status = await _lock(connection, run_id)
    if status is RunStatus.AMBIGUOUS:
        raise NotNow(
            f"run {run_id} is ambiguous: say what happened, and it goes on by itself (twiceshy show {run_id}, then "
            f"twiceshy resolve {run_id} STEP assume_done|send_again)"
        )
    if status not in RETRIED:
        rest = "start another" if status is RunStatus.DONE else "it goes on by itself"
        raise NotNow(f"run {run_id} is {status}: {rest}")
    await runs.doubt(connection, run_id, "a person wants it tried again")
    await connection.execute(sql("retry_run"), run_id)
    return rows.known(RunStatus, await connection.fetchval(sql("settled"), run_id), f"run {run_id}")


async def _lock(connection: Connection, run_id: str) -> RunStatus:
    row = await connection.fetchrow(sql("lock_run"), run_id)
    if row is None:
        raise NotFound(f"there is no run {run_id!r}; twiceshy runs lists them")
    return rows.known(RunStatus, row["status"], f"run {run_id}")
