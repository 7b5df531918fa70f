"""An agent at a terminal, under a real job-control shell: Ctrl-C, Ctrl-Z, fg, bg, pipelines."""

import contextlib
import os
import pty
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.launch.guardian import processes

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

#: The launcher's terminal part alone: no database, no attempt loop.
LAUNCHER = """
import asyncio, os, sys
from runtime.launch.agent import Agent, ignored_signals
from runtime.launch.signals import Signals
from runtime.launch.terminal import Terminal
async def main():
    ignored = ignored_signals()
    signals = Signals(Terminal(), ignored)
    signals.install()
    agent = await Agent.start(sys.argv[1:], os.environ, ignored=ignored, before=signals.terminal.offer,
                              on_signal=signals.of_group, on_stop=signals.of_stop)
    signals.agent = agent
    enough = asyncio.create_task(signals.enough.wait())
    await asyncio.wait({agent.exit, enough}, return_when=asyncio.FIRST_COMPLETED)
    ended = await agent.end(0)
    signals.terminal.take(reset=ended.code < 0)
    interrupted = signals.interrupted_by(ended)
    print(f"<ended {ended.code} {interrupted}>", file=sys.stderr, flush=True)
    return signals.leave(128 + interrupted if interrupted else ended.code & 255)
sys.exit(asyncio.run(main()))
"""
#: Agents are no shells here: dash loses a SIGINT that comes while it starts its next command, and does not stop
#: while it is in vfork.
SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
print(f"<at {sys.argv[1]}>", flush=True)
time.sleep(300)
"""


class Shell:
    """bash on a pseudo terminal."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        launcher = folder / "launcher.py"
        launcher.write_text(LAUNCHER)
        (folder / "run").write_text(f'#!/bin/sh\nexec {sys.executable} {launcher} "$@"\n')
        (folder / "run").chmod(0o755)
        (folder / "sleeper").write_text(f"#!{sys.executable} -IS\n{SLEEPER}")
        (folder / "sleeper").chmod(0o755)
        environment = {"PYTHONPATH": str(Path.cwd()), **(environment or {})} | {
            "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PS1": "<prompt>", "TERM": "dumb", "HISTFILE": "", "HOME": str(folder),
        }  # fmt: skip
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        self.heard = ""
        self.expect("<prompt>")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, text: str, seconds: float = 15.0) -> str:
        """Read until *text* appears. Returns what came before it, and forgets it all."""
        deadline = time.monotonic() + seconds
        while text not in self.heard:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"waited for {text!r}, heard {self.heard!r}"
            self.heard += os.read(self.fd, 65536).decode(errors="replace")
        before, _, self.heard = self.heard.partition(text)
        return before

    @property
    def foreground(self) -> int:
        return os.tcgetpgrp(self.fd)

    def fg(self, group: int) -> None:
        """``fg``, until *group* has the terminal: what is typed earlier is the shell's."""
        self.type("fg\n")
        deadline = time.monotonic() + 10
        while self.foreground != group or any(p.group == group and p.state == "T" for p in processes()):
            assert time.monotonic() < deadline, "the job is in the foreground again"
            time.sleep(0.005)

    def close(self) -> None:
        """Kill everything that was started in this terminal; agents go with their launchers."""
        for process in list(processes()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self.pid and process.pid != self.pid:
                    os.kill(process.pid, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


def test_the_agent_is_in_the_foreground_and_reads_the_terminal(shell: Shell) -> None:
    shell.type("""run sh -c 'echo "<ask>"; read -r answer; echo "<got $answer>"'\n""")
    shell.expect("\n<ask>")
    shell.type("forty-two\n")
    shell.expect("<got forty-two>")
    shell.expect("<ended 0 None>")
    shell.expect("<prompt>")


def test_ctrl_c_interrupts_agent_launcher_and_the_loop_around(shell: Shell) -> None:
    shell.type('for i in 1 2 3; do run sleeper $i; done; echo "<code $?>"\n')
    shell.expect("\n<at 1>")
    shell.type("\x03")
    shell.expect("<ended -2 2>")
    assert "<at 2>" not in shell.expect("<prompt>")
    shell.type('echo "<code $?>"\n')
    shell.expect("\n<code 130>")


def test_ctrl_c_ends_the_script_around(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "script").write_text("run sleeper 1\necho '<went on>'\n")
    shell.type(f"bash {tmp_path}/script\n")
    shell.expect("<at 1>")
    shell.type("\x03")
    shell.expect("<ended -2 2>")
    assert "<went on>" not in shell.expect("<prompt>")


def test_an_agent_may_answer_ctrl_c_itself(shell: Shell) -> None:
    shell.type('run bash -c \'trap "echo \\<caught\\>" INT; echo "<on>"; for i in 1 2; do sleep 1; done; exit 3\'\n')
    shell.expect("\n<on>")
    shell.type("\x03")
    shell.expect("<caught>")
    shell.expect("<ended 3 2>")


def test_ctrl_z_stops_and_fg_goes_on(shell: Shell) -> None:
    shell.type("""run sh -c 'echo "<ask>"; read -r answer; echo "<got $answer>"'\n""")
    shell.expect("\n<ask>")
    agent = shell.foreground
    assert agent != shell.pid
    for _ in range(3):
        shell.type("\x1a")
        shell.expect("Stopped")
        shell.expect("<prompt>")
        shell.fg(agent)
    shell.type("back\n")
    shell.expect("<got back>")
    shell.expect("<ended 0 None>")
    shell.expect("<prompt>")


def test_bg_goes_on_and_fg_gets_the_terminal_back(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "asker.py").write_text(
        "import pathlib, sys, time\n"
        "print('<on>', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
        "print(f'<got {input()}>')\n"
    )
    shell.type(f"run python3 {tmp_path}/asker.py {tmp_path}/go\n")
    shell.expect("\n<on>")
    shell.type("\x1a")
    shell.expect("Stopped")
    shell.expect("<prompt>")
    shell.type("bg\n")
    shell.expect("<prompt>")
    (tmp_path / "go").touch()
    # It reads the terminal from the background: the job stops, and says so.
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        shell.type("jobs\n")
        if "Stopped" in shell.expect("<prompt>"):
            break
        time.sleep(0.05)
    shell.type("fg\n")
    shell.type("now\n")
    shell.expect("<got now>")
    shell.expect("<ended 0 None>")


def test_a_job_in_the_background_is_brought_to_the_foreground(shell: Shell, tmp_path: Path) -> None:
    shell.type(f"run sleeper 1 > {tmp_path}/on &\n")
    shell.expect("<prompt>")
    deadline = time.monotonic() + 10
    while not (tmp_path / "on").exists() or not (tmp_path / "on").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shell.type("fg\n")
    while shell.foreground == shell.pid:
        time.sleep(0.005)
    shell.type("\x03")
    shell.expect("<ended -2 2>")
    shell.expect("<prompt>")


def test_in_a_pipeline_the_neighbours_keep_the_terminal(shell: Shell) -> None:
    shell.type("run sleeper 1 | cat\n")
    shell.expect("\n<at 1>")
    pipeline = shell.foreground
    shell.type("\x1a")
    shell.expect("Stopped")
    shell.expect("<prompt>")
    shell.fg(pipeline)
    shell.type("\x03")
    shell.expect("<ended -2 2>")
    shell.expect("<prompt>")


def test_in_a_pipeline_an_agent_that_asks_gets_the_terminal(shell: Shell) -> None:
    shell.type("""run sh -c 'echo "<ask>"; read -r answer; echo "<got $answer>"' | cat\n""")
    shell.expect("\n<ask>")
    shell.type("yes\n")
    shell.expect("<got yes>")
    shell.expect("<ended 0 None>")
    shell.expect("<prompt>")


def test_the_terminals_modes_are_put_back_after_a_kill(shell: Shell) -> None:
    shell.type("run sh -c 'stty raw -echo; kill -9 $$'; stty -a | tr ' ' '\\n' | grep -x -e icanon -e -icanon\n")
    assert "icanon" in shell.expect("<prompt>").replace("-icanon", "raw").split("grep")[-1]


def test_ctrl_backslash_interrupts_too(shell: Shell) -> None:
    shell.type("ulimit -c 0; run sleeper 1\n")
    shell.expect("\n<at 1>")
    shell.type("\x1c")
    shell.expect("<ended -3 3>")
    shell.expect("<prompt>")


def test_a_terminal_that_goes_away_ends_it_all(shell: Shell) -> None:
    shell.type("run sleeper 1\n")
    shell.expect("\n<at 1>")
    group = shell.foreground
    os.kill(shell.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(process.group == group for process in processes()):
        assert time.monotonic() < deadline, "agent and guardian are gone"
        time.sleep(0.02)
