"""Parks runs whose agents do nothing but wait: the agent is told so and ended, and its run goes on without a process.

Only where somebody has the agent's process and starts the next one. What else the agent does, the sidecar sees as
requests, local steps, and, on the same host, as processor time of its process group.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from proxy import own, peers
from proxy.attempts import Attempts
from proxy.doors import Door
from proxy.peers import Process
from proxy.refusals import Refusal
from proxy.run import Run
from proxy.stillness import Going, held, works
from proxy.tape import Where
from runtime.entries import Own, Parked
from runtime.errors import TwiceshyError
from runtime.journal import Journal
from runtime.settings import Settings
from runtime.step import Kind, State

log = logging.getLogger("twiceshy.parking")


@dataclass(frozen=True, slots=True)
class _Seen:
    """How much processor time an agent had used when that was looked at, and whether it had worked until then."""

    at: float
    used: float
    worked: bool


class Parking:
    """Looks after the runs of a sidecar. One per sidecar."""

    def __init__(self, attempts: Attempts, journal: Journal, settings: Settings) -> None:
        self._attempts = attempts
        self._journal = journal
        self._settings = settings
        self._seen: dict[Run, _Seen] = {}

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        settings = self._settings
        pause = min(settings.poll, settings.hold)
        while True:
            await asyncio.sleep(pause)
            waiting = [run for run in self._attempts.running() if run.owned and going(run).waits]
            self._seen = {run: seen for run, seen in self._seen.items() if run in waiting}
            for run in waiting:
                try:
                    await self._park(run)
                except TwiceshyError as error:
                    log.warning("run %s cannot park: %s", run.run_id, error)
                except Exception:
                    log.exception("run %s cannot park", run.run_id)

    async def _park(self, run: Run) -> None:
        await self._attempts.look(run)
        works = await self._works(run)
        steps = held(going(run), self._settings.hold, self._settings.park_quiet)
        if works or not steps or run.refusal is not None:
            return
        parked = await self._journal.park(run.fence, steps)
        if parked is not None:
            kinds = [run.tape.steps[key].facts.own for key in steps]
            words = {_words(each) for each in kinds if each is not None and each.subject is not None}
            run.refuse(_refusal(run.run_id, parked, sorted(words)))
            await self._attempts.save(run)

    async def _works(self, run: Run) -> bool:
        """Whether its processes do something, or that is not known yet."""
        now, before = time.monotonic(), self._seen.get(run)
        if before is None or now - before.at >= self._settings.park_quiet:
            found = await asyncio.get_running_loop().run_in_executor(None, _processes, list(run.serving))
            if not found:
                return False  # it is on another host, or another user's
            used, runs = await asyncio.get_running_loop().run_in_executor(None, _looked_at, found)
            # Where too many want a processor, who works may have had none for a while.
            worked = before is None or runs or works(before.used, used, now - before.at)
            self._seen[run] = _Seen(now, used, worked)
        return self._seen[run].worked


def going(run: Run) -> Going:
    """What of *run*'s attempt is going on."""
    now = time.monotonic()
    waits, others = {}, run.open
    for step in run.serving.values():
        if step is not None and step.facts.kind.waits and step.where is Where.HERE:
            waits[step.key] = now - run.exchange_of(step).began
        else:
            others += 1
    local = sum(
        step.claimed and step.facts.kind is Kind.LOCAL and step.state is State.SENT for step in run.tape.steps.values()
    )
    return Going(waits, others, local, now - run.idle_since)


def _processes(doors: list[Door]) -> list[Process]:
    """One process of each group at the other ends of *doors*, as far as they can be read."""
    for door in doors:
        if door.process is None and door.peer is not None and door.local is not None:
            door.process = peers.at(door.peer, door.local)
    return list({door.process.group: door.process for door in doors if door.process is not None}.values())


def _looked_at(processes: list[Process]) -> tuple[float, bool]:
    """The processor time of their groups, and whether they want more of it right now."""
    return sum(map(peers.used, processes)), any(map(peers.runs, processes))


def _words(waited: Own) -> str:
    what = {Kind.APPROVAL: "the approval", Kind.CHILD: "the end of run"}.get(waited.kind, "the event")
    return f"for {what} {waited.subject!r}"


def _refusal(run_id: str, parked: Parked, words: list[str]) -> Refusal:
    until = None if parked.until is None else own.stamp(parked.until)
    what = [f"until {until}"] if until is not None else []
    what += words
    return Refusal(
        "parked",
        f"Run {run_id} is parked: it waits {' or '.join(what)}, and its agent is started again then. This process "
        "should end.",
        run_id,
        resume_at=until,
    )
