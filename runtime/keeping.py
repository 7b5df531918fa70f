"""A user's side of the keeper: find it or start it, and hear of each change.

A launcher, ``twiceshy env`` and the like hold a ``Keeping`` open for as long as they need a sidecar. Its
fields describe the sidecar that its owner knows of; they change only in ``open``, ``ready`` and ``changed``,
so that a change that happens in between is never missed.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runtime import folder as state
from runtime import keeper
from runtime.errors import DatabaseAway, TwiceshyError, UsageError
from runtime.kept import working_folder
from runtime.kept_api import WantedApi
from runtime.settings import NOT_OF_SIDECARS, NOT_SETTINGS, Settings

#: Until the first sidecar listens: making the database's data takes seconds on a slow disk.
OPEN_WITHIN = 120.0
#: Between two tries to get a lost sidecar back.
PAUSE = 0.5
#: What the background processes get of the environment of whoever starts them. Not: API keys, proxies (ours
#: among them), the token of a run.
PASSED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "DATABASE_URL"}
)
PASSED_PREFIXES = ("LC_", "PYTHON", "XDG_", "PG", "TWICESHY_")
HELD_BACK = frozenset(
    {"TWICESHY_RUN", "TWICESHY_TOKEN", "TWICESHY_CONFIG", "TWICESHY_CA_FILE", "TWICESHY_DOCTOR"}
    | {"TWICESHY_DATABASE_URL", "PYTHONSTARTUP", "PYTHONINSPECT"}
)


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The part of *base* (the process' own) that the background processes get."""
    known = os.environ if base is None else base
    return {
        name: value
        for name, value in known.items()
        if (name in PASSED or name.startswith(PASSED_PREFIXES)) and name not in HELD_BACK and not _is_setting(name)
    }


#: What of an agent is a sidecar's business: whose runs it may start, and with what. An agent has one of the last two.
OF_AGENTS = ("children", "input_schema", "command", "python")


def settings_as_values(settings: Settings) -> dict[str, Any]:
    """*settings* as JSON values, for a sidecar: without what is none of its business, and paths absolute."""
    values = settings.model_dump(mode="json", exclude=set(NOT_OF_SIDECARS))
    if values.get("extra_ca"):
        values["extra_ca"] = str(Path(values["extra_ca"]).absolute())
    of_others = {child for table in settings.agents.values() for child in table.children}
    agents = {
        name: table.model_dump(mode="json", include=set(OF_AGENTS))
        for name, table in settings.agents.items()
        if table.children or name in of_others
    }
    # Whose agents say nothing of one another shares a sidecar with others, whatever else they are.
    return values | {"agents": agents} if agents else values


def api_settings_as_values(settings: Settings) -> dict[str, Any]:
    """*settings* as JSON values, for the API: with the agents, whose runs are started there."""
    return settings.model_dump(mode="json")


def _is_setting(name: str) -> bool:
    """Settings travel as values: the variable must not be read over them a second time."""
    return name.startswith("TWICESHY_") and name not in NOT_SETTINGS and name != "TWICESHY_FAILPOINT"


def up(
    settings: Settings,
    sidecar_command: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 7777,
    api_command: Sequence[str] | None = None,
    api_port: int | None = None,
) -> int:
    """``twiceshy up``: be the keeper, in the foreground, until SIGINT or SIGTERM. Returns the exit code.

    *api_command*: what the API is started by; None: there is none. Says on standard error where it listens. Raises
    UsageError when a port is taken or another ``up`` runs.
    """
    api = None
    if api_command is not None:
        api = WantedApi(api_command, api_settings_as_values(settings), host, api_port, heard=True)
    return keeper.up(settings_as_values(settings), sidecar_command, environment(), host=host, port=port, api=api)


class Keeping:
    """An open connection to the keeper. Make it with ``Keeping.open``; ``close`` it, or use ``async with``."""

    folder: Path
    dsn: str
    #: ``127.0.0.1:port``
    proxy: str
    #: The sidecar process' id.
    sidecar: str
    sidecar_pid: int
    keeper_pid: int

    def __init__(
        self, settings: Settings, sidecar_command: Sequence[str], api_command: Sequence[str] | None = None
    ) -> None:
        self._dsn = os.environ.get("DATABASE_URL") or None
        self.folder = state.state_folder(self._dsn)
        hello: dict[str, Any] = {
            "version": keeper.VERSION,
            "database": state.database_identity(self._dsn),
            "settings": settings_as_values(settings),
            "command": list(sidecar_command),
            "environment": environment(),
        }
        if api_command is not None:
            hello["api"] = {"command": list(api_command), "settings": api_settings_as_values(settings)}
        self._hello = json.dumps(hello).encode() + b"\n"
        self._news = asyncio.Condition()
        self._state: dict[str, Any] | None = None
        self._failure: TwiceshyError | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._following: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, settings: Settings, sidecar_command: Sequence[str], api_command: Sequence[str] | None = None
    ) -> Self:
        """Connect, starting a keeper if there is none; returns when a sidecar listens.

        With *api_command* the folder's API is started by it, too, if this user stays for a moment.

        Raises UsageError or DatabaseAway with the keeper's words when that cannot be.
        """
        self = cls(settings, sidecar_command, api_command)
        state.make_folder(self.folder)
        self._following = asyncio.create_task(self._follow())
        try:
            await asyncio.wait_for(self.ready(), OPEN_WITHIN)
        except TimeoutError as error:
            await self.close()
            said = state.tail(self.folder / "keeper.log")
            raise UsageError(f"no sidecar within {OPEN_WITHIN:g} s; the keeper's log ends: {said}") from error
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def trouble(self) -> str | None:
        """Why no sidecar listens at this moment, in words, as far as that is known."""
        trouble: str | None = self._now("trouble")
        return trouble

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def ready(self) -> None:
        """Wait until a sidecar listens, and take its address over. Raises as ``open`` does."""
        async with self._news:
            await self._news.wait_for(lambda: self._failure or self._is_up())
            self._take_over()

    async def changed(self, known: str | None = None) -> str:
        """Wait until another sidecar than *known* (None: the one in ``sidecar``) listens; its id, the fields set to it.

        A keeper that died is replaced meanwhile. Raises as ``open`` does when there will be none.
        """
        before = self.sidecar if known is None else known
        async with self._news:
            await self._news.wait_for(lambda: self._failure or (self._is_up() and self._now("sidecar") != before))
            self._take_over()
            return self.sidecar

    async def close(self) -> None:
        """Let go. The keeper ends when nobody else has it open."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
            self._following = None
        self._hang_up()

    # ---- how

    def _now(self, name: str) -> Any:
        return (self._state or {}).get(name)

    def _is_up(self) -> bool:
        return self._now("sidecar") is not None

    def _take_over(self) -> None:
        if self._failure is not None:
            raise self._failure
        self.dsn, self.proxy, self.sidecar = self._now("dsn"), self._now("proxy"), self._now("sidecar")
        self.sidecar_pid, self.keeper_pid = self._now("sidecar_pid"), self._now("keeper_pid")

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _follow(self) -> None:
        """Stay connected to whoever keeps, and note what is said.

        What goes wrong before the first sidecar is final. Later it may pass (Postgres restarts, memory is
        short), and somebody's run hangs on it: it is tried again for a while.
        """
        in_vain, down_since, opened = 0, 0.0, False
        while self._failure is None:
            trouble: TwiceshyError | None = None
            try:
                reader = await self._connect()
                while line := await reader.readline():
                    await self._note(json.loads(line))
                    if self._is_up():
                        in_vain, down_since, opened = 0, 0.0, True
            except TwiceshyError as error:
                trouble = error
            except (ConnectionError, ValueError):
                pass
            except OSError as error:
                trouble = UsageError(f"{self.folder}: {error}")
            in_vain += 1
            if in_vain > 5 and trouble is None:
                said = state.tail(self.folder / "keeper.log")
                trouble = UsageError(f"the keeper of {self.folder} ends again and again; its log ends: {said}")
            down_since = down_since or time.monotonic()
            patient = opened and time.monotonic() - down_since < OPEN_WITHIN
            self._hang_up()
            async with self._news:
                self._failure = None if patient else trouble
                self._state = {"trouble": str(trouble)} if trouble else None
                self._news.notify_all()
            if trouble is not None and patient:
                await asyncio.sleep(PAUSE)

    async def _note(self, message: dict[str, Any]) -> None:
        if "error" in message:
            raise (DatabaseAway if message.get("kind") == "database" else UsageError)(message["error"])
        async with self._news:
            self._state = message
            self._news.notify_all()

    async def _connect(self) -> asyncio.StreamReader:
        end = time.monotonic() + OPEN_WITHIN
        while (connection := state.connect(self.folder / "keeper.sock")) is None:
            if time.monotonic() > end:
                raise UsageError(f"no keeper could be reached in {self.folder} (see keeper.log there)")
            await self._start()
        reader, self._writer = await asyncio.open_unix_connection(sock=connection, limit=1 << 20)
        self._writer.write(self._hello)
        return reader

    async def _start(self) -> None:
        """Start a keeper, or wait for the one that somebody else is starting. Raises UsageError."""
        log = state.open_log(self.folder / "keeper.log")
        try:
            # posix_spawn would do; what matters is the session of its own.
            process = subprocess.Popen(  # noqa: ASYNC220 - it returns at the exec
                [sys.executable, "-m", "runtime.keeper", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(),
                cwd=working_folder(),
                start_new_session=True,
            )
        finally:
            os.close(log)
        assert process.stdout is not None
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, process.stdout)
        try:
            said = await reader.read()
        finally:
            transport.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)  # it has closed its output: it is ending
        if process.returncode is not None and process.returncode > 0:  # one that was killed is tried again
            words = said.decode("utf-8", "replace").strip() or state.tail(self.folder / "keeper.log")
            raise UsageError(words or f"the keeper ended with {process.returncode}")
