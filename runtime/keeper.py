"""The keeper: parent of embedded Postgres, of the sidecars and of the API of one state folder.

    python -m runtime.keeper FOLDER       in the background, started by ``runtime.keeping``
    up(…)                                 in the foreground, for ``twiceshy up``

Rules:

* One per folder, by lock. It lives in a session of its own, so that Ctrl-C in the terminal that it was
  started from does not reach it, and ends when its last user has gone. A user is an open connection.
* What it starts dies with it, however it dies; whoever finds it dead starts another (``runtime.keeping``).
* One sidecar per set of rules and settings; all on the one database of the folder.
* A sidecar's death is no database restart, and Postgres' death no sidecar restart: each is started again
  alone, on the port that it had.
* ``up`` has precedence: it asks a background keeper to hand over, and none competes with it.

The wire, one JSON object per line. A client says ``{"version", "database", "settings", "command",
"environment"}``, and ``"api": {"command", "settings"}`` where it is there to stay (or ``{"hand_over": true}``), and
hears, now and at each change, ``{"dsn", "proxy", "sidecar", "keeper_pid", "sidecar_pid", "folder", "trouble"}``, with
``"sidecar": null`` while it is down; or ``{"error", "kind"}`` and the end of the connection.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime import folder as state
from runtime.embedded import Postgres
from runtime.errors import DatabaseAway, TwiceshyError, UsageError
from runtime.kept import Children, KeptSidecar, Wanted, say
from runtime.kept_api import KeptApi, WantedApi

#: Of the wire; another one means that two versions of twiceshy share a folder.
VERSION = 1
#: How long an unused sidecar, and an unused keeper, wait for somebody to come back.
GRACE = 1.0
#: How long a fresh keeper waits for the client that started it.
FIRST = 10.0
#: How long a start waits for a predecessor to drain and end.
SUCCESSION = 90.0
TRIM_EACH = 60.0


class Keeper:
    """One process' work. The lock is taken already."""

    def __init__(
        self, folder: Path, lock: state.Lock, *, own: Wanted | None = None, own_api: WantedApi | None = None
    ) -> None:
        self.folder = folder
        self.own = own  # of the foreground: needs no user
        self.own_api = own_api
        self.dsn = os.environ.get("DATABASE_URL") or ""
        self.identity = state.database_identity(self.dsn)
        self.postgres = None if self.dsn else Postgres(folder)
        self.error: dict[str, str] | None = None
        self._lock = lock
        self._children = Children()
        assert lock.fd is not None
        self._api = KeptApi(folder, self._children, lock.fd, own_api)
        self._sidecars: dict[str, KeptSidecar] = {}
        self._connections: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._started = asyncio.Event()
        self._ending = asyncio.Event()
        self._leaving: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, listening: Callable[[], object] = lambda: None) -> int:
        """Serve until the last user has gone. Returns the exit code: 0, or 2 when the start failed.

        *listening* is called as soon as users can connect, long before a sidecar runs.
        """
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, or & in a script
                loop.add_signal_handler(signum, self._ending.set)
        listener = state.listen(self.folder / "keeper.sock")
        server = await asyncio.start_unix_server(self._serve, sock=listener, limit=1 << 24)
        try:
            listening()
            try:
                await self._start()
            except TwiceshyError as error:
                kind = "database" if isinstance(error, DatabaseAway) else "usage"
                self.error = {"error": str(error), "kind": kind}
            except Exception as error:
                self.error = {"error": f"the keeper cannot start: {type(error).__name__}: {error}", "kind": "usage"}
            if self.error:
                say(self.error["error"])
            self._started.set()
            self._mind(FIRST)
            if self.own is not None and self.error is None:
                self._sidecar(self.own)
            if self.own is not None and self.own_api is not None and self.error is None:
                self._api.want(self.own_api, self.dsn, self.own.environment, after=0.0)
            if self.own is None or self.error is None:
                await self._ending.wait()
        finally:
            # From here on newcomers find nobody, start a successor, and that waits for the lock.
            (self.folder / "keeper.sock").unlink(missing_ok=True)
            server.close()
            await self._end()
            await self._hang_up()
        return 2 if self.error else 0

    async def _start(self) -> None:
        from runtime.database import migrate

        began = time.monotonic()
        if self.postgres is not None:
            # Blocks: nobody can be served before it, and the fork belongs in this thread.
            self.dsn = self.postgres.start()
            self._tasks.append(asyncio.create_task(self._keep_postgres(self.postgres)))
        applied = await migrate(self.dsn)
        say(f"started in {time.monotonic() - began:.2f} s on {self.identity} ({len(applied)} migrations applied)")
        self._tasks.append(asyncio.create_task(self._trim()))

    async def _keep_postgres(self, postgres: Postgres) -> None:
        """Start the server again when it dies alone; the sidecars repeat what they had to say to it."""
        died_young = 0
        while True:
            began = time.monotonic()
            status = await self._children.exited(postgres.poll)
            died_young = 0 if time.monotonic() - began > 10.0 else died_young + 1
            say(f"Postgres (pid {postgres.pid}) ended with {status}; starting it again")
            await asyncio.sleep(0.0 if died_young <= 1 else min(10.0, 0.1 * 2**died_young))
            try:
                postgres.spawn()
                while not postgres.ready():
                    await asyncio.sleep(0.02)
            except (TwiceshyError, OSError) as error:
                say(str(error))

    async def _trim(self) -> None:
        while True:
            await asyncio.sleep(TRIM_EACH)
            for name in ("keeper.log", "postgres.log"):
                state.trim_log(self.folder / name)
            self._api.trim()
            for sidecar in self._sidecars.values():
                sidecar.trim()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._sidecars:
            say("ending; exchanges get the time to finish")
        await asyncio.gather(self._api.end(), *(sidecar.end() for sidecar in self._sidecars.values()))
        if self.postgres is not None:
            self.postgres.stop()
        say("ended")

    async def _hang_up(self) -> None:
        """Let those who serve users come to their end: asyncio has words for each that is cancelled instead."""
        for writer in list(self._connections):
            writer.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=GRACE)

    # ---- users

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        self._connections.add(writer)
        self._mind(GRACE)
        sidecar: KeptSidecar | None = None
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), 10.0) or "null")
            if not isinstance(hello, dict):
                return  # only looked whether anybody is there
            if hello.get("hand_over"):
                say("asked to hand over")
                self._ending.set()
                return
            await self._started.wait()
            if self._ending.is_set():
                return  # they come back and find a successor
            if trouble := self._refusal(hello) or self.error:
                _tell(writer, trouble)
                return
            wanted = Wanted(hello["settings"], hello["command"], hello["environment"])
            if (api := hello.get("api")) is not None and (self.own is None or self.own_api is not None):
                self._api.want(WantedApi(api["command"], api["settings"]), self.dsn, wanted.environment)
            sidecar = self._sidecar(wanted)
            sidecar.users.add(writer)
            self._mind_sidecar(sidecar)
            self._changed(sidecar, only=writer)
            while await reader.read(4096):
                pass
        except (OSError, ValueError, KeyError, TimeoutError):
            pass  # a client that speaks otherwise, or is gone
        finally:
            if sidecar is not None:
                sidecar = self._sidecars.get(sidecar.wanted.hash, sidecar)  # it may have been followed by another
                sidecar.users.discard(writer)
                self._mind_sidecar(sidecar)
            self._connections.discard(writer)
            self._mind(GRACE)
            writer.close()

    def _refusal(self, hello: Mapping[str, Any]) -> dict[str, str] | None:
        if hello.get("version") != VERSION:
            words = "of another version of twiceshy serves"
        elif hello.get("database") != self.identity:
            words = "serves another database in"
        else:
            return None
        return {
            "error": f"the keeper (pid {os.getpid()}) {words} {self.folder}: let it end, or set another TWICESHY_HOME",
            "kind": "usage",
        }

    def _mind(self, patience: float) -> None:
        """End when nobody has been connected for *patience* seconds."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if not self._connections and self.own is None and self._started.is_set():
            self._leaving = asyncio.get_running_loop().call_later(patience, self._ending.set)

    # ---- sidecars

    def _sidecar(self, wanted: Wanted) -> KeptSidecar:
        sidecar = self._sidecars.get(wanted.hash)
        if sidecar is None:
            assert self._lock.fd is not None
            sidecar = KeptSidecar(self.folder, wanted, self.dsn, self._lock.fd, self._children, self._changed)
            self._sidecars[wanted.hash] = sidecar
        return sidecar

    def _mind_sidecar(self, sidecar: KeptSidecar) -> None:
        """End a sidecar that nobody uses, while others keep the keeper alive."""
        if sidecar.leaving is not None:
            sidecar.leaving.cancel()
            sidecar.leaving = None
        if not sidecar.users and sidecar.wanted is not self.own and not self._ending.is_set():
            sidecar.leaving = asyncio.get_running_loop().call_later(GRACE, self._dismiss, sidecar)

    def _dismiss(self, sidecar: KeptSidecar) -> None:
        if self._connections and not self._ending.is_set():  # else it ends with the keeper
            task = asyncio.create_task(self._let_go(sidecar))
            self._tasks.append(task)
            task.add_done_callback(self._tasks.remove)

    async def _let_go(self, sidecar: KeptSidecar) -> None:
        await sidecar.end()
        if sidecar.users:  # somebody came while it drained: a new one for them
            replacement = KeptSidecar(
                self.folder, sidecar.wanted, self.dsn, self._lock.fd or -1, self._children, self._changed
            )
            replacement.users = sidecar.users
            self._sidecars[sidecar.wanted.hash] = replacement
        else:
            self._forget(sidecar)

    def _forget(self, sidecar: KeptSidecar) -> None:
        """Whoever comes next gets another one. One that failed may have been followed already."""
        if self._sidecars.get(sidecar.wanted.hash) is sidecar:
            del self._sidecars[sidecar.wanted.hash]

    def _changed(self, sidecar: KeptSidecar, only: asyncio.StreamWriter | None = None) -> None:
        """Tell the users of *sidecar*, or one of them, how it is. Who comes while it ends waits for the next one."""
        running = None if sidecar.ending else sidecar.running
        message: dict[str, Any] = {
            "dsn": self.dsn,
            "proxy": running and running.address,
            "sidecar": running and running.id,
            "keeper_pid": os.getpid(),
            "sidecar_pid": running and running.pid,
            "folder": str(self.folder),
            "trouble": sidecar.trouble,
        }
        if sidecar.failed:
            message = {"error": sidecar.trouble, "kind": "database" if sidecar.away else "usage"}
            self._forget(sidecar)
        for writer in [only] if only is not None else list(sidecar.users):
            _tell(writer, message)
            if sidecar.failed:
                writer.close()
        if sidecar.wanted is self.own:
            if sidecar.failed:
                self.error = {"error": sidecar.trouble or "", "kind": "usage"}
                self._ending.set()
            elif running is not None:
                say(f"proxy on http://{running.address}, state in {self.folder}")


def _tell(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


# ---- the two ways to start


def up(
    settings: Mapping[str, Any],
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    host: str = "127.0.0.1",
    port: int = 7777,
    api: WantedApi | None = None,
) -> int:
    """Keep in the foreground until SIGINT or SIGTERM. Returns the exit code. Raises UsageError with words."""
    dsn = os.environ.get("DATABASE_URL") or None
    folder = state.state_folder(dsn)
    state.make_folder(folder)
    mine, lock = state.Lock(folder / "up.lock"), state.Lock(folder / "keeper.lock")
    if not mine.take():
        raise UsageError(f"twiceshy up is running already for {folder} (pid {mine.owner()})")
    try:
        # Asked before anything is ended for them. Held until they are bound.
        with _held(port, host, "--port"), _held(None if api is None else api.port, host, "--api-port"):
            if (other := state.connect(folder / "keeper.sock")) is not None:
                say(f"taking over from the keeper in the background (pid {lock.owner()})")
                other.setblocking(True)
                with contextlib.suppress(OSError):
                    other.sendall(b'{"hand_over": true}\n')
                    while other.recv(4096):
                        pass
                other.close()
            end = time.monotonic() + SUCCESSION
            while not lock.take():
                if time.monotonic() > end:
                    raise UsageError(f"the keeper in the background (pid {lock.owner()}) does not end")
                time.sleep(0.02)
            own = Wanted(settings, command, environment, host, port)
            return asyncio.run(_run(folder, lock, own, api))
    finally:
        lock.release()
        mine.release()


def _held(port: int | None, host: str, flag: str) -> contextlib.AbstractContextManager[object]:
    """Hold *port*; None: nothing. Raises UsageError."""
    if port is None:
        return contextlib.nullcontext()
    try:
        return state.hold_port(port, host)
    except OSError as error:
        raise UsageError(
            f"port {port} on {host}: {error.strerror}: end what listens there, or choose another with {flag}"
        ) from error


async def _run(
    folder: Path,
    lock: state.Lock,
    own: Wanted | None = None,
    api: WantedApi | None = None,
    listening: Callable[[], object] = lambda: None,
) -> int:
    return await Keeper(folder, lock, own=own, own_api=api).run(listening)


def _background(folder: Path, ready: int) -> int:
    """In the forked child. *ready* gets one byte when somebody, we or another, can be connected to."""
    lock, foreground = state.Lock(folder / "keeper.lock"), state.Lock(folder / "up.lock")
    end = time.monotonic() + SUCCESSION
    while foreground.held() or not lock.take():
        if (other := state.connect(folder / "keeper.sock")) is not None:
            other.close()
            os.write(ready, b"+")
            return 0
        if time.monotonic() > end:
            raise UsageError(f"the keeper (pid {lock.owner()}) of {folder} neither answers nor ends (see keeper.log)")
        time.sleep(0.02)
    if foreground.held():  # it came between the two looks
        lock.release()
        return _background(folder, ready)
    return asyncio.run(_run(folder, lock, listening=lambda: os.write(ready, b"+")))


def main() -> int:
    """Go into the background; the first process ends as soon as there is somebody to connect to."""
    folder = Path(sys.argv[1])
    reading, ready = os.pipe()
    if os.fork():
        # Nobody's child but init's: no zombie for whoever started us, and no death with their process group.
        os.close(ready)
        said = os.read(reading, 4096).decode("utf-8", "replace")
        if said != "+":
            print(said or f"the keeper did not start (see {folder / 'keeper.log'})")
            return 2
        return 0
    os.close(reading)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)  # who waits for the end of our output must not wait for our end
    try:
        return _background(folder, ready)
    except (TwiceshyError, OSError) as error:
        say(str(error))
        with contextlib.suppress(OSError):
            os.write(ready, str(error).encode())
        return 2


if __name__ == "__main__":
    sys.exit(main())
