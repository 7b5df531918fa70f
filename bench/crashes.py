"""The grocery agent, crashed at each of its six steps: what really happened, as one table.

    python -m bench.crashes [MODE-MOMENT-STEP…]     all cells, or such as durable-both-4

* *naive* forwards only, *journal* records answers but sends no keys and sends again what it does not know,
  *durable* is twiceshy as it is. Undisturbed, the agent makes 3 model calls, 1 order and sends 1 e-mail.
* *inside*: the agent is SIGKILLed while it waits for the answer of a call whose effect is made. *after*: it is
  SIGKILLed once it has that answer, before the next call. *both*: agent and sidecar are SIGKILLed while the
  effect is made and nobody has recorded it.
* Everything is real: ``twiceshy run``, keeper, sidecar, Postgres and sandbox are processes; what is counted
  stands in the sandbox's log. Each mode has a state folder and a keeper, each cell a run and a sandbox.

A cell shows model calls / orders / e-mails and, in parentheses, what they should be. One that differs is
marked, said below the table, and makes the exit code 1.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from sandbox.client import PROJECT, Sandbox
from sandbox.screen import BOLD, DIM, GREEN, RED, Screen
from sandbox.stage import Program, Stage, kill

AGENT = str(PROJECT / "sandbox" / "agents" / "grocery.py")
SIDECAR = ("-m", "proxy.sidecar")
PATIENCE = 60.0
#: What ``twiceshy run`` says with its exit code.
DONE, STOPPED = 0, 3


class Mode(StrEnum):
    NAIVE = "naive"
    JOURNAL = "journal"
    DURABLE = "durable"


class Moment(StrEnum):
    """Who is SIGKILLed, and when."""

    INSIDE = "inside"
    AFTER = "after"
    BOTH = "both"


TITLES = {
    Moment.INSIDE: "agent killed inside the call",
    Moment.AFTER: "agent killed after the call",
    Moment.BOTH: "agent and sidecar killed, effect made, nothing recorded",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One of the agent's calls: how the sandbox knows it, and which count it adds to."""

    name: str
    match: dict[str, str]
    counts: str | None = None


STEPS = {
    1: Step("pantry", {"service": "pantry"}),
    2: Step("plan", {"service": "llm", "body": "You plan meals"}, "llm"),
    3: Step("choose", {"service": "llm", "body": "You choose products"}, "llm"),
    4: Step("order", {"service": "orders"}, "orders"),
    5: Step("letter", {"service": "llm", "body": "You tell the household"}, "llm"),
    6: Step("e-mail", {"service": "email"}, "email"),
}
#: Where the sandbox counts what: model calls, orders, e-mails.
SERVICES = ("llm", "orders", "email")
UNDISTURBED = {"llm": 3, "orders": 1, "email": 1}


class Trouble(Exception):
    """A cell could not be played as it should be."""


TROUBLES = (Trouble, TimeoutError, OSError, ValueError, LookupError)


@dataclass(frozen=True, slots=True)
class Cell:
    mode: Mode
    moment: Moment
    step: int

    def __str__(self) -> str:
        return f"{self.mode}-{self.moment}-{self.step}"


CELLS = tuple(Cell(mode, moment, step) for moment in Moment for step in STEPS for mode in Mode)


@dataclass(frozen=True, slots=True)
class Seen:
    """What happened in one cell, as the sandbox and the launcher's exit codes tell it."""

    counts: dict[str, int]
    codes: tuple[int, ...]  # of each ``twiceshy run``
    #: How often the order was asked for, and the keys that came with it.
    asked: int
    keys: frozenset[str | None]
    said: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return "/".join(str(self.counts.get(service, 0)) for service in SERVICES)


def expected(cell: Cell) -> Seen:
    """What must be seen in *cell*, but for what the programs said."""
    counts = dict(UNDISTURBED)
    asked = 1
    codes: tuple[int, ...] = (DONE,)
    lost = STEPS[cell.step].counts if cell.moment is Moment.BOTH else None
    if cell.mode is Mode.NAIVE:
        # Nothing is remembered: what had been done up to the crash is done again.
        for number in range(1, cell.step + 1):
            if (service := STEPS[number].counts) is not None:
                counts[service] += 1
        asked = counts["orders"]
    elif lost == "llm" or (cell.mode is Mode.JOURNAL and lost is not None):
        counts[lost] += 1
    if cell.mode is not Mode.NAIVE and lost == "orders":
        asked = 2
    if cell.mode is Mode.DURABLE and lost == "email":
        codes = (STOPPED, DONE)  # no key there: a person must say that it went out
    return Seen(counts, codes, asked, frozenset())


def faults(cell: Cell, seen: Seen) -> list[str]:
    """How *seen* differs from what is expected of *cell*, in words."""
    right = expected(cell)
    found = []
    if seen.counts != right.counts:
        found.append(f"{seen} model calls / orders / e-mails in place of {right}")
    if seen.codes != right.codes:
        found.append(f"twiceshy run ended with {seen.codes} in place of {right.codes}")
    if seen.asked != right.asked:
        found.append(f"the order was asked for {seen.asked} times in place of {right.asked}")
    if cell.mode is Mode.DURABLE and (len(seen.keys) != 1 or None in seen.keys):
        found.append(f"the order went out under the keys {set(seen.keys)} in place of one")
    if cell.mode is not Mode.DURABLE and seen.keys != {None}:
        found.append(f"the order went out under the keys {set(seen.keys)} in place of none")
    return found


class Crashes:
    """One mode's state folder, keeper and sidecar, in which cells are played.

    *root*: where the packages are that run; *environment*: more for them, such as DATABASE_URL.
    """

    def __init__(self, stage: Stage, mode: Mode, *, root: Path = PROJECT, **environment: str) -> None:
        self.stage = stage
        self.mode = mode
        self.home = stage.folder / f"state-{mode}"
        # By a change of folder, since programs started with -m find their packages there first.
        self.twiceshy = ("env", "-C", str(root), sys.executable, "-m", "proxy.cli")
        self.environment = {
            "TWICESHY_HOME": str(self.home),
            "TWICESHY_CONFIG": str(PROJECT / "sandbox" / "routes.toml"),
            "TWICESHY_MODE": str(mode),
            "TWICESHY_POLL": "0.1",
            **environment,
        }
        # A run beside the others: it keeps the keeper between the cells, as another user of the machine would.
        self.holder = self.start("run", "--run", "holder", "--", "sh", "-c", "echo held; exec sleep 86400")

    def ready(self) -> None:
        """Wait until the sidecar listens."""
        self.wait(self.holder, lambda: "held" in self.holder.lines, "the sidecar listens", 120.0)

    def play(self, moment: Moment, step: int, run: str = "") -> Seen:
        """Crash a run of its own at *step*; see it through. Raises one of TROUBLES when it does not come to that."""
        run = run or str(Cell(self.mode, moment, step))
        sandbox = self.stage.sandbox(run)
        try:
            return self._played(run, sandbox, moment, step)
        finally:
            sandbox.stop()

    def _played(self, run: str, sandbox: Sandbox, moment: Moment, step: int) -> Seen:
        lingering = self.stage.folder / f"{run}.lingers"
        more = {"SANDBOX_URL": sandbox.url}
        if moment is Moment.AFTER:
            lingering.touch()
            more["AGENT_LINGER"] = f"{step}:{lingering}"
        else:
            sandbox.fault(match=STEPS[step].match, hold="answer")
        launchers = [self._run(run, more)]
        if moment is Moment.AFTER:
            self._after(run, launchers[0], step, lingering)
        else:
            self.wait(launchers[0], lambda: sandbox.waiting("answer") > 0, f"step {step} is made")
            agent, sidecar = self._agent(run), self.stage.find(str(self.home), *SIDECAR)
            kill(agent)
            if moment is Moment.BOTH:
                kill(sidecar)
                sandbox.wait_for(lambda: any(each.gone for each in sandbox.requests()), what="the connection's end")
            elif step > 1:
                self.wait(launchers[0], lambda: _told(launchers[0], step - 1) > 1, "the agent is back where it was")
            sandbox.release("answer")
        codes = [launchers[0].wait(PATIENCE)]
        if codes == [STOPPED]:
            self._settle(run, sandbox)
            launchers.append(self._run(run, more))
            codes.append(launchers[1].wait(PATIENCE))
        orders = [each for each in sandbox.requests("orders") if each.method == "POST"]
        counts = {service: count for service, count in sandbox.counts().items() if service in SERVICES}
        return Seen(
            counts, tuple(codes), len(orders), frozenset(each.header("idempotency-key") for each in orders),
            tuple(line for launcher in launchers for line in launcher.lines),
        )  # fmt: skip

    def _after(self, run: str, launcher: Program, step: int, lingering: Path) -> None:
        self.wait(launcher, lambda: _told(launcher, step) > 0, f"step {step} is over")
        kill(self._agent(run))
        lingering.unlink()

    def _settle(self, run: str, sandbox: Sandbox) -> None:
        """Look into the e-mail provider's log, and say what it says."""
        shown = self.start("show", "--json", run)
        self._end(shown)
        open_ = [each for each in json.loads("\n".join(shown.lines))["steps"] if each["state"] == "ambiguous"]
        mails = [each.facts["mail"]["id"] for each in sandbox.effects("email")]
        if len(open_) != 1 or not open_[0]["url"].endswith("/email/send") or len(mails) != 1:
            raise Trouble(f"run {run} stopped with {open_} open and the e-mails {mails} sent")
        body = json.dumps({"id": mails[0], "status": "accepted"})
        self._end(self.start("resolve", run, open_[0]["key"], "assume_done", "--status", "202", "--body", body))

    # ---- processes

    def start(self, *words: str, **more: str) -> Program:
        """Start ``twiceshy`` with these words."""
        return self.stage.start((*self.twiceshy, *words), _keep, **self.environment, **more)

    def _run(self, run: str, more: dict[str, str]) -> Program:
        return self.start("run", "--run", run, "--", sys.executable, AGENT, **more)

    def _agent(self, run: str) -> int:
        self.stage.wait_until(lambda: bool(self.stage.running(f"TWICESHY_RUN={run}\0", AGENT)), "the agent runs")
        return self.stage.find(f"TWICESHY_RUN={run}\0", AGENT)

    def _end(self, program: Program) -> None:
        if program.wait(PATIENCE) != DONE:
            raise Trouble("\n".join([f"{program.name} … ended with {program.process.returncode}", *program.lines]))

    def wait(self, program: Program, condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> None:
        """Wait for *condition* while *program* runs. Raises Trouble when that ends before, or it takes too long."""
        until = time.monotonic() + patience
        while not condition():
            code = program.process.poll()
            if code is not None or time.monotonic() > until:
                how = f"within {patience:.0f} s" if code is None else f"before twiceshy ended with {code}"
                raise Trouble("\n".join([f"it did not happen {how} that {what}", *program.lines]))
            time.sleep(0.01)


def _told(program: Program, step: int) -> int:
    """How often the agent has told of *step*."""
    return sum(line.startswith(f"{step} ") for line in list(program.lines))


def _keep(_line: str) -> None:
    pass


# ---- the table


def _rows(chosen: set[Cell]) -> Iterator[tuple[Moment, int]]:
    for moment in Moment:
        for step in STEPS:
            if any(Cell(mode, moment, step) in chosen for mode in Mode):
                yield moment, step


def table(screen: Screen, crashes: dict[Mode, Crashes], chosen: set[Cell]) -> bool:
    """Play the *chosen* cells, print a row as soon as it is known; whether all were as expected."""
    wrong: list[str] = []
    screen.say("model calls / orders / e-mails that really happened (and that should have)\n", DIM)
    screen.say(f"{'':<12}" + "".join(f"{mode:<22}" for mode in crashes), BOLD)
    last: Moment | None = None
    for moment, step in _rows(chosen):
        if moment is not last:
            screen.say(f"{TITLES[moment]}", BOLD)
            last = moment
        line = f"  {step} {STEPS[step].name:<8}"
        for mode, those in crashes.items():
            cell = Cell(mode, moment, step)
            if cell not in chosen:
                line += f"{'·':<22}"
                continue
            try:
                seen = those.play(moment, step)
                found, got = faults(cell, seen), str(seen)
                found += ["\n  ".join(["it said:", *seen.said])] if found else []
            except TROUBLES as error:
                found, got = [str(error)], "?/?/?"
            wrong += [f"{cell}: {fault}" for fault in found]
            note = "settled " if expected(cell).codes != (DONE,) else ""
            mark = "✗" if found else "✓"
            line += screen.paint(f"{got} ({expected(cell)}) {note}{mark}".ljust(22), RED if found else GREEN)
        screen.say(line.rstrip())
    screen.say()
    for text in wrong:
        screen.say(text, RED)
    return not wrong


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    named = {str(cell): cell for cell in CELLS}
    parser = argparse.ArgumentParser(prog="python -m bench.crashes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cells", nargs="*", metavar="MODE-MOMENT-STEP", help="such as durable-both-4 (default: all)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.cells if name not in named]:
        parser.error(f"no such cell: {', '.join(unknown)}; there are {', '.join(named)}")
    chosen = {named[name] for name in arguments.cells} or set(CELLS)
    signal.signal(signal.SIGTERM, _interrupted)
    screen = Screen()
    began = time.monotonic()
    try:
        with Stage() as stage:
            crashes = {mode: Crashes(stage, mode) for mode in Mode if any(cell.mode is mode for cell in chosen)}
            try:
                for each in crashes.values():
                    each.ready()
                good = table(screen, crashes, chosen)
            except TROUBLES:
                screen.say("\n".join(stage.logs()), DIM)
                raise
    except KeyboardInterrupt:
        screen.say("\ninterrupted; everything that was started has been ended", RED)
        return 130
    except TROUBLES as error:
        screen.say(f"\n{error}", RED)
        return 1
    screen.say(f"{len(chosen)} cells in {time.monotonic() - began:.0f} s. Nothing is left running.", DIM)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
