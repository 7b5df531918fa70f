"""Group commit: one task, one held connection, one round trip and one commit for all that waits.

Measured: an ``acquire`` per statement doubles the round trips, and a commit per entry bounds 64 writers to a
third of what they get here.

* What is written while a batch is on its way goes into the next one.
* A batch whose values are refused is halved until only the refused entry fails.
* A connection lost in the middle leaves a COMMIT of unknown fate: the batch is repeated, and
  ``twiceshy.write`` knows by its exchange what was committed before.
* An entry outlives its caller: who is cancelled loses the outcome, not the effect. Only an *intent* loses its
  sense with its caller: it is dropped, and put back if it may have been committed, so that no step is left
  *sent* that nobody ever sent.
* Postgres away: intents, reads and stops raise DatabaseAway after ``database_wait``; answers and put-backs,
  which say what truly happened, are tried for ever.
* A run whose row is locked by somebody is set aside for a moment: it must not hold up the others.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any

import asyncpg

from runtime import database, rows
from runtime.database import Connection, sql
from runtime.entries import Answer, Entry, Intent, Outcome, PutBack
from runtime.errors import DatabaseAway, Unreadable, Unwritable, UsageError
from runtime.retry import backoff

log = logging.getLogger(__name__)

#: Bounds of a batch. Beyond about 100 entries a larger one saves nothing; Postgres takes no value over 1 GB.
BATCH = 256
BATCH_BYTES = 8 << 20
#: A batch may take half of database_wait, and this long more for each of its MB.
PATIENCE_PER_MB = 1.0
#: How long a run whose row is locked is set aside.
ASIDE = 0.5

_BY_RUN = attrgetter("run_id")
#: Errors that roll a transaction back and leave the connection as it was: a lock, a deadlock.
_UNHARMED = (asyncpg.LockNotAvailableError, asyncpg.TransactionRollbackError)


class Pending:
    """An entry on its way, and its caller's future."""

    __slots__ = ("done", "dropped", "entry", "row", "tried")

    def __init__(self, entry: Entry, done: asyncio.Future[Outcome]) -> None:
        self.entry = entry
        self.row = rows.entry_row(entry)
        self.done = done
        self.tried = False  # it was in a batch: its fate may be unknown
        self.dropped = False  # it is not to be written (again)

    @property
    def run_id(self) -> str:
        run_id: str = self.row[1]
        return run_id

    def answer(self, outcome: Outcome) -> None:
        if not self.done.done():
            self.done.set_result(outcome)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Writer:
    """The one writer of a sidecar."""

    def __init__(self, dsn: str, wait: float) -> None:
        self._dsn = dsn
        self._wait = wait
        self.pooler = database.through_pooler(dsn)
        self._connection: Connection | None = None
        #: Since when, by the database's clock, the connection has been up without a break. None: it is down.
        self.connected: datetime | None = None
        self._queue: deque[Pending] = deque()
        self._aside: dict[str, list[Pending]] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._why = "not connected yet"
        self._closed = False

    async def start(self) -> None:
        """Connect, and see that the schema is there. Raises DatabaseAway, UsageError."""
        try:
            connection = await self._connect()
            await self._fetch(connection, [])
            for row in await connection.fetch(sql("durability")):
                log.warning(
                    "%s runs with %s = %s: with the machine, answers that agents acted on may be lost",
                    database.where(self._dsn), row["name"], row["setting"],
                )  # fmt: skip
        except (asyncpg.InvalidSchemaNameError, asyncpg.UndefinedObjectError, asyncpg.UndefinedFunctionError) as error:
            await self._disconnect()
            raise UsageError(
                f"{database.where(self._dsn)} is not set up for this version ({error}): run `twiceshy init-db`"
            ) from error
        except database.ERRORS as error:
            await self._disconnect()
            raise DatabaseAway(f"{database.where(self._dsn)}: {error}") from error
        self._task = asyncio.create_task(self._run(), name="journal writer")

    async def write(self, entry: Entry) -> Outcome:
        """Commit *entry* and say what became of it. Raises DatabaseAway, Unwritable."""
        if self._closed:
            raise DatabaseAway("the journal is closed; nothing was written")
        pending = Pending(entry, asyncio.get_running_loop().create_future())
        self._put(pending)
        try:
            if isinstance(entry, Answer | PutBack):
                return await pending.done
            async with asyncio.timeout(self._wait):
                return await pending.done
        except TimeoutError:
            self._abandon(pending, drop=True)
            raise DatabaseAway(f"Postgres has not answered for {self._wait:g} s: {self._why}") from None
        except asyncio.CancelledError:
            self._abandon(pending, drop=isinstance(entry, Intent))
            raise

    async def close(self, patience: float) -> None:
        """Write what waits, for *patience* seconds at most; then whoever still waits gets DatabaseAway."""
        self._closed = True
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()
        except TimeoutError:
            log.warning("the journal closes with entries unwritten: %s", self._why)
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait({self._task})
            left = [*self._queue, *(pending for aside in self._aside.values() for pending in aside)]
            self._queue.clear()
            self._aside.clear()
            for pending in left:
                pending.fail(DatabaseAway(f"the journal was closed before Postgres answered: {self._why}"))
            await self._disconnect()

    # ---- the queue

    def _put(self, pending: Pending) -> None:
        self._queue.append(pending)
        self._idle.clear()
        self._wake.set()

    def _abandon(self, pending: Pending, *, drop: bool) -> None:
        """The caller of *pending* is gone and has not learnt, or not used, its outcome."""
        if not drop:
            return
        pending.dropped = True
        if pending.tried and isinstance(pending.entry, Intent):
            intent = pending.entry
            done: asyncio.Future[Outcome] = pending.done.get_loop().create_future()
            done.add_done_callback(database.heard)
            self._put(Pending(PutBack(intent.fence.run_id, intent.facts.key, intent.exchange), done))

    def _take(self) -> list[Pending]:
        """The next batch, sorted by run: runs are locked in that order by every writer."""
        batch: list[Pending] = []
        size = 0
        while self._queue and len(batch) < BATCH and size < BATCH_BYTES:
            pending = self._queue.popleft()
            if pending.dropped:
                continue
            if pending.run_id in self._aside:
                self._aside[pending.run_id].append(pending)
                continue
            pending.tried = True
            size += rows.size(pending.row)
            batch.append(pending)
        batch.sort(key=_BY_RUN)
        return batch

    def _set_aside(self, batch: list[Pending]) -> None:
        self._aside[batch[0].run_id] = batch
        asyncio.get_running_loop().call_later(ASIDE, self._back, batch[0].run_id)

    def _back(self, run_id: str) -> None:
        self._queue.extend(self._aside.pop(run_id, ()))
        self._wake.set()

    # ---- the task

    async def _run(self) -> None:
        while True:
            batch = self._take()
            if batch:
                try:
                    await self._commit(batch)
                except asyncio.CancelledError:
                    self._queue.extendleft(reversed(batch))  # whoever waits is told by close()
                    raise
                except Exception as error:
                    # A fault of ours. Whoever waits must not wait for ever, nor those that come after.
                    log.exception("the journal's writer")
                    for pending in batch:
                        pending.fail(error)
                continue
            if not self._aside:
                self._idle.set()
            self._wake.clear()
            await self._wake.wait()

    async def _commit(self, batch: list[Pending]) -> None:
        """Write *batch*, however often it takes."""
        tries = 0
        while batch := [pending for pending in batch if not pending.dropped]:
            try:
                found = await self._send([pending.row for pending in batch])
            except asyncpg.LockNotAvailableError:
                middle = _between_runs(batch)
                if middle:
                    await self._commit(batch[:middle])
                    await self._commit(batch[middle:])
                else:
                    self._set_aside(batch)
                return
            except Exception as error:
                if not database.is_poison(error):
                    self._why = str(error) or type(error).__name__
                    log.warning("the journal waits for Postgres: %s", self._why)
                    await asyncio.sleep(backoff(tries, random.random(), base=0.05, cap=1.0))
                    tries += 1
                    continue
                if len(batch) > 1:
                    await self._commit(batch[: len(batch) // 2])
                    await self._commit(batch[len(batch) // 2 :])
                else:
                    batch[0].fail(Unwritable(f"run {batch[0].run_id}: {_kind(batch[0])} refused by Postgres: {error}"))
                return
            for pending, row in zip(batch, found, strict=True):
                try:
                    pending.answer(rows.outcome(pending.run_id, row))
                except Unreadable as error:
                    pending.fail(error)
            return

    async def _send(self, batch: Sequence[tuple[Any, ...]]) -> list[asyncpg.Record]:
        """One round trip. An error other than a refusal closes the connection: its state is not known."""
        connection = self._connection
        if connection is None or connection.is_closed():
            connection = await self._connect()
        # Half the wait: a connection that a firewall forgot leaves time for a fresh one.
        patience = self._wait / 2 + PATIENCE_PER_MB * sum(map(rows.size, batch)) / (1 << 20)
        try:
            with database.bounded(connection, patience):
                return await self._fetch(connection, batch)
        except Exception as error:
            if not database.is_poison(error) and not isinstance(error, _UNHARMED):
                await self._disconnect()
            raise

    async def _fetch(self, connection: Connection, batch: Sequence[tuple[Any, ...]]) -> list[asyncpg.Record]:
        if not self.pooler:
            return await connection.fetch(sql("write"), batch)
        async with connection.transaction():
            return await connection.fetch(sql("write"), batch)

    async def _connect(self) -> Connection:
        await self._disconnect()
        self._connection = await database.connect(
            self._dsn, name="journal", timeout=min(database.CONNECT_TIMEOUT, self._wait)
        )
        self.connected = await self._connection.fetchval(sql("now"))
        return self._connection

    async def _disconnect(self) -> None:
        connection, self._connection, self.connected = self._connection, None, None
        if connection is not None and not connection.is_closed():
            connection.terminate()


def _kind(pending: Pending) -> str:
    return type(pending.entry).__name__.lower()


def _between_runs(batch: list[Pending]) -> int:
    """Where to cut *batch* so that no run is in both halves; 0: it is all one run."""
    cuts = [n for n in range(1, len(batch)) if batch[n].run_id != batch[n - 1].run_id]
    return min(cuts, key=lambda n: abs(2 * n - len(batch)), default=0)
