"""Sleeps and waits that are held open here: one task asks the database about all of them, in one statement.

What is due is the database's to say, by its clock and what came for a run: a wait is never ended by something that only
this process was told. A look comes each ``poll``, at the next deadline, and as soon as somebody new waits.
"""

import asyncio
import logging
from dataclasses import dataclass
from uuid import UUID

from runtime.entries import Waiting
from runtime.errors import TwiceshyError
from runtime.journal import Journal

log = logging.getLogger("twiceshy.wakes")


@dataclass(slots=True)
class _Waiter:
    run: str
    key: str
    due: asyncio.Future[Waiting]


class Wakes:
    """All that wait in this sidecar. One per sidecar."""

    def __init__(self, journal: Journal, poll: float) -> None:
        self._journal = journal
        self._poll = poll
        self._waiters: dict[UUID, _Waiter] = {}
        self._fresh = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def due(self, run: str, key: str, exchange: UUID) -> Waiting:
        """Wait until the step *key*, under *exchange*, is over: its deadline has passed, or what it waits for is here.

        Until ``forget`` its event is passed over when others of its name are looked after.
        """
        waiter = _Waiter(run, key, asyncio.get_running_loop().create_future())
        self._waiters[exchange] = waiter
        self._fresh.set()
        if self._task is None:
            self._task = asyncio.create_task(self._look(), name="wakes")
        return await waiter.due

    def forget(self, exchange: UUID) -> None:
        """Nobody waits under *exchange* any more, or what came of it is recorded."""
        self._waiters.pop(exchange, None)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            if not self._waiters:
                await self._fresh.wait()
            self._fresh.clear()
            pause = self._poll
            try:
                pause = await self._wake()
            except TwiceshyError as error:
                log.warning("waits: %s", error)
            except Exception:
                log.exception("waits")
            try:
                async with asyncio.timeout(pause):
                    await self._fresh.wait()
            except TimeoutError:
                pass

    async def _wake(self) -> float:
        """Tell those that are due; the seconds to the next look."""
        asked = [(waiter.run, waiter.key, exchange) for exchange, waiter in self._waiters.items()]
        pause = self._poll
        for exchange, found in (await self._journal.waiting(asked) if asked else {}).items():
            waiter = self._waiters.get(exchange)
            if waiter is None or waiter.due.done():
                continue
            if found.came is not None or (found.left is not None and found.left <= 0):
                waiter.due.set_result(found)
            elif found.left is not None:
                pause = min(pause, found.left)
        return pause
