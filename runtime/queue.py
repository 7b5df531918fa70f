"""The queue: runs are started once, taken by workers in their order, and queued again when their worker is dead.

* A start under a key happens once, however often and from wherever it is asked for; the key outlives its run,
  and is forgotten when that has ended long ago (``start_key_retention``).
* ``claim_next`` passes over what somebody else is just taking (SKIP LOCKED): nobody waits, nothing is taken twice.
* Higher priority first, then who waits longest. An attempt that failed puts its run behind those that wait.
* Nobody is told of a dead worker. Whoever looks finds its runs: by a lease that is over (by the rules of
  ``runtime.lease``), or by what a lock proves. They are queued again, which fences the attempt.
* A hint (NOTIFY) spares who listens a wait. It may be lost: all of the above is found by looking.
"""

import contextlib
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime import lease as leases
from runtime import names, retry, rows, runs
from runtime.attributes import check as check_attributes
from runtime.database import ERRORS, Connection, sql
from runtime.errors import Taken, UsageError
from runtime.runs import in_transaction
from runtime.step import RunStatus
from runtime.tokens import check_id, new_id

#: The channel of the hints.
CHANNEL = "twiceshy_queue"
#: How long a key of a start may be, in characters.
KEY_MAX = 200
PRIORITY_MAX = names.PRIORITY_MAX
#: How many keys are forgotten in one transaction.
FORGOTTEN_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Job:
    """A claimed run, and what is to be started for it."""

    agent: str
    claim: runs.Claim


@dataclass(frozen=True, slots=True)
class Started:
    """A run that was started. ``fresh`` False: by an equal start before."""

    run: str
    fresh: bool


# ---- starting


async def start(
    connection: Connection,
    agent: str,
    input: bytes | None,  # noqa: A002
    *,
    run_id: str | None = None,
    key: str | None = None,
    priority: int = 0,
    attributes: Mapping[str, str] | None = None,
) -> str:
    """``start_once``, for who needs the run's id only."""
    started = await start_once(
        connection, agent, input, run_id=run_id, key=key, priority=priority, attributes=attributes
    )
    return started.run


async def start_once(
    connection: Connection,
    agent: str,
    input: bytes | None,  # noqa: A002
    *,
    run_id: str | None = None,
    key: str | None = None,
    priority: int = 0,
    attributes: Mapping[str, str] | None = None,
) -> Started:
    """Queue a run of *agent* on *input* (JSON). Equal starts under one *key* are one run.

    Raises UsageError for a malformed name, and Taken when *key* or *run_id* stands for another start. Whether the agent
    is declared, and the input fits it, is asked before (``runtime.agents``).
    """
    if key is not None and not (0 < len(key) <= KEY_MAX and key.isprintable()):
        raise UsageError(f"key {key[:KEY_MAX]!r}: 1 to {KEY_MAX} printable characters")
    if not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise UsageError(f"priority {priority}: a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX}")
    labels = check_attributes(attributes or {})
    started = await _start(connection, agent, input, run_id, key, priority, labels)
    with contextlib.suppress(*ERRORS):  # it is queued; a hint is no more than that
        await hint(connection, started.run)
    return started


@in_transaction
async def _start(
    connection: Connection,
    agent: str,
    given: bytes | None,
    run_id: str | None,
    key: str | None,
    priority: int,
    labels: dict[str, str],
) -> Started:
    wanted = new_id() if run_id is None else check_id(run_id)
    if key is not None:
        digest = _digest(agent, given, run_id, priority, labels)
        # One of several at the same instant gets through here; the others wait for its commit, and find it below.
        if await connection.fetchval(sql("start_once"), key, wanted, digest) is None:
            before = await connection.fetchrow(sql("started"), key)
            assert before is not None
            if before["digest"] != digest:
                raise Taken(
                    f"key {key!r} was used for another start (run {before['run_id']}): an equal one has the same "
                    f"agent, input, run id, priority and attributes"
                )
            return Started(before["run_id"], fresh=False)
    if await connection.fetchval(sql("enqueue"), wanted, agent, given, priority) is None:
        there = await runs.get_run(connection, wanted)
        if (there.agent, there.input, there.for_workers, there.attributes) != (agent, given, True, labels):
            raise Taken(f"run {wanted} is there already (agent {there.agent!r}, {there.status}), and is another one")
        return Started(wanted, fresh=False)
    if labels:
        await connection.execute(sql("add_attributes"), wanted, list(labels), list(labels.values()))
    return Started(wanted, fresh=True)


def _digest(agent: str, given: bytes | None, run_id: str | None, priority: int, labels: dict[str, str]) -> bytes:
    head = json.dumps([agent, run_id, priority, given is not None, *([labels] if labels else [])]).encode("ascii")
    return hashlib.sha256(head + b"\0" + (given or b"")).digest()


@in_transaction
async def forget_starts(connection: Connection, *, retention: float) -> bool:
    """Forget some keys of starts whose runs ended more than *retention* seconds ago; whether there may be more."""
    return len(await connection.fetch(sql("forget_starts"), retention, FORGOTTEN_AT_ONCE)) == FORGOTTEN_AT_ONCE


@in_transaction
async def hint(connection: Connection, run_id: str) -> None:
    """Tell those who listen that *run_id* is queued. A transaction of its own: all that notify wait for one lock."""
    await connection.execute(sql("hint"), run_id)


async def told(connection: Connection, run_id: str) -> None:
    """``hint``, for who has done what counts: that it fails is no failure of theirs."""
    with contextlib.suppress(*ERRORS):
        await hint(connection, run_id)


# ---- taking


@in_transaction
async def claim_next(
    connection: Connection, agents: Sequence[str], *, worker: str, host: str, folder: str, lease: float
) -> Job | None:
    """Claim the next run of *agents* for *worker* (its id); None: nothing of theirs is due.

    A claim whose commit was lost on the way belongs to nobody, and is queued again when its lease is over.
    """
    found = await connection.fetchrow(sql("next_queued"), agents)
    if found is None:
        return None
    claim = await runs.claim(
        connection, found["id"], kind="worker", host=host, folder=folder, lease=lease, process=worker
    )
    return Job(found["agent"], claim)


# ---- giving back


@in_transaction
async def requeue_silent(connection: Connection, *, lease: float, backoff: float) -> str | None:
    """Queue one run again whose lease is over, and return its id; None: there is none, or it is too early to tell."""
    run = await connection.fetchrow(sql("next_silent"))
    return None if run is None else await _requeue(connection, run, None, lease, backoff)


@in_transaction
async def requeue_of_dead(
    connection: Connection, workers: Sequence[str], *, host: str, folder: str, lease: float, backoff: float
) -> str | None:
    """Queue one run again whose attempt is of one of *workers*, which by their locks are dead; None: there is none."""
    run = await connection.fetchrow(sql("next_of_the_dead"), host, folder, workers)
    return (
        None if run is None else await _requeue(connection, run, leases.Owner("worker", host, folder), lease, backoff)
    )


@in_transaction
async def is_owner(connection: Connection, worker: str, *, host: str, folder: str) -> bool:
    """Whether *worker* still has a run."""
    return bool(await connection.fetchval(sql("any_of_the_dead"), host, folder, worker))


async def _requeue(
    connection: Connection, run: rows.Row, prover: leases.Owner | None, lease: float, backoff: float
) -> str | None:
    clock = await connection.fetchrow(sql("clock"))
    assert clock is not None
    found = leases.judge(
        RunStatus.RUNNING,
        leases.Owner(run["kind"], run["host"], run["folder"]),
        prover or leases.Owner("worker", "", ""),
        proved_dead=prover is not None,
        clock=leases.Clock(clock["now"], clock["server_started"], clock["connected"]),
        expires_at=run["lease_expires_at"],
        lease=lease,
    )
    if not isinstance(found, leases.Free):
        return None
    barren = retry.barren(run["barren"], "died", progress=run["newest"] > run["counter_at"])
    pause = retry.backoff(barren - 1, random.random(), base=backoff)
    await connection.execute(sql("attempt_ends"), run["id"], run["attempt"], "died", None)
    await connection.execute(sql("end_run"), run["id"], RunStatus.QUEUED, None, None, None, pause)
    return str(run["id"])
