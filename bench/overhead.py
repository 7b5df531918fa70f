"""What the sidecar adds to an agent's requests: latency, steps per second, WAL syncs, bytes.

    python -m bench.overhead [--rounds N] [--steps N] [--dsn DSN]

A run is 6 steps, a step one POST to a stub that answers 400 bytes of JSON at once; 1, 8 and 64 runs in flight.
Rows, in one run on the same machine: *direct* (no journal), *one table* (SELECT, POST, INSERT through an asyncpg
pool in the agent), *sidecar* (through the proxy, journalled durably, the run claimed before and ended after).
Everything shares the machine's cores. Medians over the rounds; quote ratios, never absolute times of two runs.
"""

import argparse
import asyncio
import base64
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

import aiohttp
import asyncpg

from bench.journal import server, settled_syncs, table_bytes
from runtime import database, runs

Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"
STEPS_PER_RUN = 6
FLIGHTS = (1, 8, 64)
PROJECT = Path(__file__).resolve().parent.parent


@dataclass
class Figures:
    """What one row measured at one number of runs in flight."""

    rates: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    syncs: list[float] = field(default_factory=list)
    size: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # of the sidecar, seconds per step

    def median(self) -> float:
        return statistics.median(self.latencies) * 1e3

    def p99(self) -> float:
        return sorted(self.latencies)[int(len(self.latencies) * 0.99)] * 1e3


class Bench:
    """The processes, and the ways of one run through them."""

    def __init__(self, dsn: str, stub: str, sidecar: str, pid: int, session: aiohttp.ClientSession, pool: Pool) -> None:
        self.dsn = dsn
        self.stub = stub
        self.sidecar = sidecar
        self.pid = pid
        self.session = session
        self.pool = pool

    def cpu(self) -> float:
        """Seconds of CPU that the sidecar has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def body(self, run: str, n: int) -> bytes:
        return json.dumps({"run": run, "n": n, "text": "x" * 360}).encode()

    async def direct(self, run: str, took: list[float]) -> None:
        for n in range(STEPS_PER_RUN):
            start = time.perf_counter()
            await self._post(self.body(run, n))
            took.append(time.perf_counter() - start)

    async def one_table(self, run: str, took: list[float]) -> None:
        for n in range(STEPS_PER_RUN):
            start = time.perf_counter()
            key = f"{run}-{n}"
            if await self.pool.fetchval("SELECT answer FROM bench_step WHERE key = $1", key) is None:
                answer = await self._post(self.body(run, n))
                await self.pool.execute("INSERT INTO bench_step VALUES ($1, $2)", key, answer)
            took.append(time.perf_counter() - start)

    async def through(self, run: str, took: list[float]) -> None:
        async with self.pool.acquire() as pooled:
            connection = cast(database.Connection, pooled)
            await runs.create(connection, run)
            claim = await runs.claim(
                connection, run, kind="claim", host=socket.gethostname(), folder="bench", lease=600.0
            )
        pair = base64.b64encode(f"{run}:{claim.token}".encode()).decode()
        headers = {"Proxy-Authorization": f"Basic {pair}"}
        for n in range(STEPS_PER_RUN):
            start = time.perf_counter()
            await self._post(self.body(run, n), proxy=self.sidecar, headers=headers)
            took.append(time.perf_counter() - start)
        async with self.pool.acquire() as pooled:
            await runs.end_attempt(
                cast(database.Connection, pooled), run, runs.hash_token(claim.token), "done", 0, final=True, error=None
            )

    async def _post(self, body: bytes, proxy: str | None = None, headers: dict[str, str] | None = None) -> bytes:
        async with self.session.post(f"{self.stub}/v1/things", data=body, headers=headers, proxy=proxy) as answer:
            assert answer.status == 200, (answer.status, await answer.text())
            return await answer.read()

    async def first_event(self, n: int, proxied: bool) -> float:
        """Milliseconds from the stub's writing of a stream's first event to the agent's reading of it."""
        headers = {}
        if proxied:
            async with self.pool.acquire() as pooled:
                connection = cast(database.Connection, pooled)
                run = await runs.create(connection, None)
                claim = await runs.claim(connection, run, kind="claim", host="bench", folder="bench", lease=600.0)
            pair = base64.b64encode(f"{run}:{claim.token}".encode()).decode()
            headers = {"Proxy-Authorization": f"Basic {pair}"}
        proxy = self.sidecar if proxied else None
        async with self.session.post(f"{self.stub}/v1/stream", data=b"%d" % n, headers=headers, proxy=proxy) as answer:
            line = await answer.content.readline()
            came = time.monotonic_ns()
            await answer.read()
        return (came - int(line.removeprefix(b"data: "))) / 1e6


async def fly(way: Callable[[str, list[float]], Awaitable[None]], prefix: str, flight: int, steps: int) -> Figures:
    """*steps* steps in runs of six, *flight* of them at once."""
    figures = Figures()
    names = iter(f"{prefix}-{flight}-{n}" for n in range(max(flight, steps // STEPS_PER_RUN)))

    async def worker() -> None:
        for name in names:
            await way(name, figures.latencies)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(flight)))
    figures.rates.append(len(figures.latencies) / (time.perf_counter() - start))
    return figures


async def measure(bench: Bench, rounds: int, steps: int) -> dict[tuple[str, int], Figures]:
    found: dict[tuple[str, int], Figures] = {}
    watch = await database.connect(bench.dsn, name="bench")
    for turn in range(rounds + 1):
        for name, way in (("direct", bench.direct), ("one table", bench.one_table), ("sidecar", bench.through)):
            for flight in FLIGHTS:
                count = 60 if turn == 0 else steps
                syncs, size = await settled_syncs(watch), await table_bytes(watch)
                cpu = bench.cpu()
                figures = await fly(way, f"{name.replace(' ', '-')}-{turn}", flight, count)
                done = len(figures.latencies)
                used = bench.cpu() - cpu
                after, grown = await settled_syncs(watch), await table_bytes(watch) - size
                if turn == 0:
                    continue  # warm-up
                row = found.setdefault((name, flight), Figures())
                row.rates += figures.rates
                row.latencies += figures.latencies
                if syncs is not None and after is not None:
                    row.syncs.append((after - syncs) / done)
                row.size.append(grown / done)
                row.cpu.append(used / done)
    await watch.close()
    return found


def table(found: dict[tuple[str, int], Figures]) -> str:
    lines = [
        "| way | in flight | steps/s | p50 ms | p99 ms | added p50 ms | WAL syncs/step | bytes/step | CPU ms/step |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (name, flight), row in found.items():
        added = row.median() - found["direct", flight].median()
        syncs = f"{statistics.median(row.syncs):.2f}" if row.syncs and name != "direct" else "–"
        size = f"{statistics.median(row.size):.0f}" if name == "sidecar" else "–"
        cpu = f"{statistics.median(row.cpu) * 1e3:.2f}" if name == "sidecar" else "–"
        lines.append(
            f"| {name} | {flight} | {statistics.median(row.rates):.0f} | {row.median():.2f} | {row.p99():.2f} "
            f"| {added:.2f} | {syncs} | {size} | {cpu} |"
        )
    return "\n".join(lines)


def start(command: list[str], log: Path, **more: str) -> "subprocess.Popen[bytes]":
    with log.open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=PROJECT,
            env=os.environ | more,
        )


async def main() -> str:
    """Measure and return the report, which is printed too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--dsn")
    arguments, _ = parser.parse_known_args()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twiceshy-bench-")))
        dsn = await stack.enter_async_context(server(arguments.dsn))
        await database.migrate(dsn)
        rules = folder / "twiceshy.toml"
        rules.write_text(
            '[[route]]\nname = "bench"\nhost = "127.0.0.1"\npath = "/v1/**"\nmethods = ["POST"]\n'
            'effect = "idempotent"\nkey = { in = "header", name = "Idempotency-Key" }\n'
        )
        stub = start(["bench.stub"], folder / "stub.log")
        stack.callback(stub.kill)
        sidecar = start(
            ["proxy.sidecar", "--folder", str(folder), "--port", "0"],
            folder / "sidecar.log",
            DATABASE_URL=dsn,
            TWICESHY_CONFIG=str(rules),
        )
        stack.callback(sidecar.kill)
        assert stub.stdout is not None
        assert sidecar.stdout is not None
        loop = asyncio.get_running_loop()
        stub_port = int(await loop.run_in_executor(None, stub.stdout.readline))
        port = json.loads(await loop.run_in_executor(None, sidecar.stdout.readline))["port"]
        pool = await stack.enter_async_context(asyncpg.create_pool(dsn, min_size=1, max_size=8))
        await pool.execute("CREATE TABLE IF NOT EXISTS bench_step (key text PRIMARY KEY, answer bytea)")
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        bench = Bench(dsn, f"http://127.0.0.1:{stub_port}", f"http://127.0.0.1:{port}", sidecar.pid, session, pool)
        found = await measure(bench, arguments.rounds, arguments.steps)
        delays = [
            statistics.median([await bench.first_event(n + proxied * 1000, proxied) for n in range(30)])
            for proxied in (False, True)
        ]
        report = (
            f"{table(found)}\n\nA stream's first event reaches the agent {delays[1]:.2f} ms after it was sent "
            f"(direct: {delays[0]:.2f} ms)."
        )
    print(report)
    return report


if __name__ == "__main__":
    asyncio.run(main())
