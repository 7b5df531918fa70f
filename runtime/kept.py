"""A sidecar that is kept running: started, watched, started again on the same port.

Rules:

* The sidecar announces itself by one JSON line ``{"id": …, "port": …}`` on its standard output.
* It gets the settings as a file of its own (``TWICESHY_CONFIG``): an edit of the user's rule file while it
  runs makes another sidecar for those who come with it, and never changes this one at a restart.
* It is killed with its keeper, at once: its successor must not find it half alive. The kernel frees the
  keeper's lock only when the sidecar, which inherits it, is dead too.
* A sidecar that never came up is an error for those who wait for it, at once where only a person can mend it,
  else (it was killed, its database is away) when it does not pass. One that came up is restarted for ever: the
  first time at once, then with a pause that grows while it dies young.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import failpoints
from runtime.embedded import dies_with_parent
from runtime.folder import hold_kept_port, hold_port, open_log, tail, trim_log

#: From the start of the process to its line. Importing it can take seconds on a loaded machine.
READY_WITHIN = 60.0
#: A sidecar that lived this long did not die young.
YOUNG = 10.0
PAUSE_MAX = 5.0
#: For how long one that never came up is tried again, when what it died of may pass.
PASSES_WITHIN = 20.0
#: Beyond the settings' ``drain``, for the rest of an orderly end.
DRAIN_MARGIN = 10.0


def say(text: str) -> None:
    """A line in the keeper's log, or on the terminal of a foreground one."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with contextlib.suppress(OSError):  # a full disk or a closed terminal must not end what we keep
        print(f"{now} keeper {os.getpid()}: {text}", file=sys.stderr, flush=True)


def working_folder() -> str:
    """Where our own programs are started: where they can be imported from, and nothing else is."""
    root = Path(__file__).resolve().parents[1]
    return str(root) if (root / "pyproject.toml").is_file() else "/"


class Children:
    """Exit of child processes as futures, by SIGCHLD: no thread, so that a fork copies no foreign lock."""

    def __init__(self) -> None:
        self._watched: dict[Callable[[], int | None], asyncio.Future[int]] = {}
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._look)

    def exited(self, poll: Callable[[], int | None]) -> asyncio.Future[int]:
        """A future of the exit status of the process that *poll* asks about."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watched[poll] = future
        self._look()
        return future

    def _look(self) -> None:
        for poll, future in list(self._watched.items()):
            status = poll()
            if status is not None:
                del self._watched[poll]
                if not future.done():
                    future.set_result(status)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a sidecar is started with. ``settings`` as JSON values."""

    settings: Mapping[str, Any]
    command: Sequence[str]
    environment: Mapping[str, str]
    host: str = "127.0.0.1"
    port: int | None = None  # None: one of its own choice, kept over restarts of the keeper too

    @property
    def hash(self) -> str:
        """Equal for users who can share a sidecar."""
        text = json.dumps([dict(self.settings), list(self.command)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Running:
    """A sidecar process that listens."""

    id: str
    address: str
    pid: int


class KeptSidecar:
    """One sidecar of the keeper, and those who use it. ``keep`` runs until ``end``."""

    def __init__(
        self,
        folder: Path,
        wanted: Wanted,
        dsn: str,
        lock: int,
        children: Children,
        changed: Callable[["KeptSidecar"], None],
    ) -> None:
        self.state = folder
        self.folder = folder / "sidecars" / wanted.hash
        self.wanted = wanted
        self.dsn = dsn
        self.users: set[asyncio.StreamWriter] = set()
        self.running: Running | None = None
        #: Why it is not running, in words. Before the first success it is final.
        self.trouble: str | None = None
        self.failed = False
        self.leaving: asyncio.TimerHandle | None = None
        self._lock = lock
        self._children = children
        self._changed = changed
        self._process: subprocess.Popen[bytes] | None = None
        self._armed = True  # what is to kill a sidecar is not to kill its successor
        self._ending = asyncio.Event()
        self.task = asyncio.create_task(self._keep())

    def take_port(self) -> socket.socket:
        """Hold the port it is to listen on."""
        if self.wanted.port is None:
            return hold_kept_port(self.folder / "port")
        return hold_port(self.wanted.port, self.wanted.host)

    @property
    def ending(self) -> bool:
        """It drains, and nobody begins anything with it."""
        return self._ending.is_set()

    @property
    def log(self) -> Path:
        """Where it writes, other than in the foreground."""
        return self.folder / "sidecar.log"

    async def _keep(self) -> None:
        died_young = 0
        came_up = False
        first = time.monotonic()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            settings = self.folder / "settings.json"
            settings.write_text(json.dumps(dict(self.wanted.settings), indent=1), "utf-8")
            with self.take_port() as port:
                while not self._ending.is_set():
                    began = time.monotonic()
                    trouble = await self._once(port.getsockname()[1])
                    came_up = came_up or self.running is not None
                    self.running, self.trouble = None, trouble
                    if self._ending.is_set():
                        return
                    say(trouble)
                    if not came_up and (not self._may_pass() or time.monotonic() - first > PASSES_WITHIN):
                        break
                    if came_up:
                        self._changed(self)
                    died_young = 0 if time.monotonic() - began > YOUNG else died_young + 1
                    pause = 0.0 if died_young <= 1 else min(PAUSE_MAX, 0.05 * 2**died_young)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._ending.wait(), pause)
        except Exception as error:  # whatever it is, those who wait must hear of it
            self.trouble = f"the sidecar cannot be started: {str(error) or type(error).__name__}"
            say(self.trouble)
        self.failed = not self._ending.is_set()
        self._changed(self)

    @property
    def away(self) -> bool:
        """It could not reach its database."""
        return self._process is not None and self._process.returncode == os.EX_TEMPFAIL

    def _may_pass(self) -> bool:
        """It was killed, or cannot reach its database: nothing that a person must mend."""
        code = None if self._process is None else self._process.returncode
        return code is not None and (code < 0 or code == os.EX_TEMPFAIL)

    async def _once(self, port: int) -> str:
        """One life of the process. Returns how it ended, in words."""
        with contextlib.ExitStack() as stack:
            # In the foreground it speaks where it is heard.
            log = open_log(self.log) if self.wanted.port is None else os.dup(sys.stderr.fileno())
            stack.callback(os.close, log)
            since = os.fstat(log).st_size
            host = [] if self.wanted.host == "127.0.0.1" else ["--host", self.wanted.host]
            self._process = process = subprocess.Popen(  # noqa: ASYNC220 - it returns at the exec
                [*self.wanted.command, "--folder", self.folder, "--state", self.state, "--port", str(port), *host],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={
                    **self._environment(),
                    "DATABASE_URL": self.dsn,
                    "TWICESHY_CONFIG": str(self.folder / "settings.json"),
                },
                cwd=working_folder(),
                pass_fds=[self._lock],
                # Ctrl-C in a terminal is the keeper's business, which drains.
                start_new_session=True,
                preexec_fn=dies_with_parent(signal.SIGKILL),  # noqa: PLW1509 - one call, no locks
            )
            stack.callback(process.kill)  # does nothing to one that has ended
            exited = self._children.exited(process.poll)
            assert process.stdout is not None
            reader = asyncio.StreamReader(limit=1 << 20)
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, process.stdout)
            stack.callback(transport.close)
            speaking = asyncio.create_task(self._listen(reader, log))
            stack.callback(speaking.cancel)
            either: set[asyncio.Future[Any]] = {exited, speaking}
            await asyncio.wait(either, timeout=READY_WITHIN, return_when=asyncio.FIRST_COMPLETED)
            if not speaking.done() and not exited.done():
                return f"the sidecar said nothing for {READY_WITHIN:g} s and is ended (see {self.log})"
            announced = speaking.result() if speaking.done() else None
            if announced is None:
                # It has closed its output, mostly because it is ending: its status tells more than SIGKILL's.
                await asyncio.wait({exited}, timeout=2.0)
                said = tail(self.log, since) or "it said nothing"
                return f"the sidecar did not start (exit {process.returncode}): {said} (see {self.log})"
            spoken = "127.0.0.1" if self.wanted.host in ("0.0.0.0", "::") else self.wanted.host  # noqa: S104
            self.running = Running(announced["id"], f"{spoken}:{announced['port']}", process.pid)
            self.trouble = None
            if not self._ending.is_set():
                self._changed(self)
            rest = asyncio.create_task(self._copy(reader, log))
            stack.callback(rest.cancel)
            status = await exited
            return f"sidecar {announced['id']} (pid {process.pid}) ended with {status}"

    def _environment(self) -> dict[str, str]:
        armed, self._armed = self._armed, False
        return {name: value for name, value in self.wanted.environment.items() if armed or name != failpoints.VARIABLE}

    async def _listen(self, reader: asyncio.StreamReader, log: int) -> dict[str, Any] | None:
        """Its line, None when it closed its output without one. Whatever else it prints goes to the log."""
        while line := await reader.readline():
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict) and isinstance(said.get("id"), str) and isinstance(said.get("port"), int):
                    return said
            with contextlib.suppress(OSError):
                os.write(log, line)
        return None

    async def _copy(self, reader: asyncio.StreamReader, log: int) -> None:
        while piece := await reader.read(65536):
            with contextlib.suppress(OSError):
                os.write(log, piece)

    def trim(self) -> None:
        """Keep its log bounded."""
        trim_log(self.log)

    async def end(self) -> None:
        """SIGTERM, time to drain, and the end."""
        self._ending.set()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        patience = float(self.wanted.settings.get("drain", 0)) + DRAIN_MARGIN
        done, _ = await asyncio.wait({self.task}, timeout=patience)
        if not done:
            say(f"sidecar {self._process and self._process.pid} did not end within {patience:g} s and is killed")
            if self._process is not None:
                self._process.kill()
            await self.task
