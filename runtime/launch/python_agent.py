"""Agents that are a function of a Python module: forked, for each attempt, from a process with their libraries. Shell.

``ForkServer`` is the worker's side of forkserver.py. There is one for each such agent. It is started when it is first
needed, and again when it has died or does not answer; agents that are under way do not notice. What is forked is an
``Agent`` like all others: a guardian that dies with us, and below it the agent's process.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.agents import AgentTable
from runtime.launch import guardian
from runtime.launch.agent import PATIENCE, Agent, CannotStart, Guard, Listener, lines_of
from runtime.launch.environment import Kit, environment
from runtime.tokens import new_token

#: What the agent's interpreter runs.
FORKSERVER = Path(guardian.__file__).with_name("forkserver.py")
#: Whose requests are those of a client that a library built when it was preloaded: they are refused, by this name.
NOBODY = "a-client-built-while-preloading"


def interpreter(table: AgentTable) -> str:
    """The Python of an agent: the one named, else that of a ``.venv`` in its folder, else ``python3``.

    Raises CannotStart when it is not there.
    """
    here = Path(table.folder, ".venv", "bin", "python")
    named = table.interpreter or (str(here) if here.exists() else "python3")
    # Not resolved: by its path a Python knows its virtual environment.
    found = shutil.which(named)
    if found is None:
        raise CannotStart(f"interpreter {named!r}: no such file or command, or not executable")
    return found


class _Gone(Exception):
    """The fork server has died, or does not answer."""


@dataclass(slots=True)
class _Forked:
    """A guardian that is the fork server's child; see ``agent.Guard``."""

    pid: int
    connection: socket.socket
    server: "subprocess.Popen[bytes]"
    returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end; how it ended is not known where the fork server was the first to go."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
        try:
            self.connection.settimeout(timeout)
            said = self.connection.recv(32)
        except TimeoutError:
            self.server.kill()  # it does not answer, and whoever asks again must not wait for it
            raise subprocess.TimeoutExpired(self.server.args, timeout or 0) from None
        except OSError:
            said = b""
        self.connection.close()
        self.returncode = int(said) if said.strip() else None
        return self.returncode


class _Server:
    """A fork server that is ready."""

    def __init__(self, process: "subprocess.Popen[bytes]", asked: socket.socket) -> None:
        self.process = process
        self.asked = asked

    async def fork(self, control: int, report: int, words: Mapping[str, object]) -> Guard:
        """One agent more. Raises _Gone."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        file = os.memfd_create("agent")
        try:
            os.write(file, json.dumps(words).encode("ascii"))
            os.lseek(file, 0, os.SEEK_SET)
            ours.setblocking(False)
            socket.send_fds(self.asked, [b"fork"], [theirs.fileno(), control, report, file])
            theirs.close()
            async with asyncio.timeout(PATIENCE):
                said = await loop.sock_recv(ours, 32)
            return _Forked(int(said), ours, self.process)
        except (OSError, ValueError, TimeoutError) as error:
            ours.close()
            raise _Gone(f"{type(error).__name__}: {error}") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(file)

    def close(self) -> None:
        """End it. Its agents go on."""
        self.asked.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class ForkServer:
    """The fork server of one agent, as a ``Program``."""

    def __init__(
        self, name: str, table: AgentTable, kit: Kit, proxy: Callable[[], str], say: Callable[[str], None],
        patience: float,
    ) -> None:  # fmt: skip
        """*proxy*: where the sidecar listens. *patience*: how long it may take to import what is preloaded."""
        assert table.python is not None
        self.name = name
        self.target = table.python
        self.table = table
        self.kit = kit
        self.proxy = proxy
        self.say = say
        self.patience = patience
        self._server: _Server | None = None
        self._turn = asyncio.Lock()

    async def start(self, env: Mapping[str, str], ignored: frozenset[int], listener: Listener) -> Agent:
        """Fork the agent. Raises CannotStart."""
        words = {
            "target": self.target, "name": self.name, "folder": self.table.folder, "env": dict(env),
            "ignored": sorted(ignored),
        }  # fmt: skip

        async def spawn(control: int, report: int) -> Guard:
            for _ in range(2):
                server = await self._ready()
                try:
                    return await server.fork(control, report, words)
                except _Gone as gone:
                    why = str(gone)
                    await self._lost(server, why)
            raise CannotStart(
                f"the fork server of agent {self.name} was started twice, and died or did not answer: {why}"
            )

        return await Agent.below(spawn, [self.target], env["TWICESHY_TOKEN"], listener)

    async def close(self) -> None:
        """End the server, whatever its agents do."""
        async with self._turn:
            server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.close)

    async def _lost(self, server: _Server, why: str) -> None:
        async with self._turn:
            if self._server is not server:
                return  # another attempt has noticed before
            self._server = None
            self.say(f"agent {self.name}: its fork server {server.process.pid} died or does not answer ({why})")
            await asyncio.to_thread(server.close)

    async def _ready(self) -> _Server:
        """The server, which is started if there is none. Raises CannotStart."""
        async with self._turn:
            if self._server is not None and self._server.process.poll() is not None:
                self.say(f"agent {self.name}: its fork server {self._server.process.pid} has died; another is started")
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = await self._begin()
            return self._server

    async def _begin(self) -> _Server:
        asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hear, say = os.pipe()
        # A client that a library builds when it is imported must not go past the journal: it is led to the sidecar,
        # as nobody's.
        env = environment(os.environ, run=NOBODY, token=new_token(), proxy=self.proxy(), kit=self.kit)
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - it returns at the exec, in a few milliseconds
                [
                    *(interpreter(self.table), str(FORKSERVER), str(say), str(theirs.fileno())),
                    *self.table.preload,
                ],
                env=env, cwd=self.table.folder, stdin=subprocess.DEVNULL, pass_fds=(say, theirs.fileno()),
                process_group=0,
            )  # fmt: skip
        except BaseException:
            asked.close()
            os.close(hear)
            raise
        finally:
            theirs.close()
            os.close(say)
        server = _Server(process, asked)
        try:
            lines, transport = await lines_of(hear)
            try:
                threads = await self._preloaded(lines)
            finally:
                transport.close()
        except BaseException:
            await asyncio.shield(asyncio.to_thread(server.close))
            raise
        if threads:
            self.say(
                f"agent {self.name}: what it preloads has started {threads} threads, which its agents will not have: "
                f"where one is missed, leave that library out of preload"
            )
        return server

    async def _preloaded(self, lines: asyncio.StreamReader) -> int:
        """Wait until it is ready. How many threads its libraries have started."""
        at = "starting"
        try:
            async with asyncio.timeout(self.patience):
                while line := (await lines.readline()).decode("utf-8", "replace").strip():
                    kind, _, rest = line.partition(" ")
                    if kind == "ready":
                        return int(rest)
                    if kind == "failed":
                        raise CannotStart(f"agent {self.name} cannot preload {rest}")
                    at = line
        except TimeoutError:
            raise CannotStart(
                f"the fork server of agent {self.name} was still {at} after preload_timeout = {self.patience:g} s"
            ) from None
        raise CannotStart(f"the fork server of agent {self.name} ended while {at}; what it said stands before this")
