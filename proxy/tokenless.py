"""Runs named without a token: the attempt is the client's process group (DESIGN §2).

On the same host a program's process group tells one execution from the next; its lease is held, and its token
kept, by the sidecar. What cannot be told apart is refused with the ways out, never guessed.
"""

import asyncio
import socket

from proxy import peers
from proxy.attempts import Attempts, Run, refusal_of
from proxy.doors import Door
from proxy.identity import Named
from proxy.peers import Process
from proxy.refusals import Refusal
from runtime import runs
from runtime.entries import Fence, Fenced
from runtime.errors import Held, NotNow
from runtime.journal import Journal
from runtime.runs import AttemptRow


class Tokenless:
    """Finds or makes the attempt of a client that named a run and no token."""

    def __init__(self, attempts: Attempts, journal: Journal, sidecar: str, folder: str, lease: float) -> None:
        self._attempts = attempts
        self._journal = journal
        self._sidecar = sidecar
        self._folder = folder
        self._lease = lease
        self._host = socket.gethostname()
        self._lock = asyncio.Lock()

    async def of(self, named: Named, door: Door) -> Run | Refusal:
        """The attempt that the client at *door* is. Raises DatabaseAway."""
        run = self._attempts.get(named.run)
        known = run.process if run is not None else None
        process = await self._process(door, known)
        if process is None and named.step is None:
            return Refusal(
                "no-attempt",
                f"Run {named.run} is named without a token, and the process at the other end of the connection cannot "
                f"be read (another host, user or container). {_ways_out(named.run)}",
                named.run,
            )
        if run is not None and run.tokenless and self._same(run, process):
            run.stale = run.stale or (process is not None and known is not None and self._replaced(known, process))
            return await self._attempts.trusted(run)
        async with self._lock:
            run = self._attempts.get(named.run)
            if run is not None and run.tokenless and self._same(run, process):
                return await self._attempts.trusted(run)
            return await self._claim(named, process)

    async def _process(self, door: Door, known: Process | None) -> Process | None:
        if door.process is None and door.peer is not None and door.local is not None:
            loop = asyncio.get_running_loop()
            first = (known.pid,) if known is not None else ()
            door.process = await loop.run_in_executor(None, peers.at, door.peer, door.local, first)
        return door.process

    @staticmethod
    def _same(run: Run, process: Process | None) -> bool:
        if run.process is None or process is None:
            return run.process is process
        return run.process.group == process.group

    @staticmethod
    def _replaced(first: Process, process: Process) -> bool:
        return first != process and not peers.alive(first)

    async def _claim(self, named: Named, process: Process | None) -> Run | Refusal:
        async with self._journal.connection() as connection:
            await runs.create(connection, named.run)
            row = await runs.get_run(connection, named.run)
            if row.tokened:
                return Refusal(
                    "fenced",
                    f"Run {named.run} was claimed with a token and takes its current token only. Nothing was sent. "
                    f"{_ways_out(named.run)}",
                    named.run,
                )
            before = await runs.last_attempt(connection, named.run)
            standing = self._standing(named.run, before, process)
            if isinstance(standing, Refusal):
                return standing
            try:
                claim = await runs.claim(
                    connection, named.run, kind="named" if process is None else "group", host=self._host,
                    folder=self._folder, lease=self._lease, proved_dead=standing,
                    process=None if process is None else str(process),
                )  # fmt: skip
            except (Held, NotNow) as error:
                return Refusal("fenced", f"{error} Nothing was sent.", named.run)
        bound = await self._attempts.bind(Fence(named.run, runs.hash_token(claim.token), self._sidecar))
        if isinstance(bound, Run):
            bound.tokenless = True
            bound.process = process
        return bound

    def _standing(self, run_id: str, before: AttemptRow | None, process: Process | None) -> bool | Refusal:
        """Whether the attempt before is proved dead, or the refusal if it lives."""
        if before is None or before.ended_at is not None or before.kind not in ("group", "named"):
            return False
        if before.process is None or process is None:
            # Attempts that name their steps need no fence: a repeated step is the same step.
            return before.process is None and process is None
        first = Process.parse(before.process)
        if before.host != self._host:
            return False
        if not peers.group_alive(first):
            return True
        if first.group == process.group:
            return refusal_of(run_id, Fenced(sidecar=before.sidecar or "unknown"))
        return Refusal(
            "fenced",
            f"Process group {first.group} is working on run {run_id} and is alive; this is group {process.group}. "
            f"Nothing was sent. End the other one first, or name another run.",
            run_id,
        )


def _ways_out(run_id: str) -> str:
    return (
        f"Start the agent with `twiceshy run --run {run_id} -- COMMAND`, give it a token of "
        f"`twiceshy claim {run_id}`, or name each step with a Twiceshy-Step header."
    )
