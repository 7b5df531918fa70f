"""The API as a child of the keeper: one per state folder, beside the sidecars, started again when it dies.

::

    FOLDER/api/settings.json   what it goes by, and the agents of all who use the folder: read anew when it changes
    FOLDER/api/port            the port that it keeps over restarts of everything
    FOLDER/api/api.log         what it had to say, in the background

Nobody's run waits for it: it comes when somebody has been here for a moment, and what it cannot do it says in its log.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.embedded import dies_with_parent
from runtime.folder import hold_kept_port, hold_port, open_log, trim_log
from runtime.kept import PAUSE_MAX, YOUNG, Children, say, working_folder

#: Who comes for a moment only needs no API, and does not pay for its start (a second of a processor).
AFTER = 5.0
#: For what it is answering when it is to end.
DRAIN = 8.0


@dataclass(frozen=True, slots=True)
class WantedApi:
    """What the API is started with. ``settings`` as JSON values; ``port`` None: one of its own choice, which it keeps.

    ``heard``: it speaks where the keeper does, not in a log.
    """

    command: Sequence[str]
    settings: Mapping[str, Any]
    host: str = "127.0.0.1"
    port: int | None = None
    heard: bool = False


class KeptApi:
    """The API of one keeper. Its port is held from the beginning: no sidecar lets an agent go there."""

    def __init__(self, folder: Path, children: Children, lock: int, own: WantedApi | None) -> None:
        self.folder = folder / "api"
        self.state = folder
        self._children = children
        self._lock = lock
        self._wanted: WantedApi | None = None
        self._agents: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._port = self._hold(own)

    def _hold(self, own: WantedApi | None) -> socket.socket:
        if own is None or own.port is None:
            return hold_kept_port(self.folder / "port")
        held = hold_port(own.port, own.host)
        (self.folder / "port").write_text(f"{held.getsockname()[1]}\n", "ascii")
        return held

    def want(self, wanted: WantedApi, dsn: str, environment: Mapping[str, str], *, after: float = AFTER) -> None:
        """Let it run, in *after* seconds at the latest; it knows the agents of everyone who ever wanted it here."""
        self._agents |= wanted.settings.get("agents", {})
        self._wanted = self._wanted or wanted
        settings = {**self._wanted.settings, "agents": self._agents}
        draft = self.folder / "settings.json.new"
        draft.write_text(json.dumps(settings, indent=1), "utf-8")
        draft.replace(self.folder / "settings.json")
        if self._task is None and not self._ending.is_set():
            self._task = asyncio.create_task(self._keep(dsn, environment, after))

    async def _keep(self, dsn: str, environment: Mapping[str, str], after: float) -> None:
        died_young, pause = 0, after
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
            if self._ending.is_set():
                return
            began = time.monotonic()
            try:
                status = await self._once(dsn, environment)
            except OSError as error:
                status = error.errno or 1
                say(f"the API cannot be started: {error}")
            if self._ending.is_set():
                return
            say(f"the API ended with {status}; starting it again")
            died_young = 0 if time.monotonic() - began > YOUNG else died_young + 1
            pause = 0.0 if died_young <= 1 else min(PAUSE_MAX, 0.05 * 2**died_young)

    async def _once(self, dsn: str, environment: Mapping[str, str]) -> int:
        assert self._wanted is not None
        with contextlib.ExitStack() as stack:
            log = os.dup(sys.stderr.fileno()) if self._wanted.heard else open_log(self.folder / "api.log")
            stack.callback(os.close, log)
            port = str(self._port.getsockname()[1])
            self._process = process = subprocess.Popen(  # noqa: ASYNC220 - it returns at the exec
                [*self._wanted.command, "--folder", self.state, "--port", port, "--host", self._wanted.host],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **environment,
                    "DATABASE_URL": dsn,
                    "TWICESHY_CONFIG": str(self.folder / "settings.json"),
                },
                cwd=working_folder(),
                pass_fds=[self._lock],
                start_new_session=True,
                preexec_fn=dies_with_parent(signal.SIGKILL),  # noqa: PLW1509 - one call, no locks
            )
            stack.callback(process.kill)  # does nothing to one that has ended
            return await self._children.exited(process.poll)

    def trim(self) -> None:
        """Keep its log bounded."""
        trim_log(self.folder / "api.log")

    async def end(self) -> None:
        """SIGTERM, time for what is being answered, and the end."""
        self._ending.set()
        if self._task is not None:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
            done, _ = await asyncio.wait({self._task}, timeout=DRAIN)
            if not done and self._process is not None:
                self._process.kill()
                await self._task
        self._port.close()
