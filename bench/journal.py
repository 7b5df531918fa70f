"""What the journal costs: steps per second (an intent and an answer, each awaited) at 1, 8 and 64 writers.

    python -m bench.journal [--dsn DSN] [--steps N]

Without a DSN it starts an embedded Postgres with default durability in a temporary folder. WAL syncs come
from pg_stat_io (18 and newer) or pg_stat_wal (14 to 17), bytes from the tables' growth. No run shares its
steps with another; request 400 bytes, answer 400 bytes.
"""

import argparse
import asyncio
import hashlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

from runtime import database, runs
from runtime.database import Connection
from runtime.entries import Answer, AnswerFacts, Begun, Fence, Intent, Recorded, StepFacts
from runtime.journal import Journal
from runtime.settings import Settings
from runtime.step import Effect, Finality

SIDECAR = "bench"
HEAD = b'{"method":"POST","url":"http://127.0.0.1:9000/v1/things","headers":[["Content-Type","application/json"]]}'
BODY = b'{"text": "' + b"x" * 388 + b'"}'


def facts(key: str) -> StepFacts:
    return StepFacts(
        key=key,
        effect=Effect.IDEMPOTENT,
        explicit=False,
        fingerprint=hashlib.sha256(key.encode()).digest(),
        occurrence=1,
        secondary=bytes(16),
        method="POST",
        url="http://127.0.0.1:9000/v1/things",
        wire_key=str(uuid4()),
        request_head=HEAD,
        request_body=BODY,
        rules=bytes(8),
    )


ANSWER = AnswerFacts(
    status=200,
    reason=b"OK",
    headers=((b"Content-Type", b"application/json"), (b"Content-Length", b"400"), (b"Server", b"stub")),
    body=BODY,
    body_id=None,
    size=len(BODY),
    whole=True,
    finality=Finality.FINAL,
)


async def claim(journal: Journal) -> Fence:
    async with journal.connection() as connection:
        run_id = await runs.create(connection, None)
        claimed = await runs.claim(connection, run_id, kind="claim", host="bench", folder="bench", lease=600.0)
    fence = Fence(run_id, runs.hash_token(claimed.token), SIDECAR)
    await journal.bind(fence)
    return fence


async def write_steps(journal: Journal, fence: Fence, steps: int, took: list[float]) -> None:
    for n in range(steps):
        step = facts(f"{fence.run_id[:8]}-{n}")
        exchange = uuid4()
        start = time.perf_counter()
        begun = await journal.write(Intent(fence, step, exchange, 0))
        assert isinstance(begun, Begun), begun
        recorded = await journal.write(Answer(fence.run_id, step.key, exchange, 1, ANSWER))
        assert isinstance(recorded, Recorded), recorded
        took.append(time.perf_counter() - start)


async def wal_syncs(connection: Connection) -> int | None:
    """How often the server has synced its WAL; None where it does not say (13, or timing of its own)."""
    major = connection.get_server_version().major
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    if major >= 18:
        return int(await connection.fetchval("SELECT sum(fsyncs) FROM pg_stat_io WHERE object = 'wal'") or 0)
    if major >= 14:
        return int(await connection.fetchval("SELECT wal_sync FROM pg_stat_wal"))
    return None


async def settled_syncs(connection: Connection) -> int | None:
    """The count once it stands still: the server's processes report now and then."""
    last = await wal_syncs(connection)
    for _ in range(20):
        await asyncio.sleep(0.25)
        now = await wal_syncs(connection)
        if now == last:
            break
        last = now
    return last


async def table_bytes(connection: Connection) -> int:
    await connection.execute("VACUUM twiceshy.run, twiceshy.step, twiceshy.answer")
    return int(
        await connection.fetchval(
            "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = 'twiceshy' AND c.relkind = 'r'"
        )
    )


async def measure(dsn: str, writers: int, steps: int) -> None:
    journal = await Journal.open(dsn, Settings())
    watch = await database.connect(dsn, name="bench")
    await journal.register(sidecar=SIDECAR, host="bench", folder="bench", pid=1, address="", lease=600.0)
    fences = [await claim(journal) for _ in range(writers)]
    await write_steps(journal, await claim(journal), 50, [])
    syncs, size = await settled_syncs(watch), await table_bytes(watch)
    took: list[float] = []
    start = time.perf_counter()
    await asyncio.gather(*(write_steps(journal, fence, steps // writers, took) for fence in fences))
    seconds = time.perf_counter() - start
    done = steps // writers * writers
    after, grown = await settled_syncs(watch), await table_bytes(watch) - size
    per_step = "–" if syncs is None or after is None else f"{(after - syncs) / done:.2f}"
    print(
        f"{writers:>3} writers  {done / seconds:>6.0f} steps/s  p50 {statistics.median(took) * 1e3:>6.2f} ms  "
        f"p99 {sorted(took)[int(len(took) * 0.99)] * 1e3:>6.2f} ms  {per_step:>5} WAL syncs/step  "
        f"{grown / done:>5.0f} bytes/step",
        flush=True,
    )
    await watch.close()
    await journal.close()


@asynccontextmanager
async def server(dsn: str | None) -> AsyncIterator[str]:
    if dsn is not None:
        yield dsn
        return
    from runtime.embedded import Postgres

    with tempfile.TemporaryDirectory(prefix="twiceshy-bench-") as folder:
        Path(folder).chmod(0o711)
        postgres = Postgres(Path(folder))
        try:
            yield postgres.start()
        finally:
            postgres.stop()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dsn", help="a database to measure on (default: an embedded one)")
    parser.add_argument("--steps", type=int, default=6000, help="steps at 64 writers (fewer at 8 and 1)")
    arguments = parser.parse_args()
    async with server(arguments.dsn) as dsn:
        await database.migrate(dsn)
        connection = await database.connect(dsn, name="bench")
        print(await connection.fetchval("SELECT version()"))
        await connection.close()
        for writers, share in ((1, 6), (8, 2), (64, 1)):
            await measure(dsn, writers, arguments.steps // share)


if __name__ == "__main__":
    asyncio.run(main())
