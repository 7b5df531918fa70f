"""Local steps whose time is up: their attempts are ended. Shell.

By this process's monotonic clock, in whose memory the permits are; an attempt ends with its sidecar anyway. The run is
queued again under nobody's token, which fences the attempt; its launcher sees that and ends its processes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from proxy.attempts import Attempts
from proxy.policy import Permit
from proxy.refusals import Refusal
from proxy.run import Run
from proxy.tape import Step
from runtime.errors import DatabaseAway
from runtime.settings import Settings
from runtime.step import State

log = logging.getLogger("twiceshy.overdue")

#: Who looks this much too late (seconds) was stopped, and first reads what came meanwhile: heartbeats, outputs.
LATE = 1.0


class Overdue:
    """Watches over permits. One per sidecar."""

    def __init__(self, attempts: Attempts, settings: Settings) -> None:
        self._attempts = attempts
        self._settings = settings
        self._ending: set[asyncio.Task[None]] = set()

    def watch(self, run: Run, step: Step, permit: Permit, *, late: bool = False) -> None:
        """Look at *permit* when its time is up."""
        due = permit.due()
        if due is not None:
            loop = asyncio.get_running_loop()
            at = loop.time() + LATE if late else due[0]
            loop.call_at(at, self._look, run, step, permit, at, late)

    def _look(self, run: Run, step: Step, permit: Permit, at: float, late: bool) -> None:
        due, now = permit.due(), asyncio.get_running_loop().time()
        if due is None or not self._stands(run, step, permit):
            return
        if now < due[0]:
            self.watch(run, step, permit)
        elif now - at > LATE and not late:
            self.watch(run, step, permit, late=True)
        else:
            task = asyncio.create_task(self._end(run, step, permit, due[1]))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    @staticmethod
    def _stands(run: Run, step: Step, permit: Permit) -> bool:
        """Whether *step* still is done under *permit*."""
        return run.refusal is None and run.permits.get(step.key) is permit and step.state is State.SENT

    async def _end(self, run: Run, step: Step, permit: Permit, how: str) -> None:
        await self._patiently(lambda: self._attempts.look(run))  # it may stand in a transaction of the agent's own
        if not self._stands(run, step, permit):
            return
        words = f"tep {step.key} ({step.facts.shown}) {how}"
        over = f"S{words}: this attempt of run {run.run_id} is over, and the next one does the step again."
        run.refuse(Refusal("fenced", f"{over} This process should end.", run.run_id, step.key))
        # Its processes are to be gone before somebody begins anew.
        pause = self._settings.backoff + 2 * self._settings.poll
        await self._patiently(lambda: self._attempts.fail(run, f"s{words}", pause))

    async def _patiently(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await work()
            except DatabaseAway as error:
                log.warning("%s", error)
                await asyncio.sleep(self._settings.poll)

    async def close(self) -> None:
        """Leave off."""
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
