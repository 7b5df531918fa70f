"""Where sidecars are forked: ``python -m tests.model.nursery SOCKET MEMORY`` (two file descriptors).

A sidecar here is a process of its own, so that SIGKILL and SIGSTOP are what they are; but it is forked from one that
has imported everything, so that it listens within milliseconds. Two things of it are in the test's hands, through
memory that both share: its monotonic clock, which can be set forward, and the fail point at which it stands still.
"""

import asyncio
import ctypes
import json
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CoroutineType
from typing import Any, Final, cast

from proxy.sidecar import serve
from runtime import failpoints
from runtime.settings import Settings
from tests.model.plants import PLANTS

log = logging.getLogger("nursery")

SIZE: Final = mmap.PAGESIZE
POINTS: Final = tuple(failpoints.POINTS)
#: What is where: by how many seconds clocks are ahead; from here on for each slot the armed point, a byte, and up to
#: which time all heartbeats that were due are done.
_AHEAD, _ARMED, _RESTED = 0, 64, 128
_PR_SET_PDEATHSIG = 1


class Memory:
    """What a test and its sidecars share."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE)

    @property
    def ahead(self) -> float:
        found: float = struct.unpack_from("d", self._map, _AHEAD)[0]
        return found

    @ahead.setter
    def ahead(self, seconds: float) -> None:
        struct.pack_into("d", self._map, _AHEAD, seconds)

    def armed(self, slot: int) -> str | None:
        """The point at which the sidecar of *slot* will stand still."""
        number = self._map[_ARMED + slot]
        return POINTS[number - 1] if number else None

    def arm(self, slot: int, point: str | None) -> None:
        self._map[_ARMED + slot] = 0 if point is None else POINTS.index(point) + 1

    def rested(self, slot: int) -> float:
        """How far ahead the clock was when the sidecar of *slot* last slept with no heartbeat due."""
        found: float = struct.unpack_from("d", self._map, _RESTED + 8 * slot)[0]
        return found

    def rest(self, slot: int, ahead: float) -> None:
        struct.pack_into("d", self._map, _RESTED + 8 * slot, ahead)


class Points:
    """In the place of ``failpoints.Armed``: can be armed at any time, and stands still once."""

    def __init__(self, memory: Memory, slot: int) -> None:
        self._memory = memory
        self._slot = slot

    @property
    def name(self) -> str | None:
        return self._memory.armed(self._slot)

    def reach(self, name: str) -> None:
        if name == self.name:
            self._memory.arm(self._slot, None)
            os.kill(os.getpid(), signal.SIGSTOP)


def _live(order: dict[str, Any], memory: Memory) -> None:
    """Be a sidecar."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s: %(message)s", stream=sys.stderr)
    clock: Callable[[], float] = time.monotonic
    time.monotonic = lambda: clock() + memory.ahead  # the event loop asks it by this name, too
    failpoints._armed = cast(failpoints.Armed, Points(memory, order["slot"]))
    if order["plant"] is not None:
        PLANTS[order["plant"]].in_sidecar()
    folder = Path(order["folder"])

    async def work() -> None:
        awake = asyncio.Event()
        # When the clock was set forward, whoever sleeps must look at it again.
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, awake.set)
        watching = asyncio.create_task(_say_when_rested(memory, order["slot"], awake))
        settings = Settings.model_validate(order["settings"])
        await serve(settings, order["dsn"], folder, folder, "127.0.0.1", order["port"])
        watching.cancel()

    asyncio.run(work())


async def _say_when_rested(memory: Memory, slot: int, awake: asyncio.Event) -> None:
    while True:
        await awake.wait()
        awake.clear()
        ahead = memory.ahead
        while not await _rests():
            await asyncio.sleep(0)
        memory.rest(slot, ahead)


async def _rests() -> bool:
    """The heartbeat sleeps, and would have got up by now if it were due."""
    for _ in range(5):
        await asyncio.sleep(0)
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    [beating] = [each for each in coroutines if isinstance(each, CoroutineType) and each.__name__ == "_beat"]
    return getattr(beating.cr_await, "__name__", None) == "sleep"


def main() -> None:
    """Fork whatever is ordered, until nobody orders any more."""
    orders, memory = socket.socket(fileno=int(sys.argv[1])), Memory(int(sys.argv[2]))
    prctl = ctypes.CDLL(None).prctl
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is nobody's zombie
    while True:
        text, fds, *_ = socket.recv_fds(orders, 1 << 16, 2)
        if not text:
            return
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                orders.close()
                os.dup2(fds[0], 1)
                os.dup2(fds[1], 2)
                _live(json.loads(text), memory)
                status = 0
            except BaseException:
                log.exception("it ended")
            finally:
                os._exit(status)
        for fd in fds:
            os.close(fd)
        orders.sendall(b"%d\n" % pid)


if __name__ == "__main__":
    main()
