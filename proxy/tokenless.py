"""Runs named without a token: the attempt is the client's process group (DESIGN §2).

On the same host a program's process group tells one execution from the next; its lease is held, and its token
kept, by the sidecar. What cannot be told apart is refused with the ways out, never guessed.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from proxy import peers
from proxy.attempts import Attempts
from proxy.doors import Door
from proxy.identity import Named
from proxy.peers import Process
from proxy.refusals import Refusal, ways_out
from proxy.run import Run
from proxy.stops import refusal_of
from runtime import runs
from runtime.database import Connection
from runtime.entries import Fence, Stopped
from runtime.errors import Held, NotNow
from runtime.journal import Journal
from runtime.runs import AttemptRow, RunRow
from runtime.step import RunStatus

#: How many processes are looked at first: those that spoke last.
_RECENT = 32


@dataclass(frozen=True, slots=True)
class _Found:
    """The run may be claimed. ``stale``: by a process that is known to have begun earlier."""

    proved_dead: bool
    stale: bool


@dataclass(frozen=True, slots=True)
class _Claimed:
    token: str
    stale: bool


class Tokenless:
    """Finds or makes the attempt of a client that named a run and no token."""

    def __init__(self, attempts: Attempts, journal: Journal, sidecar: str, folder: str, lease: float) -> None:
        self._attempts = attempts
        self._journal = journal
        self._sidecar = sidecar
        self._folder = folder
        self._lease = lease
        self._host = socket.gethostname()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._recent: dict[int, None] = {}

    async def of(self, named: Named, door: Door, *, internal: bool) -> Run | Refusal:
        """The attempt that the client at *door* is. *internal*: it asks us, not an upstream. Raises DatabaseAway."""
        process = await self._process(door)
        if process is None and named.step is None and not internal:
            return Refusal(
                "no-attempt",
                f"Run {named.run} is named without a token, and the process at the other end of the connection cannot "
                f"be read (another host, user or container). Nothing was sent. {ways_out(named.run)}",
                named.run,
            )
        run = self._known(named.run, process)
        if run is None:
            lock = self._locks.setdefault(named.run, asyncio.Lock())
            async with lock:
                run = self._known(named.run, process)
                if run is None:
                    claimed = await self._claim(named, process)
                    if isinstance(claimed, Refusal):
                        return claimed
                    run = claimed
        if not run.stale and run.process is not None and process != run.process and not peers.alive(run.process):
            run.stale = "the process that first spoke for the run is gone, and another of its group goes on"
        return await self._attempts.trusted(run)

    async def _process(self, door: Door) -> Process | None:
        if door.process is None and door.peer is not None and door.local is not None:
            loop = asyncio.get_running_loop()
            recent = tuple(reversed(self._recent))
            door.process = await loop.run_in_executor(None, peers.at, door.peer, door.local, recent)
        if door.process is not None:
            self._recent.pop(door.process.pid, None)
            self._recent[door.process.pid] = None
            if len(self._recent) > _RECENT:
                del self._recent[next(iter(self._recent))]
        return door.process

    def _known(self, run_id: str, process: Process | None) -> Run | None:
        """The attempt that lives here and that *process* is part of."""
        run = self._attempts.get(run_id)
        if run is None or not run.tokenless or run.refusal is not None:
            return None
        if run.process is None or process is None:
            # Attempts that name their steps.
            return run if run.process is process else None
        return run if run.process == process or peers.same_group(run.process, process) else None

    async def _claim(self, named: Named, process: Process | None) -> Run | Refusal:
        claimed = await self._journal.ask(lambda connection: self._try(connection, named, process))
        if isinstance(claimed, Refusal):
            return claimed
        bound = await self._attempts.bind(Fence(named.run, runs.hash_token(claimed.token), self._sidecar))
        if isinstance(bound, Run):
            bound.tokenless = True
            self._attempts.take_hints(bound)
            bound.process = process
            bound.stale = "this process has begun with an earlier attempt, which is over" if claimed.stale else ""
        return bound

    async def _try(self, connection: Connection, named: Named, process: Process | None) -> _Claimed | Refusal:
        """Claim the run for *process*. May be repeated: a claim whose reply was lost is taken over by the next."""
        await runs.create(connection, named.run)
        row = await runs.get_run(connection, named.run)
        if row.tokened:
            return Refusal(
                "fenced",
                f"Run {named.run} was claimed with a token and takes its current token only. Nothing was sent. "
                f"{ways_out(named.run)}",
                named.run,
            )
        if row.status not in (RunStatus.RUNNING, RunStatus.QUEUED):
            return refusal_of(named.run, Stopped(row.status, row.stop_step, row.stop_message))
        earlier = await runs.attempts(connection, named.run)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(None, self._look, named, row, earlier, process)
        if isinstance(found, Refusal):
            return found
        try:
            claim = await runs.claim(
                connection, named.run, kind="named" if process is None else "group", host=self._host,
                folder=self._folder, lease=self._lease, proved_dead=found.proved_dead,
                process=None if process is None else str(process),
            )  # fmt: skip
        except (Held, NotNow) as error:
            return Refusal("fenced", f"{error}. Nothing was sent.", named.run)
        return _Claimed(claim.token, found.stale)

    # ---- who lives

    def _look(
        self, named: Named, row: RunRow, earlier: Sequence[AttemptRow], process: Process | None
    ) -> _Found | Refusal:
        """What the attempts so far mean for *process*, which names the run."""
        holder = earlier[-1] if row.status is RunStatus.RUNNING else None
        mine = [attempt for attempt in earlier if process is not None and self._was(attempt, process)]
        if holder is not None and holder in mine:
            return self._mine(named, holder)
        gone = holder is not None and self._gone(row, holder, process)
        if isinstance(gone, Refusal):
            return gone
        if mine and named.step is None:
            return Refusal(
                "no-attempt",
                f"Attempt {mine[-1].n} of run {row.id} was this process group and has ended; whether it goes on or "
                f"begins anew, nobody can say. Nothing was sent. {ways_out(row.id)}",
                row.id,
            )
        return _Found(gone, stale=bool(mine))

    def _mine(self, named: Named, holder: AttemptRow) -> _Found | Refusal:
        """*holder*, which is unknown here, was made by the very group that speaks."""
        known = self._attempts.get(named.run)
        if known is not None and known.tape.attempt == holder.n and known.refusal is not None:
            return known.refusal
        if holder.sidecar is None or holder.sidecar == self._sidecar:
            return _Found(True, stale=False)  # its claim failed half-way: nothing was done under it
        if named.step is not None and holder.folder == self._folder:
            return _Found(True, stale=True)  # that sidecar is dead, and a repeated step is the same step
        return Refusal(
            "sidecar-changed",
            f"This attempt of run {named.run} began with another sidecar process ({holder.sidecar}) and ends with it. "
            f"Nothing was sent. Start the agent again, in a process group of its own, as an interactive shell does. "
            f"Where that cannot be: {ways_out(named.run)}",
            named.run,
        )

    def _was(self, attempt: AttemptRow, process: Process) -> bool:
        """*attempt* was made by the group that *process* is of, or by itself when it was of another."""
        first = self._first(attempt)
        if first is None:
            return False
        itself = (first.pid, first.started, first.world) == (process.pid, process.started, process.world)
        return itself or peers.same_group(first, process)

    def _first(self, attempt: AttemptRow) -> Process | None:
        if attempt.kind != "group" or attempt.process is None or attempt.host != self._host:
            return None
        return Process.parse(attempt.process)

    def _gone(self, row: RunRow, holder: AttemptRow, process: Process | None) -> bool | Refusal:
        if process is None:
            return holder.kind == "named"  # a repeated step is the same step
        first = self._first(holder)
        if first is None:
            return False
        if first.world != peers.world():
            # Its numbers say nothing now. But its sidecar was of our folder, and saw what ours sees.
            return holder.folder == self._folder
        if not peers.group_alive(first):
            return True
        living = ", ".join(f"{other.pid} {peers.name(other)}" for other in peers.members(first)[:3])
        return Refusal(
            "fenced",
            f"Process group {first.group} is working on run {row.id} and is alive ({living}); this is group "
            f"{process.group}. Nothing was sent. End the other one first, or name another run.",
            row.id,
        )
