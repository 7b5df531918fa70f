"""``make demo``: one agent, killed twice at the worst moments, three times over.

The refund agent runs undisturbed once, for comparison; then naive (no sidecar, started again from the
top), with a journal only (no idempotency keys), and durable. What really happened is counted by the
sandbox, not by anybody who may be wrong about it.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sandbox.client import PROJECT, Effect, Received, Sandbox
from sandbox.screen import BOLD, DIM, GREEN, RED, YELLOW, Screen
from sandbox.stage import Program, Stage, kill

AGENT = (str(PROJECT / "sandbox" / "agents" / "refund.py"), "A-1001")
TWICESHY = (sys.executable, "-m", "proxy.cli")
SIDECAR = ("-m", "proxy.sidecar")
#: Before which event of the streamed letter the agent is killed.
EVENT = 6
PATIENCE = 60.0
SETUP = 120.0
ROWS = (("refunds", "payments"), ("model calls", "llm"), ("CRM notes", "crm"), ("e-mails", "email"))


class DemoFailed(Exception):
    """What was announced did not happen."""


FAILURES = (DemoFailed, TimeoutError, subprocess.TimeoutExpired, LookupError, OSError)


@dataclass
class Played:
    """How one play ended, by the sandbox's log."""

    name: str
    counts: dict[str, int]
    effects: list[Effect] = field(default_factory=list)
    requests: list[Received] = field(default_factory=list)

    @property
    def paid(self) -> int:
        """Cents paid out."""
        return sum(effect.facts["object"]["amount"] for effect in self.effects if effect.service == "payments")

    @property
    def letters(self) -> list[str]:
        return [effect.facts["mail"]["text"] for effect in self.effects if effect.service == "email"]


class Demo:
    """The plays, in their order."""

    def __init__(self, stage: Stage, screen: Screen) -> None:
        self.stage = stage
        self.screen = screen
        self.home = str(stage.folder / "state")
        self.twiceshy = {"TWICESHY_HOME": self.home, "TWICESHY_CONFIG": str(PROJECT / "sandbox" / "routes.toml")}

    def prepare(self) -> Program:
        """Begin to make the embedded database, which takes seconds on a slow disk."""
        return self.stage.start((*TWICESHY, "init-db"), _keep_quiet, **self.twiceshy)

    def prepared(self, preparation: Program) -> None:
        """Wait until the database is there."""
        if preparation.wait(SETUP) != 0:
            raise DemoFailed("\n".join([f"{preparation.name} failed:", *preparation.lines]))

    def undisturbed(self) -> Played:
        """The agent alone, with nothing going wrong."""
        sandbox = self.stage.sandbox("undisturbed")
        self._end(self._start_agent(sandbox))
        return self._played("undisturbed", sandbox)

    def naive(self) -> Played:
        """No sidecar: a supervisor that starts the dead agent again from the top, as they all do."""
        sandbox = self._sandbox("naive")
        agent = self._start_agent(sandbox)
        self._refund_is_made(sandbox, agent)
        kill(agent.process.pid)
        self._killed(f"agent {agent.process.pid}: the refund is made, its answer has not arrived")
        self._let_go_of_refund(sandbox)
        self.screen.say("   ↻ started again from the top, remembers nothing", YELLOW)
        agent = self._start_agent(sandbox)
        self._letter_is_half_read(sandbox, agent, 1)
        kill(agent.process.pid)
        self._killed(f"agent {agent.process.pid}: in the middle of the model's letter")
        self.screen.say("   ↻ started again from the top, remembers nothing", YELLOW)
        self._end(self._start_agent(sandbox))
        return self._played("naive", sandbox)

    def behind_sidecar(self, mode: str) -> Played:
        """Behind the sidecar in this mode."""
        sandbox = self._sandbox(mode)
        launcher = self.stage.start(
            (*TWICESHY, "run", "--run", f"refund-{mode}", "--", sys.executable, *AGENT),
            self.screen.echo,
            **self.twiceshy,
            TWICESHY_MODE=mode,
            SANDBOX_URL=sandbox.url,
        )
        self._refund_is_made(sandbox, launcher)
        # The one that made the database, under other settings, may not have ended yet.
        self.stage.wait_until(lambda: len(self.stage.running(self.home, *SIDECAR)) == 1, "one sidecar is left")
        agent, sidecar = self.stage.find(sandbox.url, *AGENT), self.stage.find(self.home, *SIDECAR)
        kill(agent)
        kill(sidecar)
        self._killed(f"agent {agent} AND sidecar {sidecar}: the refund is made, nobody has recorded it")
        self._let_go_of_refund(sandbox)
        self.screen.say("   ↻ started again from the top: what the journal holds comes out of the journal", YELLOW)
        self._letter_is_half_read(sandbox, launcher, 2)
        agent = self.stage.find(sandbox.url, *AGENT)
        kill(agent)
        self._killed(f"agent {agent}, alone: in the middle of the model's letter")
        self.screen.say("   ↻ started again from the top: joins the letter that is still being written", YELLOW)
        self._wait(launcher, lambda: _words(launcher, 3), "the restarted agent joins the stream")
        sandbox.release("letter")
        self._end(launcher)
        self.stage.wait_until(lambda: not self.stage.running(self.home, *SIDECAR), "the unused sidecar ends")
        return self._played(mode, sandbox)

    def tape(self, mode: str) -> None:
        """Show the run as twiceshy remembers it."""
        show = self.stage.start((*TWICESHY, "show", f"refund-{mode}"), self.screen.echo, **self.twiceshy)
        self._end(show)

    # ---- the moments

    def _sandbox(self, name: str) -> Sandbox:
        sandbox = self.stage.sandbox(name)
        sandbox.faults(
            {"match": {"service": "payments", "method": "POST"}, "hold": "refund"},
            {"match": {"service": "llm", "body": '"stream": true'}, "hold_events": {EVENT: "letter"}},
        )
        return sandbox

    def _start_agent(self, sandbox: Sandbox) -> Program:
        return self.stage.start((sys.executable, *AGENT), self.screen.echo, SANDBOX_URL=sandbox.url)

    def _refund_is_made(self, sandbox: Sandbox, program: Program) -> None:
        self._wait(program, lambda: sandbox.waiting("refund") > 0, "the refund is made")

    def _let_go_of_refund(self, sandbox: Sandbox) -> None:
        sandbox.wait_for(lambda: any(each.gone for each in sandbox.requests("payments")), what="the connection's end")
        sandbox.release("refund")

    def _letter_is_half_read(self, sandbox: Sandbox, program: Program, start: int) -> None:
        def half_read() -> bool:
            return sandbox.waiting("letter") > 0 and _words(program, start)

        self._wait(program, half_read, "the letter is half read")

    def _killed(self, whom: str) -> None:
        self.screen.say(f"   ✗ SIGKILL {whom}", RED, BOLD)

    def _wait(self, program: Program, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            if program.process.poll() is not None:
                raise DemoFailed(f"{program.name} ended with exit code {program.process.returncode} before {what}")
            if time.monotonic() > until:
                raise DemoFailed(f"it did not happen within {PATIENCE:.0f} s that {what}")
            time.sleep(0.01)

    def _end(self, program: Program) -> None:
        code = program.wait(PATIENCE)
        if code != 0:
            raise DemoFailed(f"{program.name} ended with exit code {code}")

    def _played(self, name: str, sandbox: Sandbox) -> Played:
        return Played(name, sandbox.counts(), sandbox.effects(), sandbox.requests())


def _words(program: Program, start: int) -> bool:
    """Whether the agent, started for the *start*-th time, has shown words of the letter."""
    lines = list(program.lines)
    starts = [index for index, line in enumerate(lines) if line.startswith("1 order")]
    return len(starts) >= start and any(line.lstrip().startswith("…") for line in lines[starts[-1] :])


def _table(screen: Screen, plays: list[Played]) -> None:
    names = {"journal": "journal only"}
    screen.say("   " + " " * 14 + "".join(f"{names.get(play.name, play.name):>14}" for play in plays), BOLD)
    for label, service in ROWS:
        right = plays[0].counts.get(service, 0)
        cells = ""
        for play in plays:
            count = play.counts.get(service, 0)
            cells += screen.paint(f"{count:>14}", *((GREEN,) if count == right else (RED, BOLD)))
        screen.say(f"   {label:<14}{cells}")
    cells = "".join(
        screen.paint(f"{play.paid / 100:>14.2f}", *((GREEN,) if play.paid == plays[0].paid else (RED, BOLD)))
        for play in plays
    )
    screen.say(f"   {'euros paid out':<14}{cells}")


def _verdict(screen: Screen, undisturbed: Played, durable: Played) -> bool:
    sent = [each for each in durable.requests if each.service == "payments"]
    keys = {each.header("idempotency-key") for each in sent}
    key = next(iter(keys)) or "none"
    checks = [
        (
            durable.counts == undisturbed.counts,
            "durable: everything happened exactly as often as without a crash",
        ),
        (
            len(sent) == 2 and len(keys) == 1 and key != "none",
            f"the refund was asked for {len(sent)} times, under one key ({key[:13]}…), and made once",
        ),
        (
            durable.letters == undisturbed.letters,
            "the letter is byte for byte the one that an undisturbed run sends",
        ),
    ]
    for holds, text in checks:
        screen.say(f"   {'✓' if holds else '✗'} {text}", *((GREEN,) if holds else (RED, BOLD)))
    return all(holds for holds, _ in checks)


def play(stage: Stage, screen: Screen) -> bool:
    """The whole demo; whether durable was."""
    demo = Demo(stage, screen)
    screen.say("An agent handles a refund: it reads the order, asks a model, refunds, leaves a note in the CRM,", BOLD)
    screen.say("lets the model write a letter, and mails it. It is killed twice, at the worst moments:", BOLD)
    screen.say("   1. when the refund has been made, but nobody has heard of it yet (agent and sidecar die)")
    screen.say("   2. while the model's letter is streaming in (the agent dies)")

    preparation = demo.prepare()

    screen.say("\n━━ undisturbed: this is what should happen", BOLD)
    plays = [demo.undisturbed()]
    screen.say("\n━━ naive: no sidecar; whoever dies is started again", BOLD)
    plays.append(demo.naive())
    demo.prepared(preparation)
    screen.say("\n━━ journal only: a sidecar that records answers, but sends no idempotency keys", BOLD)
    plays.append(demo.behind_sidecar("journal"))
    screen.say("\n━━ durable: twiceshy as it is. The agent is the same file, unchanged", BOLD)
    plays.append(demo.behind_sidecar("durable"))
    screen.say("\n━━ the durable run, as twiceshy remembers it", BOLD)
    demo.tape("durable")

    screen.say("\n━━ what really happened, counted by those it happened to\n", BOLD)
    _table(screen, plays)
    screen.say()
    return _verdict(screen, plays[0], plays[-1])


def _keep_quiet(_line: str) -> None:
    pass


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    screen = Screen()
    began = time.monotonic()
    try:
        with Stage() as stage:
            try:
                good = play(stage, screen)
            except FAILURES:
                screen.say("\n".join(stage.logs()), DIM)
                raise
    except KeyboardInterrupt:
        screen.say("\ninterrupted; everything that was started has been ended", RED)
        return 130
    except FAILURES as error:
        screen.say(f"\nthe demo failed: {error}", RED, BOLD)
        return 1
    screen.say(f"\n   {time.monotonic() - began:.0f} seconds. Nothing is left running.", DIM)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
