"""A running agent, as its launcher holds it: the guardian's other side.

The agent lives exactly as long as the launcher holds the control pipe: closing it, or the launcher's own
death, ends the agent and everything it started. Nothing here knows of runs or leases.
"""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runtime.errors import UsageError
from runtime.launch import guardian

#: How long the guardian may take to start or, once told to end all, to be gone, in seconds.
PATIENCE = 20.0


@dataclass(frozen=True, slots=True)
class Exit:
    """How an agent ended: exit code, or the negative number of the signal; who could not be killed."""

    code: int
    left: tuple[int, ...] = ()
    #: The guardian itself was killed: how the agent would have ended is not known.
    lost: bool = False

    @property
    def words(self) -> str:
        if self.lost:
            return "killed together with its guardian"
        if self.code < 0:
            try:
                return f"killed by {signal.Signals(-self.code).name}"
            except ValueError:
                return f"killed by signal {-self.code}"
        return f"exit code {self.code}"


def ignored_signals() -> frozenset[int]:
    """The signals that whoever started us wants ignored. To be asked before any of them is touched."""
    asked = (*guardian.REPORTED, *guardian.STOPS)
    return frozenset(number for number in asked if signal.getsignal(number) is signal.SIG_IGN)


def why_not(command: Sequence[str], number: int) -> str:
    """One line about a command that could not be started."""
    reason = {errno.ENOENT: "no such file or command", errno.EACCES: "not executable"}.get(number, os.strerror(number))
    return f"cannot start {command[0]!r}: {reason}"


class CannotStart(UsageError):
    """The command cannot be executed."""


class Guard(Protocol):
    """The guardian's process, as its launcher sees it."""

    @property
    def pid(self) -> int:
        """Its number, which is its group's too, and nobody else's until ``wait`` has returned."""

    @property
    def returncode(self) -> int | None:
        """How it ended, once ``wait`` has returned; None: not known."""

    def wait(self, timeout: float | None = None) -> object:
        """Wait for its end. Raises subprocess.TimeoutExpired."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Who hears of what befalls an agent's group.

    ``before``: called with its number before the agent's first instruction (the terminal is handed over there);
    ``on_signal`` when it got a signal, ``on_stop`` when job control stopped it.
    """

    before: Callable[[int], None]
    on_signal: Callable[[int], None]
    on_stop: Callable[[int], None]


class Program(Protocol):
    """What is started for an attempt."""

    async def start(self, env: Mapping[str, str], ignored: frozenset[int], listener: Listener) -> "Agent":
        """Start it. Raises CannotStart."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program and its arguments. ``folder``: where it is started, if not here."""

    words: Sequence[str]
    folder: str | None = None

    async def start(self, env: Mapping[str, str], ignored: frozenset[int], listener: Listener) -> "Agent":
        """Start it. Raises CannotStart."""
        return await Agent.start(
            self.words, env, folder=self.folder, ignored=ignored, before=listener.before,
            on_signal=listener.on_signal, on_stop=listener.on_stop,
        )  # fmt: skip


class Agent:
    """One started agent. Make it with ``Agent.start``, or ``Agent.below`` a guardian of another kind."""

    def __init__(self, process: Guard, control: int, token: str) -> None:
        self.process = process
        self.group = process.pid
        self.pid = 0
        self.control: int | None = control
        self.token = token
        self.exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.reader: asyncio.Task[None] | None = None
        #: The guardian has nothing more to say: its number may soon be another's.
        self.over = False

    @classmethod
    async def start(
        cls, command: Sequence[str], env: Mapping[str, str], *, folder: str | None = None,
        ignored: frozenset[int] = frozenset(), before: Callable[[int], None] = lambda _group: None,
        on_signal: Callable[[int], None] = lambda _number: None,
        on_stop: Callable[[int], None] = lambda _number: None,
    ) -> "Agent":  # fmt: skip
        """Start *command* under a guardian, in a process group of its own; in *folder*, if not here.

        Who is told of what: ``Listener``. Raises CannotStart when the command cannot be executed.
        """

        async def spawn(control: int, report: int) -> Guard:
            # Descriptors that the user gave us are the agent's too (``<(…)`` in a shell): close_fds=False
            # passes those, and those only: everything opened in Python closes at exec. These two must not.
            os.set_inheritable(control, True)
            os.set_inheritable(report, True)
            return subprocess.Popen(  # noqa: ASYNC220 - it returns at the exec, in a few milliseconds
                [
                    *(sys.executable, "-I", "-S", guardian.__file__, str(control), str(report)),
                    ",".join(map(str, sorted(ignored))),
                    *command,
                ],
                env=dict(env),
                cwd=folder,
                close_fds=False,
                process_group=0,
            )

        return await cls.below(spawn, command, env.get("TWICESHY_TOKEN", ""), Listener(before, on_signal, on_stop))

    @classmethod
    async def below(
        cls, spawn: Callable[[int, int], Awaitable[Guard]], command: Sequence[str], token: str, listener: Listener
    ) -> "Agent":
        """The agent *command* under the guardian that *spawn* makes of a control pipe's and a report pipe's ends."""
        control, control_write = os.pipe()
        report_read, report = os.pipe()
        try:
            process = await spawn(control, report)
        except BaseException:
            os.close(control_write)
            os.close(report_read)
            raise
        finally:
            os.close(control)
            os.close(report)
        self = cls(process, control_write, token)
        lines, transport = await lines_of(report_read)
        try:
            async with asyncio.timeout(PATIENCE):
                if await lines.readline() == b"ready\n":
                    listener.before(self.group)
                    os.write(control_write, b"\n")
                kind, _, value = (await lines.readline()).decode().strip().partition(" ")
            if kind == "failed":
                raise CannotStart(why_not(command, int(value)))
            self.pid = int(value) if kind == "agent" else 0
        except BaseException:
            self.let_go()
            await asyncio.shield(self._gone())
            transport.close()
            raise
        self.reader = asyncio.create_task(self._read(lines, listener))
        return self

    async def _read(self, lines: asyncio.StreamReader, listener: Listener) -> None:
        """Carry the guardian's reports out, until it is gone."""
        ended: Exit | None = None
        while line := await lines.readline():
            kind, *values = line.decode().split()
            if kind == "signal":
                listener.on_signal(int(values[0]))
            elif kind == "stopped":
                listener.on_stop(int(values[0]))
            elif kind == "exit":
                ended = Exit(int(values[0]), tuple(map(int, values[1:])))
        self.let_go()
        if ended is None:
            self.kill_group()  # while the dead guardian still holds the number
        self.over = True
        await self._gone()
        if ended is None:
            self._end_strays()
            code = self.process.returncode
            ended = Exit(code if code is not None and code < 0 else -signal.SIGKILL, lost=True)
        if not self.exit.done():
            self.exit.set_result(ended)

    async def _gone(self) -> None:
        """Wait for the guardian's own end, and make sure of it."""
        try:
            await asyncio.to_thread(self.process.wait, PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill_group()
            self._end_strays()
            await asyncio.to_thread(self.process.wait)

    def _end_strays(self) -> None:
        """Kill what a guardian that was itself killed could not: those who carry this attempt's token."""
        mark = f"TWICESHY_TOKEN={self.token}".encode()
        found = bool(self.token)
        while found:
            found = False
            for process in guardian.processes():
                with contextlib.suppress(OSError):  # gone, or another user's
                    if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                        os.kill(process.pid, signal.SIGKILL)
                        found = True

    def signal(self, number: int) -> None:
        """Send a signal to the agent's group."""
        if self.over:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, number)

    def kill_group(self) -> None:
        self.signal(signal.SIGKILL)

    def let_go(self) -> None:
        """Close the control pipe: the guardian kills everything. Returns at once."""
        if self.control is not None:
            os.close(self.control)
            self.control = None
            # A guardian stopped by a SIGSTOP to its whole group would sleep through it.
            self.signal(signal.SIGCONT)

    async def end(self, grace: float) -> Exit:
        """SIGTERM to the group, SIGKILL for everything after *grace* seconds (at once when 0)."""
        if grace > 0 and not self.exit.done():
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(self.exit), grace)
        self.let_go()
        return await asyncio.shield(self.exit)


async def lines_of(fd: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """The reading end of a pipe as a stream of lines."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    pipe = os.fdopen(fd, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    return reader, transport
