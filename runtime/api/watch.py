"""Watching runs: one statement per beat for all that anybody waits for, however many wait.

Polling alone: it needs no session of its own, and loses nothing.
"""

import asyncio
from dataclasses import dataclass
from datetime import datetime

from runtime import rows
from runtime.api.store import Store
from runtime.database import sql, transaction
from runtime.errors import DatabaseAway
from runtime.step import RunStatus

#: Seconds between two looks, at most: a tail is to be live, whatever the setting ``poll`` says.
BEAT = 0.25


@dataclass(frozen=True, slots=True)
class Look:
    """What of a run changes. ``counter`` moves with each step, answer and event."""

    status: RunStatus
    counter: int
    attempt: int
    changed_at: datetime


class Watch:
    """Those who wait, and the task that looks for them while there are any."""

    def __init__(self, store: Store, poll: float) -> None:
        self._store = store
        self._beat = min(poll, BEAT)
        self._waiting: dict[str, int] = {}
        self._seen: dict[str, Look] = {}
        self._news = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    async def changed(self, run_id: str, known: Look | None, timeout: float) -> Look | None:
        """How the run stands as soon as that is not as *known*; None: it is, after *timeout* seconds."""
        self._waiting[run_id] = self._waiting.get(run_id, 0) + 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        try:
            async with asyncio.timeout(timeout), self._news:
                await self._news.wait_for(lambda: self._ended or self._seen.get(run_id, known) != known)
                return None if self._ended else self._seen[run_id]
        except TimeoutError:
            return None
        finally:
            self._waiting[run_id] -= 1
            if not self._waiting[run_id]:
                del self._waiting[run_id]
                self._seen.pop(run_id, None)

    async def end(self) -> None:
        """Look no more; those who wait, wait no longer."""
        async with self._news:
            self._ended = True
            self._news.notify_all()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _look(self) -> None:
        while self._waiting:
            try:
                async with self._store.connection() as connection, transaction(connection):
                    found = await connection.fetch(sql("watched"), list(self._waiting))
            except DatabaseAway:
                found = []  # it is waited out: each waits for its own time only
            async with self._news:
                for row in found:
                    if row["id"] in self._waiting:
                        status = rows.known(RunStatus, row["status"], f"run {row['id']}")
                        self._seen[row["id"]] = Look(status, row["counter"], row["attempt"], row["changed_at"])
                self._news.notify_all()
            await asyncio.sleep(self._beat)
