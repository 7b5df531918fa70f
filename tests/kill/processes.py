"""What the keeper's tests share: a sidecar's stand-in, and a view of real processes."""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from runtime import folder as state
from runtime.keeping import Keeping
from runtime.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
STANDIN = [sys.executable, str(Path(__file__).with_name("standin.py"))]
SOON = 30.0


@asynccontextmanager
async def kept_open(*words: str, **settings: Any) -> AsyncIterator[Keeping]:
    async with await Keeping.open(Settings.model_validate(settings), [*STANDIN, *words]) as keeping:
        yield keeping


async def until(what: Callable[[], Any]) -> None:
    """Wait for a condition, bounded."""
    end = time.monotonic() + SOON
    while not what():
        assert time.monotonic() < end, "it did not come to be"
        await asyncio.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def changed(keeping: Keeping) -> None:
    await asyncio.wait_for(keeping.changed(), SOON)


async def asked(keeping: Keeping) -> dict[str, Any]:
    """What the sidecar knows of itself."""
    reader, writer = await asyncio.open_connection(*keeping.proxy.split(":"))
    said: dict[str, Any] = json.loads(await reader.read())
    writer.close()
    return said


def below(folder: Path) -> list[int]:
    """The processes that name *folder* in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            pid = int(path.parent.name)
            if bytes(folder) in path.read_bytes() and pid != os.getpid() and lives(pid):
                found.append(pid)
    return found


async def everything_ended(folder: Path) -> None:
    await until(lambda: not state.Lock(folder / "keeper.lock").held())
    await until(lambda: not below(folder))


def postgres_pid(home: Path) -> int:
    return int((home / "postgres" / "data" / "postmaster.pid").read_text().splitlines()[0])


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
