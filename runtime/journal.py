"""The sidecar's door to the database: what it writes, loads, renews and says of itself.

Entries go through one writer in group commits (``runtime.writer``). All else is rare, goes through a small
pool, and may be repeated: a lost connection is waited out for ``database_wait``, then DatabaseAway is raised.
A caller that is cancelled leaves at once; what it asked for goes on to its end, and its connection back.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, TypeVar, cast
from uuid import UUID

import asyncpg

from runtime import database, lease, rows, runs
from runtime.database import Connection, sql
from runtime.entries import (
    AnswerRow,
    Bound,
    ChildEnd,
    Decision,
    Entry,
    Event,
    Fence,
    Fenced,
    Outcome,
    Parked,
    StepRow,
    Stopped,
    TapeRows,
    Waiting,
)
from runtime.errors import DatabaseAway, NotFound, TwiceshyError, Unreadable, Unwritable, UsageError
from runtime.retry import backoff
from runtime.settings import Settings
from runtime.step import Finality, RunStatus, State
from runtime.tape import Counts, read_attempt
from runtime.writer import Writer

T = TypeVar("T")

#: Connections for what is not an entry.
POOL = 4
#: Rows understood between two looks at the event loop: some milliseconds of work.
BREATH = 500


class Journal:
    """Everything that a sidecar asks of the database."""

    def __init__(self, writer: Writer, pool: "asyncpg.Pool[asyncpg.Record]", settings: Settings) -> None:
        self._writer = writer
        self._pool = pool
        self._settings = settings
        self._pooler = writer.pooler
        self._tasks: set[asyncio.Task[Any]] = set()

    @classmethod
    async def open(cls, dsn: str, settings: Settings) -> "Journal":
        """Connect. Raises DatabaseAway, and UsageError when the schema is not set up."""
        writer = Writer(dsn, settings.database_wait)
        await writer.start()
        plain, arguments = database.split(dsn)
        pool = await asyncpg.create_pool(
            plain,
            min_size=0,
            max_size=POOL,
            connection_class=database.Stateless,
            timeout=min(database.CONNECT_TIMEOUT, settings.database_wait),
            server_settings={"application_name": "twiceshy sidecar"},
            **arguments,
        )
        return cls(writer, pool, settings)

    async def close(self) -> None:
        """Write what waits (for ``drain`` seconds at most) and disconnect."""
        await self._writer.close(self._settings.drain)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.drain)
        self._pool.terminate()

    async def write(self, entry: Entry) -> Outcome:
        """Commit *entry*, together with whatever else waits. Raises DatabaseAway, Unwritable."""
        return await self._writer.write(entry)

    # ---- runs

    async def bind(self, fence: Fence) -> Bound | Fenced | Stopped:
        """First request of an attempt: from now on it lives with this sidecar."""

        async def work(connection: Connection) -> Bound | Fenced | Stopped:
            await connection.fetchval(sql("bind"), fence.run_id, fence.token_hash, fence.sidecar)
            return _standing(await connection.fetchrow(sql("fences"), [fence.run_id]), fence)

        return await self.ask(work)

    async def renew(self, fences: list[Fence], *, extend: bool) -> dict[str, Bound | Fenced | Stopped]:
        """Where the run of each fence stands, by run; *extend*: leases of fences that hold last longer.

        A run that somebody has locked keeps what is left of its lease: an agent's own transaction (record_step) must
        not hold up the others. Where it was one of our own batches, the run is free a moment later.
        """
        found: dict[str, Bound | Fenced | Stopped] = {}
        left = fences
        for pause in (*runs.LOCKED_PAUSES, None):
            extended = await self._extend(left) if extend and left else set()
            found |= await self._standings(left) if left else {}
            left = [fence for fence in left if isinstance(found[fence.run_id], Bound) and fence.run_id not in extended]
            if not (extend and left) or pause is None:
                break
            await asyncio.sleep(pause)
        return found

    async def _extend(self, fences: list[Fence]) -> set[str]:
        """Make leases last longer; the runs whose leases do."""
        columns = [[getattr(fence, name) for fence in fences] for name in ("run_id", "token_hash", "sidecar")]
        lasting = await self.ask(lambda connection: connection.fetch(sql("extend"), *columns, self._settings.lease))
        return {row["id"] for row in lasting}

    async def _standings(self, fences: list[Fence]) -> dict[str, Bound | Fenced | Stopped]:
        names = [fence.run_id for fence in fences]
        by_run = {row["id"]: row for row in await self.ask(lambda connection: connection.fetch(sql("fences"), names))}
        return {fence.run_id: _standing(by_run.get(fence.run_id), fence) for fence in fences}

    async def load(self, run_id: str) -> TapeRows | None:
        """The run's index, in one snapshot; None: no such run. Raises Unreadable for what is not understood."""

        return await self.ask(lambda connection: self._load(connection, run_id), snapshot=True)

    async def _load(self, connection: Connection, run_id: str) -> TapeRows | None:
        run = await connection.fetchrow(sql("load_run"), run_id)
        if run is None:
            return None
        clock = lease.Clock(run["now"], run["server_started"], self._writer.connected or run["now"])
        status = rows.known(RunStatus, run["status"], f"run {run_id}")
        steps: dict[str, StepRow] = {}
        for n, row in enumerate(await connection.fetch(sql("load_steps"), run_id, self._settings.index_body)):
            if n % BREATH == BREATH - 1:
                await asyncio.sleep(0)
            dead = not lease.silent_for(clock, row["sidecar_expires_at"], self._settings.lease)
            steps[row["key"]] = rows.step_row(run_id, row, sidecar_dead=dead)
        for n, row in enumerate(await connection.fetch(sql("load_answers"), run_id, self._settings.index_body)):
            if n % BREATH == BREATH - 1:
                await asyncio.sleep(0)
            step = steps.get(row["key"])
            if step is None:
                raise Unreadable(f"run {run_id}: an answer of step {row['key']}, which is not there; nothing was sent")
            step.answers.append(rows.answer_row(run_id, row, len(step.answers)))
        await self._complete(connection, run_id, steps)
        return TapeRows(
            run_id=run_id,
            uuid=run["uuid"],
            attempt=run["attempt"],
            token_hash=run["token_hash"],
            status=status,
            stop_step=run["stop_step"],
            stop_message=run["stop_message"],
            sidecar=run["sidecar"],
            lease_left=_left(run),
            last_failed_barren=run["last_failed_barren"],
            now=run["now"],
            steps=list(steps.values()),
            owned=run["owned"],
            agent=run["agent"],
        )

    @staticmethod
    async def _complete(connection: Connection, run_id: str, steps: dict[str, StepRow]) -> None:
        """Refuse answered steps without an answer; add the first bytes of open ones, which may go out again."""
        wanted = []
        for key, step in steps.items():
            if step.state is State.ANSWERED and not step.answers:
                raise Unreadable(f"run {run_id}: step {key} is answered and has no answer; nothing was sent")
            if not step.request_loaded and step.answers[-1].facts.finality is not Finality.FINAL:
                wanted.append(key)
        for row in await connection.fetch(sql("request_bodies"), run_id, wanted) if wanted else ():
            step = steps[row["key"]]
            step.facts = rows.with_body(step.facts, row["request_body"])
            step.request_loaded = True

    async def about(self, run_id: str) -> rows.Row | None:
        """What the run works on, and how long its history is: agent, input, continued_from, steps."""
        return await self.ask(lambda connection: connection.fetchrow(sql("about"), run_id))

    async def put_result(self, fence: Fence, result: bytes) -> bool:
        """Keep the run's result; False: the fence does not hold."""
        return await self.ask(lambda connection: runs.put_result(connection, fence.run_id, fence.token_hash, result))

    async def save_tape(self, run_id: str, n: int, tape: bytes) -> None:
        """Keep what attempt *n* did, for people."""
        counts = read_attempt(n, None, None, tape).counts or Counts()
        sums = (counts.replayed, counts.joined, counts.calls_saved, counts.tokens_saved)
        await self.ask(lambda connection: connection.execute(sql("save_tape"), run_id, n, tape, *sums))

    # ---- waits

    async def now(self) -> datetime:
        """The database's time."""
        return cast(datetime, await self.ask(lambda connection: connection.fetchval(sql("now"))))

    async def waiting(self, steps: Sequence[tuple[str, str, UUID]]) -> dict[UUID, Waiting]:
        """How steps (run, key, exchange) stand that wait under their exchanges, by exchange."""
        columns = [list(column) for column in zip(*steps, strict=True)]
        return {
            row["exchange"]: Waiting(row["deadline"], row["left"], _came(row))
            for row in await self.ask(lambda connection: connection.fetch(sql("waiting"), *columns))
        }

    async def park(self, fence: Fence, held: Sequence[str]) -> Parked | None:
        """Park the run on the steps *held*. None: one of them is due, or the fence does not hold."""
        row = await self.ask(
            lambda connection: connection.fetchrow(
                sql("park"), fence.run_id, fence.token_hash, fence.sidecar, list(held)
            )
        )
        return Parked(row["until"]) if row is not None and row["outcome"] == "parked" else None

    # ---- local steps

    async def save_progress(self, fence: Fence, key: str, exchange: UUID, said: bytes | None) -> bool:
        """Keep what was *said* of a local step's progress; False: it is over, or the permit is another's."""
        found = await self.ask(
            lambda connection: connection.fetchval(
                sql("save_progress"), fence.run_id, key, exchange, fence.token_hash, said
            )
        )
        return found is not None

    async def recorded(self, run_id: str, keys: Sequence[str]) -> list[tuple[str, AnswerRow]]:
        """The outputs of those of some local steps that are recorded."""
        found = await self.ask(
            lambda connection: connection.fetch(sql("recorded"), run_id, list(keys), self._settings.index_body)
        )
        return [(row["key"], rows.answer_row(run_id, row, row["n"])) for row in found]

    async def progress(self, run_id: str, key: str) -> bytes | None:
        """What was last said of a local step's progress; None: nothing."""
        return await self.ask(lambda connection: connection.fetchval(sql("progress"), run_id, key))

    # ---- bodies

    async def request_body(self, run_id: str, key: str) -> bytes:
        """The first bytes of a step that ``load`` left in the database."""
        body = await self.ask(lambda connection: connection.fetchval(sql("request_body"), run_id, key))
        if body is None:
            raise NotFound(f"run {run_id} has no step {key}")
        return cast(bytes, body)

    async def small_body(self, run_id: str, key: str, n: int) -> bytes:
        """The body of an answer that stands in its row, and is not in the index."""
        row = await self.ask(lambda connection: connection.fetchrow(sql("small_body"), run_id, key, n))
        if row is None or row["body"] is None or len(row["body"]) != row["size"]:
            raise Unreadable(f"run {run_id}, step {key}, answer {n}: its body is missing")
        return cast(bytes, row["body"])

    async def parts(self, run_id: str, body_id: UUID) -> AsyncIterator[bytes]:
        """The pieces of a large body, in order, one in memory at a time."""
        count = await self.ask(lambda connection: connection.fetchrow(sql("part_count"), run_id, body_id))
        assert count is not None
        if not count["parts"] or count["parts"] != count["expected"]:
            raise Unreadable(
                f"run {run_id}: {count['parts']} of {count['expected']} pieces of body {body_id} are there"
            )
        for part in range(count["parts"]):
            yield await self._part(run_id, body_id, part)

    async def _part(self, run_id: str, body_id: UUID, part: int) -> bytes:
        data = await self.ask(lambda connection: connection.fetchval(sql("part"), run_id, body_id, part))
        if data is None:
            raise Unreadable(f"run {run_id}: piece {part} of body {body_id} is gone")
        return cast(bytes, data)

    async def put_part(self, run_id: str, body_id: UUID, part: int, data: bytes) -> None:
        """Keep one piece of a large body. Its answer, which names *body_id*, is written after the last."""
        await self.ask(lambda connection: connection.execute(sql("put_part"), run_id, body_id, part, data))

    async def drop_body(self, run_id: str, body_id: UUID) -> None:
        """Forget the pieces of a body that no answer will name."""
        await self.ask(lambda connection: connection.execute(sql("drop_body"), run_id, body_id))

    # ---- sidecars

    async def register(self, *, sidecar: str, host: str, folder: str, pid: int, address: str, lease: float) -> bytes:
        """A new sidecar process; the caller holds its folder's lock, so those before it are dead. The secret."""

        async def work(connection: Connection) -> bytes:
            async with database.transaction(connection):
                await connection.execute(sql("predecessors_end"), host, folder, sidecar)
                await connection.execute(sql("register"), sidecar, host, folder, pid, address, lease)
                secret = await connection.fetchval(sql("secret"))
            if secret is None:
                raise UsageError("the database has no installation secret: run `twiceshy init-db`")
            return cast(bytes, secret)

        return await self.ask(work)

    async def heartbeat(self, sidecar: str, lease: float) -> bool:
        """The sidecar lives; False: a successor has declared it dead."""
        return await self.ask(lambda connection: connection.fetchval(sql("heartbeat"), sidecar, lease)) is not None

    async def retire(self, sidecar: str) -> None:
        """The sidecar ends."""
        await self.ask(lambda connection: connection.execute(sql("retire"), sidecar))

    # ---- connections

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for functions of ``runtime.runs``. Raises DatabaseAway, also for errors on it."""
        try:
            async with self._pool.acquire(timeout=self._settings.database_wait) as pooled:
                yield cast(Connection, pooled)
        except database.ERRORS as error:
            if database.is_bug(error):
                raise
            raise _translated(error) from error

    async def ask(self, work: Callable[[Connection], Awaitable[T]], *, snapshot: bool = False) -> T:
        """Do *work*, which may be repeated, on a connection; to its end, even when the caller is cancelled.

        *snapshot*: all its statements see the same moment, and none may write.
        """
        task = asyncio.ensure_future(self._ask(work, snapshot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(database.heard)
        return await asyncio.shield(task)

    async def _ask(self, work: Callable[[Connection], Awaitable[T]], snapshot: bool) -> T:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.database_wait
        tries = 0
        while True:
            left = max(0.1, deadline - loop.time())
            try:
                async with self._pool.acquire(timeout=left) as pooled:
                    connection = cast(Connection, pooled)
                    # Half the wait, first: a connection that a firewall forgot leaves time for a fresh one.
                    with database.bounded(connection, left if tries else left / 2):
                        return await self._do(work, connection, snapshot)
            except database.ERRORS as error:
                if database.is_bug(error):
                    raise
                pause = backoff(tries, random.random(), base=0.05, cap=1.0)
                if database.is_poison(error) or loop.time() + pause > deadline:
                    raise _translated(error) from error
            await asyncio.sleep(pause)
            tries += 1

    async def _do(self, work: Callable[[Connection], Awaitable[T]], connection: Connection, snapshot: bool) -> T:
        if snapshot:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                return await work(connection)
        if self._pooler:
            async with connection.transaction():
                return await work(connection)
        return await work(connection)


def _translated(error: BaseException) -> TwiceshyError:
    if database.is_poison(error):
        return Unwritable(f"refused by Postgres: {error}")
    return DatabaseAway(f"Postgres does not answer: {str(error) or type(error).__name__}")


def _came(row: rows.Row) -> Event | Decision | ChildEnd | None:
    """What a step waited for, by the statement ``waiting``."""
    if row["status"] is not None:
        return ChildEnd(rows.known(RunStatus, row["status"], f"run {row['name']}"), row["result"], row["error"])
    if row["id"] is not None:
        return Event(row["id"], row["payload"], row["at"])
    return None if row["decision"] is None else rows.decision(row)


def _left(row: rows.Row) -> float:
    return -1.0 if row["lease_left"] is None else float(row["lease_left"])


def _standing(row: rows.Row | None, fence: Fence) -> Bound | Fenced | Stopped:
    against = rows.judge(row, fence)
    if against is not None or row is None:
        return against or Fenced()
    return Bound(row["attempt"], row["uuid"], _left(row))
