"""Runs that come of other runs: the children that one starts, and the successor as which one goes on.

Both are made under the lock of the run that they come of, for who holds its fence, and under an id that follows from it
(``runtime.tokens``): so once, however often that is asked for.
"""

from runtime import queue
from runtime.database import Connection, sql
from runtime.entries import Bound, Fence, Fenced, Stopped
from runtime.errors import NotFound
from runtime.journal import Journal
from runtime.runs import in_transaction


async def start_child(
    journal: Journal, fence: Fence, child: str, agent: str, given: bytes | None, priority: int | None
) -> Fenced | Stopped | None:
    """Start the run *child* of *agent*, unless it is there; None: it is. Else why the fence does not hold."""
    begun = await journal.ask(
        lambda connection: connection.fetchval(
            sql("start_child"), fence.run_id, fence.token_hash, fence.sidecar, child, agent, given, priority
        )
    )
    if not begun:
        return await _against(journal, fence)
    await journal.ask(lambda connection: queue.told(connection, child))
    return None


async def is_child(journal: Journal, run_id: str, child: str) -> bool:
    """Whether the run *child* was started by this one, or by one that this continues."""
    return await journal.ask(lambda connection: connection.fetchval(sql("is_child"), run_id, child)) is not None


async def continue_as_new(
    journal: Journal, fence: Fence, successor: str, given: bytes | None
) -> str | Fenced | Stopped:
    """The run is done and goes on as *successor*, or as whom it did before; its id. Else why it may not."""
    row = await journal.ask(
        lambda connection: connection.fetchrow(
            sql("continue_as_new"), fence.run_id, fence.token_hash, fence.sidecar, successor, given
        )
    )
    assert row is not None
    if row["outcome"] != "continued":
        return await _against(journal, fence)
    other = str(row["other"])
    await journal.ask(lambda connection: queue.told(connection, other))
    return other


async def successor(journal: Journal, run_id: str, token_hash: bytes) -> str | None:
    """As whom the run goes on, for who had it under this token."""
    return await journal.ask(lambda connection: connection.fetchval(sql("successor"), run_id, token_hash))


@in_transaction
async def newest(connection: Connection, run_id: str) -> str:
    """The newest of the runs as which this one goes on; itself, if it does not. Raises NotFound."""
    found = await connection.fetchval(sql("newest"), run_id)
    if found is None:
        raise NotFound(f"there is no run {run_id!r}; twiceshy runs lists them")
    return str(found)


async def _against(journal: Journal, fence: Fence) -> Fenced | Stopped:
    found = (await journal.renew([fence], extend=False))[fence.run_id]
    return Fenced() if isinstance(found, Bound) else found
