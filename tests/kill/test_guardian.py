"""The guardian: whatever dies, however, no process of the agent outlives its launcher."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from runtime.errors import UsageError
from runtime.launch.agent import Agent, Exit

#: A launcher that does nothing but hold its agent.
LAUNCHER = """
import asyncio, os, sys
from runtime.launch.agent import Agent
async def main():
    agent = await Agent.start(sys.argv[1:], os.environ)
    print(agent.group, agent.pid, flush=True)
    print((await agent.exit).code, flush=True)
asyncio.run(main())
"""
#: Starts children in every way that has been seen to escape, then says so and sleeps.
SPREAD = """
import os, sys, time
def sleeper():
    if os.fork() == 0:
        os.execvp(sys.executable, [sys.executable, "-c", "import time; time.sleep(300)", sys.argv[1]])
sleeper()                                   # a plain child
if os.fork() == 0:                          # a session of its own
    os.setsid(); sleeper(); time.sleep(300)
if os.fork() == 0:                          # a daemon: its parent is gone
    os.setsid()
    if os.fork() == 0:
        sleeper(); time.sleep(300)
    os._exit(0)
if os.fork() == 0:                          # deaf to all that can be refused
    import signal
    for number in (1, 2, 3, 15, 20): signal.signal(number, signal.SIG_IGN)
    time.sleep(300)
print("spread", flush=True)
time.sleep(300)
"""


def marked(mark: str) -> list[int]:
    """The living processes that have *mark* among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture
def mark() -> Iterator[str]:
    """An argument that no other process has. Who still has it at the end is killed."""
    mark = f"mark-{uuid.uuid4().hex}"
    yield mark
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def agents() -> AsyncIterator[list[Agent]]:
    started: list[Agent] = []
    yield started
    for agent in started:
        await agent.end(0)


def launcher(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "in a shell"])
def test_a_killed_launcher_leaves_no_process(mark: str, tmp_path: Path, wrapped: bool) -> None:
    program = tmp_path / "spread.py"
    program.write_text(SPREAD)
    command = [sys.executable, str(program), mark]
    if wrapped:
        command = ["sh", "-c", f"{sys.executable} {program} {mark}; true"]
    with launcher(*command) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.readline() == "spread\n"
        until(lambda: len(marked(mark)) >= 7, "the agent has spread")
        process.kill()
        until(lambda: not marked(mark), "every process of the agent is gone")


def test_a_guardian_stopped_with_its_group_still_ends_it(mark: str) -> None:
    with launcher("sh", "-c", "sleep 300; true", mark) as process:
        assert process.stdout is not None
        group, _ = map(int, process.stdout.readline().split())
        os.killpg(group, signal.SIGSTOP)
        process.kill()
        until(lambda: not marked(mark), "every process of the agent is gone")


def test_the_agent_of_a_killed_guardian_dies_and_its_strays_too(mark: str, tmp_path: Path) -> None:
    program = tmp_path / "spread.py"
    program.write_text(SPREAD)
    with launcher(sys.executable, str(program), mark) as process:
        assert process.stdout is not None
        group, _ = map(int, process.stdout.readline().split())
        assert process.stdout.readline() == "spread\n"
        os.kill(group, signal.SIGKILL)
        # No token here, hence no strays are looked for: but the agent's death follows its guardian's.
        assert process.stdout.readline() == f"{-signal.SIGKILL}\n"


async def test_strays_are_known_by_their_token(mark: str, tmp_path: Path, agents: list[Agent]) -> None:
    ready = tmp_path / "ready"
    script = f"setsid sh -c 'touch {ready}; sleep 300; true' {mark} & sleep 300; true"
    agent = await Agent.start(["sh", "-c", script, mark], {**os.environ, "TWICESHY_TOKEN": uuid.uuid4().hex})
    agents.append(agent)
    await asyncio.to_thread(until, ready.exists, "the stray is there")
    os.kill(agent.group, signal.SIGKILL)
    ended = await asyncio.wait_for(agent.exit, 10)
    assert ended.lost
    assert not marked(mark)


@pytest.mark.parametrize("code", [0, 1, 75, 255])
async def test_exit_codes_are_reported(code: int) -> None:
    agent = await Agent.start(["sh", "-c", f"exit {code}"], os.environ)
    assert await asyncio.wait_for(agent.exit, 10) == Exit(code)


async def test_a_death_by_signal_is_reported(agents: list[Agent]) -> None:
    agent = await Agent.start(["sleep", "300"], os.environ)
    agents.append(agent)
    os.kill(agent.pid, signal.SIGKILL)
    assert await asyncio.wait_for(agent.exit, 10) == Exit(-signal.SIGKILL)


async def test_what_an_ended_agent_left_behind_is_ended(mark: str) -> None:
    agent = await Agent.start(["sh", "-c", "setsid sleep 300 & exit 3", mark], os.environ)
    assert (await asyncio.wait_for(agent.exit, 10)).code == 3
    assert not marked(mark)


@pytest.mark.parametrize(("command", "words"), [("no-such-command-here", "no such file"), ("/etc/passwd", "not exec")])
async def test_what_cannot_be_started_says_so(command: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        await Agent.start([command], os.environ)


async def test_end_asks_first_and_then_insists(mark: str, agents: list[Agent]) -> None:
    polite = await Agent.start(["sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.01; done"], os.environ)
    agents.append(polite)
    # The trap may not be set yet: until it is, SIGTERM kills.
    assert (await polite.end(10)).code in (7, -signal.SIGTERM)
    deaf = await Agent.start(["sh", "-c", "trap '' TERM; echo; sleep 300; true", mark], os.environ)
    agents.append(deaf)
    await deaf.end(0.05)
    assert not marked(mark)


async def test_signals_of_the_group_are_reported_and_not_deadly_for_the_guardian() -> None:
    heard: list[int] = []
    agent = await Agent.start(["sleep", "300"], os.environ, on_signal=heard.append)
    os.killpg(agent.group, signal.SIGINT)
    assert await asyncio.wait_for(agent.exit, 10) == Exit(-signal.SIGINT)
    assert heard == [signal.SIGINT]


async def test_a_stop_is_reported(agents: list[Agent]) -> None:
    stopped = asyncio.Event()
    agent = await Agent.start(["sleep", "300"], os.environ, on_stop=lambda _: stopped.set())
    agents.append(agent)
    os.killpg(agent.group, signal.SIGTSTP)
    await asyncio.wait_for(stopped.wait(), 10)
    agent.signal(signal.SIGCONT)
    assert (await agent.end(10)).code == -signal.SIGTERM


def test_the_streams_are_the_agents(tmp_path: Path) -> None:
    """Input, output, errors and further descriptors are its own, byte for byte; its end is seen as theirs."""
    script = "cat; printf 'to err' >&2; cat <&9; printf '%s' \"$1\""
    spare = tmp_path / "spare"
    spare.write_bytes(b"\0spare\xff")
    ran = subprocess.run(
        ["sh", "-c", f'exec 9<{spare}; exec "$@"', "sh", sys.executable, "-c",
         LAUNCHER.replace("print(", "(lambda *a, **k: None)("), "sh", "-c", script, "sh", "an arg"],
        input=b"\0in\r\n\xff", capture_output=True, env={**os.environ, "PYTHONPATH": str(Path.cwd())}, timeout=20,
    )  # fmt: skip
    assert ran.stdout == b"\0in\r\n\xff\0spare\xffan arg"
    assert ran.stderr == b"to err"


def test_the_agent_finds_the_signals_as_its_launcher_did() -> None:
    """``nohup`` and ``&`` in a script ignore signals for what they start; all others stand at their defaults."""
    tell = (
        "import json, signal; print(json.dumps([signal.getsignal(n) == signal.SIG_IGN for n in"
        " (signal.SIGHUP, signal.SIGTERM, signal.SIGTSTP, signal.SIGTTOU, signal.SIGCHLD)]))"
    )
    program = """
import asyncio, os, signal, sys
from runtime.launch.agent import Agent, ignored_signals
ignored = ignored_signals()
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
async def main():
    await (await Agent.start(sys.argv[1:], os.environ, ignored=ignored)).exit
asyncio.run(main())
"""
    ran = subprocess.run(
        ["nohup", sys.executable, "-c", program, sys.executable, "-c", tell],
        stdin=subprocess.DEVNULL, capture_output=True, env={**os.environ, "PYTHONPATH": str(Path.cwd())}, timeout=20,
    )  # fmt: skip
    assert json.loads(ran.stdout) == [True, False, False, False, False]
