"""Forks: a new run that has had what another one had before one of its steps, and does the rest anew, under new keys.

What is copied is history: it is replayed as it was and never asked again, whatever it was. So only steps are copied of
which that can be said: those that are answered, and whose last answer was final or was gone on from. What the other
run's agent had not taken by then (events, what it was about to do) is not the new one's.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from runtime import queue, rows, runs
from runtime.database import ERRORS, Connection, sql
from runtime.errors import NotFound, NotNow, Taken, UsageError
from runtime.runs import in_transaction
from runtime.step import Effect, Finality, Kind, State
from runtime.tokens import check_id, new_id


@dataclass(frozen=True, slots=True)
class ForkStep:
    """A step of the run that is forked. ``n``: its number, from 1, in the order in which they began."""

    n: int
    key: str
    shown: str  # in words
    begun: int
    effect: Effect
    state: State
    finality: Finality | None  # of its last answer
    recorded: int  # when that was recorded, as ``begun`` counts


@dataclass(frozen=True, slots=True)
class Fork:
    """``run``: the new one; None: a preview. ``replayed``: what it has of the other run; ``sent``: what it has not."""

    run: str | None
    replayed: tuple[ForkStep, ...]
    sent: tuple[ForkStep, ...]
    for_workers: bool = False


def divide(run_id: str, steps: Sequence[ForkStep], before: int) -> tuple[tuple[ForkStep, ...], tuple[ForkStep, ...]]:
    """What a fork before step *before* replays and what it sends. Raises UsageError, and NotNow for an open one."""
    if not 1 <= before <= len(steps) + 1:
        count = f"{len(steps)} steps" if len(steps) != 1 else "one step"
        raise UsageError(f"run {run_id} has {count}: it is forked before one of 1 to {len(steps) + 1}, not {before}")
    replayed, sent = tuple(steps[: before - 1]), tuple(steps[before - 1 :])
    for step in replayed:
        if step.state is not State.ANSWERED or not (step.finality is Finality.FINAL or _gone_on_from(step, replayed)):
            raise NotNow(
                f"run {run_id} cannot be forked before step {before}: what became of step {step.n} ({step.shown}, "
                f"{step.key}) is open, and an outcome that is not known cannot be replayed. Fork it before that one "
                f"(--before {step.n}), or when it is settled"
            )
    return replayed, sent


def _gone_on_from(step: ForkStep, replayed: Sequence[ForkStep]) -> bool:
    """Whether something was begun after the last answer of *step*, which was not final."""
    return any(other.begun > step.recorded and other.effect is not Effect.READ for other in replayed)


async def fork(
    connection: Connection, run: str, *, before: int, run_id: str | None = None, preview: bool = False
) -> Fork:
    """Make of *run* a run *run_id* (None: a new id) as it was before its step number *before*, and queue it.

    Raises NotFound, UsageError, NotNow when a step before that one is open, and Taken when *run_id* is there already.
    *preview*: only say what would be.
    """
    made = await _fork(connection, run, before, run_id, preview)
    if made.run is not None and made.for_workers:
        with contextlib.suppress(*ERRORS):  # it is queued; a hint is no more than that
            await queue.hint(connection, made.run)
    return made


@in_transaction
async def _fork(connection: Connection, run: str, before: int, run_id: str | None, preview: bool) -> Fork:
    wanted = new_id() if run_id is None else check_id(run_id)
    source = await connection.fetchrow(sql("lock_run"), run)
    if source is None:
        raise NotFound(f"there is no run {run!r}; twiceshy runs lists them")
    steps = [_step(run, n, row) for n, row in enumerate(await connection.fetch(sql("fork_steps"), run), 1)]
    replayed, sent = divide(run, steps, before)
    if preview:
        return Fork(None, replayed, sent, source["for_workers"])
    counter = max((max(step.begun, step.recorded) for step in replayed), default=0)
    newest = max((step.begun for step in replayed), default=0)
    if await connection.fetchval(sql("fork_run"), run, wanted, counter, newest) is None:
        there = await runs.get_run(connection, wanted)
        raise Taken(f"run {wanted} is there already (agent {there.agent!r}, {there.status}): name another one")
    keys = [step.key for step in replayed]
    for copy in (sql("copy_steps"), sql("copy_answers"), sql("copy_bodies"), sql("copy_events"), sql("copy_approvals")):
        await connection.execute(copy, run, wanted, keys)
    await connection.execute(sql("copy_attributes"), run, wanted)
    return Fork(wanted, replayed, sent, source["for_workers"])


def _step(run_id: str, n: int, row: rows.Row) -> ForkStep:
    what = f"run {run_id}, step {row['key']}"
    kind = rows.known(Kind, row["kind"], what)
    return ForkStep(
        n=n,
        key=row["key"],
        shown=f"{row['method']} {row['url']}" if kind is Kind.HTTP else f"{kind} {row['subject'] or ''}".strip(),
        begun=row["begun"],
        effect=rows.known(Effect, row["effect"], what),
        state=rows.known(State, row["state"], what),
        finality=None if row["finality"] is None else rows.known(Finality, row["finality"], what),
        recorded=row["recorded"] or 0,
    )
