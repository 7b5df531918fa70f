"""What is done with a run: created, claimed, renewed, ended, settled, shown.

Launcher, command line and API call these; each is one transaction that first locks its run, so that a claim
and an entry of the journal never both win. All take a connection first. Tokens are minted here only.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from runtime import lease as leases
from runtime import retry, rows, shown
from runtime.database import Connection, sql, transaction
from runtime.entries import Headers
from runtime.errors import Held, NotFound, NotNow, UsageError
from runtime.shown import AttemptRow, RunRow, StepLine
from runtime.step import Finality, Kind, RunStatus, State
from runtime.tokens import RUN_ID, check_id, hash_token, new_id, new_token

__all__ = [
    "RUN_ID",
    "AttemptRow",
    "Claim",
    "How",
    "RunRow",
    "StepLine",
    "attempts",
    "claim",
    "create",
    "end_attempt",
    "first_request",
    "get_run",
    "hash_token",
    "last_attempt",
    "list_runs",
    "new_token",
    "open_exchanges",
    "put_result",
    "renew",
    "resolve",
    "standing",
    "steps",
]

P = ParamSpec("P")
T = TypeVar("T")

#: How an ambiguous step is settled.
How = Literal["assume_done", "send_again"]
#: Between two tries to prolong a lease whose run somebody has locked, in seconds.
LOCKED_PAUSES = (0.02, 0.05, 0.1)
#: Kinds of attempt whose token is handed out: from then on a request without one is refused.
TOKENED = (*leases.LAUNCHED, "claim")


@dataclass(frozen=True, slots=True)
class Claim:
    """A run's new attempt. ``token`` is nowhere else; ``barren``: consecutive attempts before it that got nowhere."""

    run_id: str
    token: str
    n: int
    barren: int


def in_transaction(
    verb: Callable[Concatenate[Connection, P], Awaitable[T]],
) -> Callable[Concatenate[Connection, P], Awaitable[T]]:
    """All of *verb* or nothing of it."""

    @functools.wraps(verb)
    async def wrapped(connection: Connection, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with transaction(connection):
            return await verb(connection, *args, **kwargs)

    return wrapped


# ---- an attempt's life


@in_transaction
async def create(connection: Connection, run_id: str | None, *, agent: str = "", input: bytes | None = None) -> str:  # noqa: A002
    """Make sure that there is a run *run_id* (None: a new one). A run that is there stays as it is."""
    made = new_id() if run_id is None else check_id(run_id)
    await connection.execute(sql("create_run"), made, agent, input)
    return made


@in_transaction
async def claim(
    connection: Connection,
    run_id: str,
    *,
    kind: str,
    host: str,
    folder: str,
    lease: float,
    proved_dead: bool = False,
    process: str | None = None,
) -> Claim:
    """Become the run's current attempt; the one before is fenced.

    *proved_dead*: the caller knows that the attempt before is dead, as far as it can know that (runtime.lease).
    Raises NotFound; Held while the attempt before may be alive; NotNow for a run that ended, parks or needs a
    person.
    """
    run = await _lock(connection, run_id)
    status = rows.known(RunStatus, run["status"], f"run {run_id}")
    before = await connection.fetchrow(sql("attempt"), run_id, run["attempt"])
    clock = await connection.fetchrow(sql("clock"))
    assert clock is not None
    found = leases.judge(
        status,
        None if before is None else leases.Owner(before["kind"], before["host"], before["folder"]),
        leases.Owner(kind, host, folder),
        proved_dead=proved_dead,
        clock=leases.Clock(clock["now"], clock["server_started"], clock["connected"]),
        expires_at=run["lease_expires_at"],
        lease=lease,
    )
    if isinstance(found, leases.Closed):
        raise NotNow(_closed(run_id, status, run["stop_step"], run["stop_message"]))
    if isinstance(found, leases.Busy):
        assert before is not None
        raise Held(
            f"run {run_id} is held by attempt {before['n']} ({before['kind']} on {before['host']}); "
            f"if that stays silent, it may be taken over in {found.wait:.0f} s",
            found.wait,
            silent=run["lease_expires_at"] is None or run["lease_expires_at"] <= clock["now"],
        )
    outcome = None
    if before is not None:
        # An attempt that nobody ended: dead while it ran, else sent home by a stop that was settled since.
        unsaid = "died" if status is RunStatus.RUNNING else "stopped"
        await connection.execute(sql("attempt_ends"), run_id, before["n"], unsaid, None)
        outcome = before["outcome"] or unsaid
    progress = before is not None and run["newest"] > before["counter_at"]
    barren = retry.barren(run["barren"], outcome, progress=progress)
    token, n = new_token(), run["attempt"] + 1
    digest = hash_token(token)
    await connection.execute(sql("claim_attempt"), run_id, n, digest, kind, host, folder, process, run["counter"])
    await connection.execute(sql("claim_run"), run_id, n, digest, barren, kind in TOKENED, lease)
    return Claim(run_id, token, n, barren)


async def claim_silent(
    connection: Connection, /, run_id: str, *, say: Callable[[str], None] = lambda _: None, **claimed: Any
) -> Claim:
    """``claim``, which waits once, for a lease at most, where only *connection* is too young to judge a silent owner.

    *say* is told of the wait. Raises as ``claim`` does; an owner that is heard of meanwhile raises Held.
    """
    try:
        return await claim(connection, run_id, **claimed)
    except Held as error:
        if not error.silent:
            raise
        say(f"run {run_id}: its attempt is silent; taken over in {error.wait:.0f} s if that stays so")
        await asyncio.sleep(error.wait + 0.1)
    return await claim(connection, run_id, **claimed)


async def renew(connection: Connection, run_id: str, token_hash: bytes, lease: float) -> RunStatus | None:
    """Prolong the lease while the run is running. How the run stands; None: another attempt has it.

    Where somebody has the run locked, which an agent's own transaction may do for a while, the lease stays as it is.
    """
    for pause in (*LOCKED_PAUSES, None):
        renewed, status = await _renew(connection, run_id, token_hash, lease)
        if renewed or pause is None or status is not RunStatus.RUNNING:
            break
        await asyncio.sleep(pause)
    return status


@in_transaction
async def _renew(connection: Connection, run_id: str, token_hash: bytes, lease: float) -> tuple[bool, RunStatus | None]:
    renewed = await connection.fetchval(sql("renew_run"), run_id, token_hash, lease)
    return renewed is not None, await _standing(connection, run_id, token_hash)


@in_transaction
async def standing(connection: Connection, run_id: str, token_hash: bytes) -> RunStatus | None:
    """How the run stands; None: another attempt has it."""
    return await _standing(connection, run_id, token_hash)


@in_transaction
async def end_attempt(
    connection: Connection,
    run_id: str,
    token_hash: bytes,
    outcome: str,
    exit_code: int | None,
    *,
    final: bool = False,
    error: str | None = None,
    pause: float | None = None,
) -> RunStatus | None:
    """The attempt is over. What the run is now; None: another attempt has it, and nothing was written.

    Only of a running run does *outcome* decide: *done* ends it; *failed* and *died* queue it again, or end it
    when *final*, or stop it as ambiguous on answers that leave open whether an effect was made; all else queues
    it. A stopped run stays stopped. Asked a second time, it says the same. *pause*: seconds until a worker may take it,
    behind all who wait by then; None: its place in the queue is what it was.
    """
    run = await _lock(connection, run_id)
    status = rows.known(RunStatus, run["status"], f"run {run_id}")
    n = run["attempt"]
    if run["token_hash"] != token_hash:
        last = await connection.fetchrow(sql("attempt"), run_id, n)
        return status if last is not None and last["token_hash"] == token_hash else None
    stop_step, stop_message = run["stop_step"], run["stop_message"]
    if status is RunStatus.RUNNING:
        status = _after(outcome, final=final)
        if outcome in retry.FAILURES:
            doubts = await doubt(connection, run_id, "the attempt failed after it")
            if doubts:
                status, (stop_step, stop_message) = RunStatus.AMBIGUOUS, doubts[0]
    elif outcome in (*retry.FAILURES, "done", "stopped"):
        outcome = "cancelled" if status is RunStatus.CANCELLED else "stopped"
    await connection.execute(sql("attempt_ends"), run_id, n, outcome, exit_code)
    await connection.execute(sql("end_run"), run_id, status, stop_step, stop_message, error, pause)
    return status


def _after(outcome: str, *, final: bool) -> RunStatus:
    if outcome in retry.FAILURES:
        return RunStatus.FAILED if final else RunStatus.QUEUED
    return {"done": RunStatus.DONE, "cancelled": RunStatus.CANCELLED}.get(outcome, RunStatus.QUEUED)


async def doubt(connection: Connection, run_id: str, why: str) -> list[tuple[str, str]]:
    """Make steps ambiguous whose last answer does not say whether the effect was made; keys and words.

    *why*: what happened that makes it a question. The caller has locked the run.
    """
    doubts = []
    for step in await connection.fetch(sql("doubtful_steps"), run_id):
        words = (
            f"{step['method']} {step['url']} was answered with {step['status']}, which leaves open whether it was "
            f"done, and {why}"
        )
        await connection.execute(sql("doubt_step"), run_id, step["key"], words)
        doubts.append((step["key"], words))
    return doubts


@in_transaction
async def put_result(connection: Connection, run_id: str, token_hash: bytes, result: bytes) -> bool:
    """Keep the run's result; False: the run is not running under this token."""
    return await connection.fetchval(sql("put_result"), run_id, token_hash, result) is not None


# ---- what a person decides


@in_transaction
async def resolve(
    connection: Connection,
    run_id: str,
    step_key: str,
    how: How,
    *,
    status: int = 200,
    headers: Headers = (),
    body: bytes = b"",
    explicit: bool = False,
) -> RunStatus:
    """Settle an ambiguous step. Settling the last open one queues the run. Returns what the run is now.

    *assume_done*: it happened, and the answer given here is replayed. Only where the run had gone on after an answer
    that left it open does that one become the outcome, unless the person was *explicit*: the agent must walk the same
    way again. *send_again*: it did not; it goes out when the next attempt asks for it.
    """
    run = await _lock(connection, run_id)
    step = await connection.fetchrow(sql("step"), run_id, step_key)
    if step is None:
        raise NotFound(f"run {run_id} has no step {step_key!r}")
    state = rows.known(State, step["state"], f"run {run_id}, step {step_key}")
    if state is not State.AMBIGUOUS:
        raise NotNow(f"run {run_id}: step {step_key} ({step['method']} {step['url']}) is {state}, not ambiguous")
    if how == "send_again":
        await connection.execute(sql("settle_step"), run_id, step_key, State.NOT_SENT, "settled: send_again")
    elif how == "assume_done":
        await connection.execute(sql("settle_step"), run_id, step_key, State.ANSWERED, "settled: assume_done")
        in_doubt = step["last_finality"] == Finality.DOUBTFUL and step["last_is_newest"]
        if in_doubt and step["acted_on"] and not explicit:
            await connection.execute(sql("settle_answer"), run_id, step_key, step["last_n"])
        else:
            counter = run["counter"] + 1
            place = step["last_n"] if in_doubt else step["place"]
            await connection.execute(
                sql("own_answer"), run_id, step_key, place, counter, run["attempt"], status, _reason(status),
                rows.encode_headers(headers), body,
            )  # fmt: skip
            await connection.execute(sql("count_run"), run_id, counter)
    else:
        raise UsageError(f"{how!r}: an ambiguous step is settled by assume_done or send_again")
    return rows.known(RunStatus, await connection.fetchval(sql("settled"), run_id), f"run {run_id}")


@in_transaction
async def first_request(connection: Connection, run_id: str, step_key: str) -> tuple[Kind, bytes, bytes]:
    """Of a step its kind, and head (JSON, see proxy.outgoing) and body of what went first. Raises NotFound."""
    row = await connection.fetchrow(sql("first_request"), run_id, step_key)
    if row is None:
        raise NotFound(f"run {run_id} has no step {step_key!r}")
    kind = rows.known(Kind, row["kind"], f"run {run_id}, step {step_key}")
    return kind, row["request_head"], row["request_body"]


# ---- what is shown


@in_transaction
async def get_run(connection: Connection, run_id: str) -> RunRow:
    """One run. Raises NotFound."""
    row = await connection.fetchrow(sql("run"), run_id)
    if row is None:
        raise _not_found(run_id)
    return shown.run(row)


@in_transaction
async def list_runs(
    connection: Connection, *, status: RunStatus | None = None, agent: str | None = None, limit: int = 50
) -> list[RunRow]:
    """The newest runs, of one status and one agent or of any, without input and result (more: ``runtime.listing``)."""
    found = await connection.fetch(sql("runs"), status, agent, None, None, None, None, limit)
    return [shown.run(row) for row in found]


@in_transaction
async def attempts(connection: Connection, run_id: str) -> list[AttemptRow]:
    """The run's attempts, the first one first."""
    return [shown.attempt(row) for row in await connection.fetch(sql("attempts"), run_id)]


@in_transaction
async def last_attempt(connection: Connection, run_id: str) -> AttemptRow | None:
    """The run's current or latest attempt."""
    run = await connection.fetchrow(sql("run"), run_id)
    row = None if run is None else await connection.fetchrow(sql("attempt"), run_id, run["attempt"])
    return None if row is None else shown.attempt(row)


@in_transaction
async def steps(connection: Connection, run_id: str) -> list[StepLine]:
    """The run's steps, in the order in which they began."""
    return [shown.step(run_id, row) for row in await connection.fetch(sql("steps"), run_id)]


@in_transaction
async def open_exchanges(connection: Connection, run_id: str) -> int:
    """How many exchanges of the run are still out, in sidecars that live."""
    return int(await connection.fetchval(sql("open_exchanges"), run_id))


# ---- how


async def _lock(connection: Connection, run_id: str) -> rows.Row:
    row = await connection.fetchrow(sql("lock_run"), run_id)
    if row is None:
        raise _not_found(run_id)
    return row


def _not_found(run_id: str) -> NotFound:
    return NotFound(f"there is no run {run_id!r}; twiceshy runs lists them")


async def _standing(connection: Connection, run_id: str, token_hash: bytes) -> RunStatus | None:
    status = await connection.fetchval(sql("standing"), run_id, token_hash)
    return None if status is None else rows.known(RunStatus, status, f"run {run_id}")


def _closed(run_id: str, status: RunStatus, step: str | None, message: str | None) -> str:
    if not status.stopped:
        return f"run {run_id} is {status}"
    remedy = f"; then: twiceshy resolve {run_id} {step} assume_done|send_again" if status is RunStatus.AMBIGUOUS else ""
    return f"run {run_id} is {status} and needs a person: {message}{remedy}"


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode("ascii")
    except ValueError:
        return b""
