"""Events: messages to a run, which may come before, during or after the wait that takes them, each taken once.

An event is stored under the lock of its run's row, as is the record of the wait that takes it, and parking: so it is
never missed in between, and a parked run that waits for it is queued in the transaction that stores it.
"""

import secrets
from dataclasses import dataclass

from runtime import payload as payloads
from runtime import queue, rows
from runtime.database import Connection, sql
from runtime.errors import NotFound, NotNow
from runtime.names import check_name
from runtime.runs import in_transaction


@dataclass(frozen=True, slots=True)
class Sent:
    """An event of a run. ``fresh`` False: it was sent before, under this id and with this payload."""

    id: str
    fresh: bool


async def send(
    connection: Connection,
    run_id: str,
    name: str,
    payload: bytes,
    id: str | None = None,  # noqa: A002
    *,
    limit: int,
) -> Sent:
    """Send the run an event; *payload*: JSON, kept as it is. Under an *id* that was sent before nothing is sent.

    Raises UsageError for what is no name or no JSON of at most *limit* bytes, NotFound, and NotNow when the run has
    ended or *id* was sent with another payload.
    """
    check_name("event", name)
    payloads.read(payload, limit, f"the payload of event {name}")
    id = check_name("event id", id) if id is not None else f"e{secrets.token_hex(12)}"  # noqa: A001
    row = await _send(connection, run_id, name, id, payload)
    if row["woken"] is not None:
        await queue.told(connection, row["woken"])
    match row["outcome"]:
        case "no_run":
            raise NotFound(f"there is no run {run_id!r}; twiceshy runs lists them")
        case "ended":
            raise NotNow(f"run {run_id} has ended: event {name} was not sent")
        case "other":
            raise NotNow(f"run {run_id}: event {name} with the id {id} was sent before, with another payload")
        case outcome:
            return Sent(id, outcome == "sent")


@in_transaction
async def _send(connection: Connection, run_id: str, name: str, id: str, payload: bytes) -> rows.Row:  # noqa: A002
    row = await connection.fetchrow(sql("send_event"), run_id, name, id, payload)
    assert row is not None
    return row


async def wake(connection: Connection) -> list[str]:
    """Queue the parked runs whose time has come, or whose child has ended, a hundred of each at most; their ids."""
    woken = await _wake(connection)
    if woken:
        await queue.told(connection, woken[0])
    return woken


@in_transaction
async def _wake(connection: Connection) -> list[str]:
    due = await connection.fetch(sql("wake"))
    return [row["id"] for row in (*due, *await connection.fetch(sql("wake_parents")))]
