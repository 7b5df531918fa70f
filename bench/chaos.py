"""Refunds that a manager approves, while workers and agents are killed: as if nothing had happened.

    python -m bench.chaos [--tickets 200] [--workers 4] [--seed N] [--out FILE]

* The same tickets three times, each time in a world of its own (sandbox, Postgres, state folder, workers).
  *calm*: nobody is killed. *workers*: each second a worker or an agent, drawn by the seed, gets a SIGKILL; killed
  workers are started again; and agents kill themselves right after what they have done (bench/chaos_agent.py).
  *sidecar*: all that, and every ten seconds the sidecar gets a SIGKILL.
* A manager looks for open approvals and approves them, some at once, some after their runs have parked.
* Runs that stop as ambiguous (only where a sidecar dies) are settled from the sandbox's log: a mail that was sent is
  assumed done, one that was not is sent again.
* Judged by the sandbox: each run is done, and refunds, notes and mails are those of the calm world. The model is asked
  exactly as often as there; but where a sidecar dies, what it was just asking may be asked again.

Prints a summary of each world; exit code 1 when one is not as it must be.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from runtime import approvals, queue, runs
from runtime.database import Connection, connect, migrate
from runtime.embedded import Postgres
from runtime.errors import TwiceshyError
from runtime.step import RunStatus
from sandbox.client import PROJECT, Sandbox
from sandbox.stage import Program, Stage, kill, processes, read

AGENT = "chaos-refund"
#: Between two kills, and between two kills of the sidecar, in seconds.
EACH, SIDECAR_EACH = 1.0, 10.0
#: How long a world may take, per ticket and at least, in seconds.
PATIENCE, AT_LEAST = 6.0, 240.0
#: Of which no two worlds have the same.
REFUND = re.compile(r"re_\w+")


@dataclass
class World:
    """One run of all tickets."""

    name: str
    stage: Stage
    sandbox: Sandbox
    connection: Connection
    environment: dict[str, str]
    chance: random.Random
    workers: list[Program] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    settled: Counter[str] = field(default_factory=Counter)
    ended: int = 0  # workers that ended by themselves
    took: float = 0.0

    @property
    def home(self) -> str:
        return self.environment["TWICESHY_HOME"]

    # ---- who works

    def start_worker(self) -> Program:
        command = (sys.executable, "-m", "proxy.cli", "worker", "--agent", AGENT)
        return self.stage.start(command, lambda _: None, **self.environment)

    def agents(self) -> list[int]:
        """The agents at work: each has its name as its process's."""
        mark, name = os.fsencode(self.home), AGENT.encode()
        return [pid for pid in processes() if read(pid, "comm").strip() == name and mark in read(pid, "environ")]

    def strike(self) -> None:
        """Kill a worker or an agent; a worker is started again."""
        if self.chance.random() < 0.3:
            n = self.chance.randrange(len(self.workers))
            self.workers[n].process.kill()
            self.workers[n].wait(30)
            self.workers[n] = self.start_worker()
            self.killed["workers"] += 1
        elif found := self.agents():
            kill(self.chance.choice(found))
            self.killed["agents"] += 1

    def strike_sidecar(self) -> None:
        for pid in self.stage.running(self.home, "-m", "proxy.sidecar"):
            kill(pid)
            self.killed["sidecars"] += 1

    # ---- people

    async def manage(self) -> None:
        """Approve some of what is asked for."""
        for asked in await approvals.open_ones(self.connection, limit=500):
            if self.chance.random() < 0.2:
                with suppress(TwiceshyError):  # its run is just being tried again
                    await approvals.decide(self.connection, asked.run, asked.id, "approve", by="manager")

    async def settle(self) -> None:
        """Say of what nobody could know what the world's log says."""
        for run in await runs.list_runs(self.connection, status=RunStatus.AMBIGUOUS, limit=1000):
            if run.stop_step is None:
                continue
            given = (await runs.get_run(self.connection, run.id)).input
            order = json.loads(given or b"{}")["order"]
            received = [each for each in self.sandbox.requests("email") if _order(each.json()["subject"]) == order]
            if any(each.end is None for each in received):
                continue  # it is being made right now
            made = [each for each in self.sandbox.effects("email") if _order(each.facts["mail"]["subject"]) == order]
            with suppress(TwiceshyError):
                if made:
                    body = json.dumps({"id": made[0].id, "status": "accepted"}).encode()
                    await runs.resolve(self.connection, run.id, run.stop_step, "assume_done", status=202, body=body)
                else:
                    await runs.resolve(self.connection, run.id, run.stop_step, "send_again")
                self.settled["assumed done" if made else "sent again"] += 1

    # ---- from the first start to the last end

    async def play(self, orders: list[str], count: int) -> str:
        """All tickets to their ends. What went wrong, in words."""
        for order in orders:
            await queue.start(self.connection, AGENT, json.dumps({"order": order}).encode(), key=order)
        began = time.monotonic()
        self.workers = [self.start_worker() for _ in range(count)]
        strike_at = sidecar_at = began
        while time.monotonic() - began < max(AT_LEAST, PATIENCE * len(orders)):
            left = await self.connection.fetch(
                "SELECT status, count(*) FROM twiceshy.run WHERE status <> 'done' GROUP BY status"
            )
            standing = {row["status"]: row["count"] for row in left}
            if not standing.keys() - {"failed", "diverged", "cancelled"}:
                self.took = time.monotonic() - began
                return ", ".join(f"{number} are {status}" for status, number in standing.items())
            for n, worker in enumerate(self.workers):
                if worker.process.poll() is not None:  # its sidecar was killed before it had started
                    print(f"    a worker ended by itself: {worker.lines[-1:]}", flush=True)
                    self.workers[n] = self.start_worker()
                    self.ended += 1
            await self.manage()
            if self.name == "sidecar":
                await self.settle()
            if self.name != "calm" and time.monotonic() > strike_at:
                strike_at = max(strike_at + EACH, time.monotonic())
                await asyncio.to_thread(self.strike)
            if self.name == "sidecar" and time.monotonic() - sidecar_at > SIDECAR_EACH:
                sidecar_at = time.monotonic()
                await asyncio.to_thread(self.strike_sidecar)
            await asyncio.sleep(0.1)
        self.took = time.monotonic() - began
        return f"not all are done in {self.took:.0f} s: {standing}"

    def deeds(self) -> dict[str, Counter[str]]:
        """What was really done, as far as it must be the same in all worlds."""
        found: dict[str, Counter[str]] = {}
        for service in ("payments", "crm", "email"):
            facts = [json.dumps(each.facts, sort_keys=True) for each in self.sandbox.effects(service)]
            # Ids are given in the order of arrival.
            plain = (re.sub(r'"id": "[^"]*"', "", REFUND.sub("re_", fact)) for fact in facts)
            found[service] = Counter(plain)
        return found

    def keyed_twice(self) -> int:
        """Effects that were made more than once for the same key or ticket."""
        keys = [(each.service, each.key) for each in self.sandbox.effects() if each.service in ("payments", "crm")]
        return len(keys) - len(set(keys))


def _order(subject: str) -> str:
    return subject.rpartition(" ")[2]


@asynccontextmanager
async def world(name: str, stage: Stage, seed: int) -> AsyncIterator[World]:
    home = stage.folder / name
    config = stage.folder / f"{name}.toml"
    agent = f'[agents.{AGENT}]\npython = "bench.chaos_agent:refund"\ninterpreter = "{sys.executable}"\n'
    agent += f'folder = "{PROJECT}"\nmax_attempts = 1000\n'
    config.write_text((PROJECT / "sandbox" / "routes.toml").read_text() + agent)
    postgres = Postgres(stage.folder / f"{name}-postgres", {})
    dsn = await asyncio.to_thread(postgres.start)
    try:
        await migrate(dsn)
        sandbox = stage.sandbox(name)
        environment = {
            "TWICESHY_HOME": str(home), "TWICESHY_CONFIG": str(config), "DATABASE_URL": dsn, "SANDBOX_URL": sandbox.url,
            "OPENAI_BASE_URL": f"{sandbox.url}/v1", "OPENAI_API_KEY": "sk-sandbox", "MODEL": "gpt-sandbox",
            "TWICESHY_POLL": "0.2", "TWICESHY_BACKOFF": "0.1", "TWICESHY_HOLD": "0.5", "TWICESHY_PARK_QUIET": "0.5",
        }  # fmt: skip
        if name != "calm":
            environment["CHAOS"] = "1"
        connection = await connect(dsn, name="chaos")
        made = World(name, stage, sandbox, connection, environment, random.Random(seed))
        try:
            yield made
        finally:
            await connection.close()
            for worker in made.workers:
                worker.process.send_signal(signal.SIGTERM)
            for worker in made.workers:
                await asyncio.to_thread(worker.wait, 60)
            deadline = time.monotonic() + 30
            while stage.running(made.home, "-m", "runtime.keeper") and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
    finally:
        await asyncio.to_thread(postgres.stop)


async def judge(made: World, orders: list[str], calm: dict[str, Counter[str]] | None, wrong: str) -> list[str]:
    """The lines of a summary; one that begins with BAD says what must not be."""
    deeds = made.deeds()
    calls = made.sandbox.counts().get("llm", 0)
    attempts = await made.connection.fetchval("SELECT count(*) FROM twiceshy.attempt")
    counted = {service: sum(found.values()) for service, found in deeds.items()}
    lines = [
        f"{made.name}: {len(orders)} tickets in {made.took:.0f} s, {attempts} attempts; killed: {_listed(made.killed)}",
        (
            f"  refunds {counted['payments']}, notes {counted['crm']}, mails {counted['email']}; "
            f"model calls per ticket: {calls / len(orders):.2f}; settled: {_listed(made.settled)}"
        ),
    ]
    if made.ended:
        lines.append(f"  {made.ended} workers ended by themselves, and were started again")
    bad = [wrong] if wrong else []
    if made.ended and made.name != "sidecar":
        bad.append("no worker ends by itself")
    for service, found in deeds.items():
        if counted[service] != len(orders) or (calm is not None and found != calm[service]):
            before = Counter[str]() if calm is None else calm[service]
            more, less = found - before, before - found
            bad.append(f"{service}: too much {list(more.elements())[:3]}, too little {list(less.elements())[:3]}")
    if made.keyed_twice():
        bad.append(f"{made.keyed_twice()} effects were made twice under one key")
    if calls != 2 * len(orders) and (made.name != "sidecar" or calls < 2 * len(orders)):
        bad.append(f"{calls} model calls for {len(orders)} tickets")
    return [*lines, *(f"  BAD {words}" for words in bad)]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "none"


async def main() -> int:
    """All three worlds."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tickets", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", type=Path, help="write the summary there, with the commit")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this ends its workers, too
    orders = [f"A-{1001 + n}" for n in range(arguments.tickets)]
    lines = [f"seed {arguments.seed}, {arguments.workers} workers"]
    calm = None
    with Stage() as stage:
        for name in ("calm", "workers", "sidecar"):
            async with world(name, stage, arguments.seed) as made:
                wrong = await made.play(orders, arguments.workers)
                said = await judge(made, orders, calm, wrong)
                calm = calm or made.deeds()
            print("\n".join(said), flush=True)
            if any("BAD" in line for line in said):
                print(
                    "\n".join(stage.logs(20)), *(line for each in made.workers for line in each.lines[-20:]), sep="\n"
                )
            lines += said
    if arguments.out is not None:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
        arguments.out.write_text("\n".join([f"commit {commit.stdout.strip()}", *lines, ""]))
    return int(any("BAD" in line for line in lines))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
