"""What stands between the machine and real things: Postgres, sidecars, their clock, the upstream, the agents' sockets.

Everything asynchronous lives in one event loop, in a thread of its own; the test's thread gives orders and waits for
what follows. Time is the test's: it passes when it is told to, for the database and for every sidecar alike, and a
sidecar that could renew its lease meanwhile has done so before it goes on. So a lease never ends by accident.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

import asyncpg

from runtime.database import Connection
from tests.model.gate import Gate
from tests.model.judge import RULES, Judge
from tests.model.nursery import SIZE, Memory
from tests.model.plants import PLANTS
from tests.stack import PROJECT

T = TypeVar("T")

LEASE = 30.0
#: Bounds a wait for what must follow.
PATIENCE = 20.0
NAMES = ("north", "south")
#: How often a sidecar is started that does not live to listen.
_TRIES = 3
SETTINGS = {"lease": LEASE, "poll": 0.02, "resend": 1, "drain": 0.5, "route": RULES}
_CLOCK = """
CREATE TABLE public.clock (ahead float8 NOT NULL);
INSERT INTO public.clock VALUES (0);
CREATE OR REPLACE FUNCTION twiceshy.now() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
    SELECT clock_timestamp() + make_interval(secs => c.ahead) FROM public.clock c
$$;
"""


class World:
    """Everything, for as many examples as there are. *plant*: the name of a bug, see ``tests.model.plants``."""

    def __init__(self, dsn: str, folder: Path, *, plant: str | None = None) -> None:
        self.dsn = dsn
        self.folder = folder
        self.plant = plant
        self.broken = ""  # how a promise was broken last, and after what
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="the world", daemon=True)
        self._news = threading.Event()
        self._runs = 0

    def __enter__(self) -> Self:
        fd = os.memfd_create("model")
        os.ftruncate(fd, SIZE)
        self.memory = Memory(fd)
        self.orders, theirs = socket.socketpair()
        self.pids = self.orders.makefile()
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "tests.model.nursery", str(theirs.fileno()), str(fd)],
            cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)}, pass_fds=(theirs.fileno(), fd),
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        os.close(fd)
        self._thread.start()
        self.judge = Judge(self.dsn, self.now, self.tell)
        self.gates = {name: Gate(self.dsn) for name in NAMES}
        self._connection = self.do(self._begin())
        self.sidecars = {name: Sidecar(self, name, slot) for slot, name in enumerate(NAMES)}
        return self

    async def _begin(self) -> Connection:
        connection = await asyncpg.connect(self.dsn)
        await connection.execute(_CLOCK)
        if self.plant is not None:
            await PLANTS[self.plant].in_database(connection)
        await self.judge.start()
        for gate in self.gates.values():
            await gate.start()
        return connection

    def __exit__(self, *_: object) -> None:
        for sidecar in self.sidecars.values():
            sidecar.kill()
        self.pids.close()
        self.orders.close()
        self._nursery.wait()
        self.do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for gate in self.gates.values():
            await gate.close()
        await self.judge.close()
        await self._connection.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def begin_example(self) -> None:
        """Nothing of the last one is left but rows."""
        for sidecar in self.sidecars.values():
            sidecar.kill()
        self.run(self.judge.forget)
        for gate in self.gates.values():
            self.run(gate.let_in)

    def new_run(self) -> str:
        """A run id that no other example has."""
        self._runs += 1
        return f"r{self._runs}"

    # ---- the event loop

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of *work*, which is done in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE * 2)

    def run(self, what: Callable[[], T]) -> T:
        """The result of *what*, which is called in the loop."""

        async def work() -> T:
            return what()

        return self.do(work())

    def verb(self, what: Callable[[Connection], Awaitable[T]]) -> T:
        """What people and launchers do with the database, which is never away for them."""

        async def work() -> T:
            return await what(self._connection)

        return self.do(work())

    def fetch(self, statement: str, *arguments: Any) -> list[Any]:
        return list(self.verb(lambda connection: connection.fetch(statement, *arguments)))

    def tell(self) -> None:
        """There is news: whoever waits looks again."""
        self._news.set()

    def wait(self, happened: Callable[[], Any], seconds: float = PATIENCE, *, look: float = 0.02) -> bool:
        """Wait until *happened*, which is asked at each news, and each *look* seconds besides. False: it did not."""
        end = time.monotonic() + seconds
        while True:
            self._news.clear()
            if happened():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._news.wait(min(left, look))

    # ---- time

    def now(self) -> float:
        """Seconds, for everybody but a database or sidecar that looks later."""
        return time.monotonic() + self.memory.ahead

    def skip(self, seconds: float) -> None:
        """Let a moment pass, less than anybody's lease."""
        # The sidecars' clocks first: none may believe in its lease longer than the database does.
        self.memory.ahead += seconds
        self.fetch("UPDATE public.clock SET ahead = $1", self.memory.ahead)
        for sidecar in self.sidecars.values():
            sidecar.wake()

    def pass_time(self, seconds: float) -> None:
        """Let time pass. Sidecars that can beat meanwhile do."""
        while seconds > 0:
            self.skip(min(seconds, LEASE / 3))
            seconds -= LEASE / 3
            for sidecar in self.sidecars.values():
                sidecar.beaten()


class Sidecar:
    """One place where a sidecar process runs: its folder, its port, its gate to the database."""

    def __init__(self, world: World, name: str, slot: int) -> None:
        self.name = name
        self.slot = slot
        self.port = 0
        self.pid = 0  # of the process that runs, 0: none
        self.id = ""
        self._world = world
        self._life = -1
        self.folder = world.folder / name
        self.folder.mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        how = "dead" if not self.pid else "stands still" if self.still() else "runs"
        return f"{self.name} {how}{'' if self.gate.is_open else ', cut off'}"

    @property
    def gate(self) -> Gate:
        return self._world.gates[self.name]

    @property
    def works(self) -> bool:
        """It runs, and reaches its database."""
        return bool(self.pid) and not self.still() and self.gate.is_open

    def start(self) -> None:
        """A new process. Whoever starts it knows that the one before is dead, and tries again if it does not start."""
        assert not self.pid
        assert self.gate.is_open
        self._world.memory.arm(self.slot, None)
        for _ in range(_TRIES):
            if ready := self._fork():
                self.id, self.port = ready["id"], ready["port"]
                return
            self.kill()
        raise AssertionError(f"{self.name} does not start: {(self.folder / 'log').read_text()[-3000:]}")

    def _fork(self) -> dict[str, Any] | None:
        """What the new process says of itself; None: it ended."""
        order = {
            "dsn": self.gate.dsn, "folder": str(self.folder), "port": self.port, "slot": self.slot,
            "settings": SETTINGS, "plant": self._world.plant,
        }  # fmt: skip
        reading, writing = os.pipe()
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        socket.send_fds(self._world.orders, [json.dumps(order).encode()], [writing, log])
        os.close(writing)
        os.close(log)
        self.pid = int(self._world.pids.readline())
        self._life = os.pidfd_open(self.pid)
        with os.fdopen(reading) as file:
            line = file.readline()
        return json.loads(line) if line else None

    def kill(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            assert select.select([self._life], [], [], PATIENCE)[0]
            os.close(self._life)
            self.pid = 0

    def ended(self) -> str | None:
        """Its last words, if it ended by itself."""
        if not self.pid or not select.select([self._life], [], [], 0)[0]:
            return None
        return (self.folder / "log").read_text()[-3000:]

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def still(self) -> bool:
        """It stands still, where it was told to or anywhere."""
        try:
            return bool(self.pid) and self._state() == "T"
        except OSError:
            return False  # it has ended

    def arm(self, point: str | None) -> None:
        """It will stand still at *point*."""
        self._world.memory.arm(self.slot, point)

    def pause(self) -> None:
        """It stands still now."""
        os.kill(self.pid, signal.SIGSTOP)
        assert self._world.wait(self.still, look=0.001)

    def resume(self) -> None:
        self._world.memory.arm(self.slot, None)
        os.kill(self.pid, signal.SIGCONT)
        self.wake()

    def wake(self) -> None:
        """The clock was set forward: look at it."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR2)

    def beaten(self) -> None:
        """If it can renew its lease it has done so."""
        if self.works:
            memory = self._world.memory
            assert self._world.wait(lambda: memory.rested(self.slot) == memory.ahead or not self.works, look=0.001), (
                f"{self}: no heartbeat"
            )
