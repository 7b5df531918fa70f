"""The example agents under a nemesis, which kills, stops and cuts whatever it likes, by a seed: nothing lost or twice.

    python -m bench.nemesis [--seconds 60] [--runs 4] [--seed N] [--out FILE]

* So many runs at a time, grocery and refund in turn, each with a sandbox of its own, all on one keeper with one
  sidecar and one embedded Postgres (DATABASE_URL is used when it is set; then that is left alive).
* About twice a second it does one of these: SIGKILL an agent, a launcher, the sidecar, Postgres, the keeper; SIGSTOP
  the sidecar for a while; and the sandboxes delay, refuse, drop and cut what they are asked.
* Launchers that were killed are started again. A run that stops is settled from its sandbox's log: what had happened
  is assumed done, what had not is sent again.
* A run is good when it is done and its sandbox counts one of each effect, each under one key. Model calls may be
  repeated where a sidecar, Postgres or the network was in between; how many were is said.
* When nothing has moved for STUCK seconds, journal, leases, pg_stat_activity and the sidecar's tasks are dumped.

Prints each run and a summary; exit code 1 when one is not good.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.nemesis_dump import dump
from sandbox.client import PROJECT, Sandbox
from sandbox.stage import Program, Stage, kill, processes, read

AGENTS = {
    "grocery": (PROJECT / "sandbox" / "agents" / "grocery.py", {"orders": 1, "email": 1}, 3),
    "refund": (PROJECT / "sandbox" / "agents" / "refund.py", {"payments": 1, "crm": 1, "email": 1}, 2),
}
#: How long a run may take in the end, once the nemesis is over, and how long nothing may move.
PATIENCE, STUCK = 120.0, 60.0
VERB = 30.0
#: What is done, and how often in relation.
DEEDS = {"agent": 8, "launcher": 4, "sidecar": 4, "pause": 2, "postgres": 2, "keeper": 1}
#: What a sandbox does to a request, by chance.
FAULTS = (
    {"delay": [0.0, 0.3]},
    {"drop": "before"},
    {"drop": "after"},
    {"drop": "after", "reset": True},
    {"drop": "mid", "cut_at": 20},
    {"status": 503},
    {"status": 503, "after_effect": True},
    {"delay_after": 0.5},
)


@dataclass
class Result:
    run: str
    good: bool
    words: str
    codes: list[int] = field(default_factory=list)
    calls: int = 0


class Nemesis:
    """The world, who breaks it, and the runs that must not notice."""

    def __init__(self, stage: Stage, seed: int, seconds: float) -> None:
        self.stage = stage
        self.dice = random.Random(seed)
        self.seed = seed
        self.until = time.monotonic() + seconds
        self.home = stage.folder / "state"
        self.environment = {
            "TWICESHY_HOME": str(self.home),
            "TWICESHY_CONFIG": str(PROJECT / "sandbox" / "routes.toml"),
            "TWICESHY_POLL": "0.1",
            "TWICESHY_BACKOFF": "0.05",
            "TWICESHY_MAX_ATTEMPTS": "1000",
        }
        if os.environ.get("DATABASE_URL"):
            self.environment["DATABASE_URL"] = os.environ["DATABASE_URL"]
        self.results: list[Result] = []
        self.deeds: Counter[str] = Counter()
        self.moved = time.monotonic()
        self.stuck = False
        self._lock = threading.Lock()
        self._number = 0

    @property
    def over(self) -> bool:
        return self.stuck or time.monotonic() > self.until

    # ---- the runs

    def worker(self) -> None:
        while not self.over:
            with self._lock:
                self._number += 1
                number = self._number
            name = list(AGENTS)[number % len(AGENTS)]
            run = f"{name}-{self.seed}-{number}"
            try:
                result = self.play(run, name, random.Random(f"{self.seed} {number}"))
            except Exception as error:
                result = Result(run, False, f"{type(error).__name__}: {error}")
            with self._lock:
                self.results.append(result)
            print(f"{'ok ' if result.good else 'BAD'} {run}: {result.words}", flush=True)

    def play(self, run: str, name: str, dice: random.Random) -> Result:
        """One run to its end, however often its launcher is killed."""
        path, effects, calls = AGENTS[name]
        with Sandbox.start(self.stage.folder / f"{run}.log") as sandbox:
            for service in ("llm", *effects):
                if dice.random() < 0.4:
                    sandbox.fault(match={"service": service}, nth=dice.randint(1, 2), **dice.choice(FAULTS))
            codes: list[int] = []
            deadline = max(self.until, time.monotonic()) + PATIENCE
            while not codes or codes[-1] != 0:
                if time.monotonic() > deadline or self.stuck:
                    return Result(run, False, f"not done in time; launchers ended with {codes}", codes)
                words = ("run", "--run", run, "--", sys.executable, str(path))
                program = self.start(*words, SANDBOX_URL=sandbox.url)
                codes.append(self._wait(program, deadline))
                self.moved = time.monotonic()
                if codes[-1] not in (0, 3, 75, -signal.SIGKILL):
                    print(f"    {run}: {codes[-1]}: {' | '.join(program.lines[-2:])}", flush=True)
                if codes[-1] == 3:
                    self.settle(run, sandbox)
                elif codes[-1] == 1:
                    return Result(run, False, f"failed: {program.lines[-3:]}", codes)
            return self.judged(run, sandbox, effects, calls, codes)

    def _wait(self, program: Program, deadline: float) -> int:
        while program.process.poll() is None and time.monotonic() < deadline + 10 and not self.stuck:
            time.sleep(0.02)
        if program.process.poll() is None:
            program.process.kill()
        return program.wait(30)

    def judged(self, run: str, sandbox: Sandbox, effects: dict[str, int], calls: int, codes: list[int]) -> Result:
        counts = sandbox.counts()
        made = {service: counts.get(service, 0) for service in effects}
        keys = {
            service: {each.header("idempotency-key") for each in sandbox.requests(service, method="POST")}
            for service in effects
        }
        wrong = [f"{service} {made[service]} times" for service, n in effects.items() if made[service] != n]
        wrong += [f"{service} under {len(found)} keys" for service, found in keys.items() if len(found) != 1]
        repeated = counts.get("llm", 0) - calls
        if repeated < 0:
            wrong.append(f"{counts.get('llm', 0)} model calls")
        starts = f"{len(codes)} launchers ({', '.join(map(str, codes))}), {repeated} model calls repeated"
        return Result(run, not wrong, "; ".join([*wrong, starts]), codes, repeated)

    def settle(self, run: str, sandbox: Sandbox) -> None:
        """Tell twiceshy what the world's log says of what nobody could know."""
        sandbox.wait_for(lambda: all(each.end is not None for each in sandbox.requests()), what="all is answered")
        shown = self.start("show", "--json", run)
        if self._ended(shown) != 0:
            return  # the database was shot, again and again: the next launcher stops at the same step
        told = json.loads("\n".join(shown.lines))
        if told["stop"] is None:
            return
        [step] = [each for each in told["steps"] if each["key"] == told["stop"]["step"]]
        service = next(name for path, name in SERVICES.items() if path in step["url"])
        effects = sandbox.effects(service)
        how = ["send_again"]
        if effects:
            how = ["assume_done", "--body", json.dumps({"id": effects[-1].id, "status": "accepted"})]
        self._ended(self.start("resolve", run, step["key"], *how))

    def _ended(self, verb: Program) -> int:
        """The exit code of a verb. Of one that never finds its database and sidecar alive at once, SIGKILL's."""
        try:
            return verb.wait(VERB)
        except subprocess.TimeoutExpired:
            verb.process.kill()
            return verb.wait(VERB)

    def start(self, *words: str, **more: str) -> Program:
        command = (sys.executable, "-m", "proxy.cli", *words)
        return self.stage.start(command, lambda _: None, **self.environment, **more)

    # ---- the nemesis

    def rage(self) -> None:
        """Do deeds until it is over."""
        names, weights = list(DEEDS), list(DEEDS.values())
        while not self.over:
            time.sleep(self.dice.uniform(0.1, 0.9))
            deed = self.dice.choices(names, weights)[0]
            if self._do(deed):
                self.deeds[deed] += 1

    def _do(self, deed: str) -> bool:
        found = list(self._victims(deed))
        if not found:
            return False
        victim = self.dice.choice(found)
        if deed == "pause":
            try:
                os.kill(victim, signal.SIGSTOP)
                time.sleep(self.dice.uniform(0.1, 2.0))
                os.kill(victim, signal.SIGCONT)
            except ProcessLookupError:
                return False
        else:
            kill(victim)
        return True

    def _victims(self, deed: str) -> list[int]:
        home = str(self.home)
        match deed:
            case "agent":
                return [pid for path, _, _ in AGENTS.values() for pid in self.stage.running(home, str(path))]
            case "launcher":
                return self.stage.running(home, "-m", "proxy.cli", "run")
            case "sidecar" | "pause":
                return self.stage.running(home, "-m", "proxy.sidecar")
            case "postgres":
                return [pid for pid in processes() if f"{home}/postgres".encode() in read(pid, "cmdline")]
            case _:
                return self.stage.running(home, "-m", "runtime.keeper")

    def watch(self) -> None:
        """Give up when nothing moves any more."""
        while not self.stuck:
            time.sleep(1)
            self.stuck = time.monotonic() - self.moved > PATIENCE + STUCK


#: By a piece of the path, which service it is.
SERVICES = {"/orders": "orders", "/email/": "email", "/refunds": "payments", "/crm/": "crm", "/v1/": "llm"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.nemesis", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=4, help="at a time")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", type=Path, help="write the summary there, with the commit")
    arguments = parser.parse_args()
    began = time.monotonic()
    with Stage() as stage:
        world = Nemesis(stage, arguments.seed, arguments.seconds)
        workers = [threading.Thread(target=world.worker) for _ in range(arguments.runs)]
        others = [threading.Thread(target=each, daemon=True) for each in (world.rage, world.watch)]
        for thread in (*workers, *others):
            thread.start()
        for thread in workers:
            thread.join()
        good = bool(world.results) and all(result.good for result in world.results)
        if not good:
            print("\n".join(asyncio.run(dump(world.home))))
    took = time.monotonic() - began
    results = world.results
    lines = [
        f"seed {arguments.seed}, {took:.0f} s: {sum(result.good for result in results)} of {len(results)} runs good",
        "deeds: " + ", ".join(f"{name} {count}" for name, count in sorted(world.deeds.items())),
        f"launchers: {sum(len(each.codes) for each in results)}",
        f"model calls repeated: {sum(each.calls for each in results)}",
        *(f"BAD {result.run}: {result.words}" for result in results if not result.good),
    ]
    print("\n".join(lines))
    if arguments.out is not None:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
        arguments.out.write_text("\n".join([f"commit {commit.stdout.strip()}", *lines, ""]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
