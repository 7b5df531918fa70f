"""How long a worker takes to claim its next run: 10,000 queued, 100,000 finished, 1, 4 and 16 workers at a time.

    python -m bench.claims [--dsn DSN] [--claims N]

Each claim is a transaction of its own, as a worker makes it, on a connection of its own; durability as it comes.
"""

import argparse
import asyncio
import statistics
import time

from bench.journal import server
from runtime import database, queue
from runtime.database import Connection

WORKERS = (1, 4, 16)
FINISHED, QUEUED = 100_000, 10_000
FILL = """
INSERT INTO twiceshy.run (id, agent, status, for_workers, attempt, ended_at, created_at)
    SELECT 'done-' || n, 'a', 'done', true, 1, now(), now() - make_interval(secs => n) FROM generate_series(1, {0}) n;
INSERT INTO twiceshy.attempt (run_id, n, token_hash, kind, host, folder, process, counter_at)
    SELECT 'done-' || n, 1, '', 'worker', 'here', '/state', 'w', 0 FROM generate_series(1, {0}) n;
INSERT INTO twiceshy.run (id, agent, for_workers, priority, not_before)
    SELECT 'queued-' || n, 'a', true, n % 5, now() - make_interval(secs => n) FROM generate_series(1, {1}) n;
"""


async def claim(connection: Connection, worker: str, number: int, took: list[float]) -> None:
    for _ in range(number):
        start = time.perf_counter()
        job = await queue.claim_next(connection, ["a"], worker=worker, host="h", folder="/f", lease=30.0)
        took.append(time.perf_counter() - start)
        assert job is not None


async def measure(dsn: str, workers: int, claims: int) -> str:
    """One line of the table; the claimed ones are queued again after."""
    connections = [await database.connect(dsn, name="bench") for _ in range(workers)]
    try:
        await claim(connections[0], "warm", 50, [])
        took: list[float] = []
        start = time.perf_counter()
        await asyncio.gather(*(claim(each, f"w{n}", claims // workers, took) for n, each in enumerate(connections)))
        seconds = time.perf_counter() - start
        await connections[0].execute("UPDATE twiceshy.run SET status = 'queued' WHERE status = 'running'")
        await connections[0].execute("VACUUM twiceshy.run")
    finally:
        for each in connections:
            await each.close()
    p50, p99 = statistics.median(took) * 1e3, sorted(took)[int(len(took) * 0.99)] * 1e3
    return f"| {workers} | {len(took) / seconds:.0f} | {p50:.2f} | {p99:.2f} |"


async def main() -> str:
    """Measure and return the report, which is printed too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dsn")
    parser.add_argument("--claims", type=int, default=1600)
    arguments, _ = parser.parse_known_args()
    lines = [
        f"{QUEUED:,} queued runs of five priorities, {FINISHED:,} finished ones.",
        "",
        "| workers | claims/s | p50 ms | p99 ms |",
        "| --- | --- | --- | --- |",
    ]
    async with server(arguments.dsn) as dsn:
        await database.migrate(dsn)
        connection = await database.connect(dsn, name="bench")
        try:
            await connection.execute(FILL.format(FINISHED, QUEUED))
            await connection.execute("VACUUM ANALYZE twiceshy.run, twiceshy.attempt")
        finally:
            await connection.close()
        lines += [await measure(dsn, workers, arguments.claims) for workers in WORKERS]
    report = "\n".join(lines)
    print(report, flush=True)
    return report


if __name__ == "__main__":
    asyncio.run(main())
