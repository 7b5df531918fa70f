"""The holder: keeps a sidecar running for as long as a shell lives. ``python -m proxy.holder PID``.

``eval "$(twiceshy env)"`` ends at once, and with it the connection that keeps the sidecar alive. So a process
of its own, in a session of its own, holds one until the calling shell has gone. Its settings come as JSON on
standard input; it says ``held`` on standard output when a sidecar listens, and nothing after that.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from runtime.errors import TwiceshyError, UsageError
from runtime.folder import Lock, make_folder
from runtime.keeping import Keeping, settings_as_values
from runtime.kept import working_folder
from runtime.settings import Settings


def calling_shell() -> int:
    """The pid of the shell that started us. Not its subshell, which ``$(…)`` may be, and which ends with us.

    Nor whatever it started us by (``uv run``, ``timeout``).
    """
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1 and (parent := _parent(pid)) > 1 and (_is_alike(pid, parent) or _passes_on(pid)):
            pid = parent
    return pid


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def _is_alike(pid: int, parent: int) -> bool:
    """*pid* is a fork of *parent*: a shell that was started anew was given another SHLVL."""
    return _program(pid) == _program(parent)


def _program(pid: int) -> tuple[str, bytes, bytes]:
    folder = Path(f"/proc/{pid}")
    return str((folder / "exe").readlink()), (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()


def _passes_on(pid: int) -> bool:
    """The command line of *pid* ends with ours: ``uv run twiceshy env``, or ``sh -c 'twiceshy env'``."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "surrogateescape").rstrip("\0").split("\0")
    before, found, after = " ".join(words).rpartition(" ".join(["twiceshy", *sys.argv[1:]]))
    return bool(found) and not after and before[-1:] in ("", " ", "/")


@asynccontextmanager
async def held(settings: Settings, sidecar: Sequence[str]) -> AsyncIterator[Keeping]:
    """A sidecar that goes on when we have ended, until the calling shell has."""
    async with await Keeping.open(settings, sidecar) as keeping:
        yield keeping
        shell = calling_shell()
        if not _lock(keeping, shell).held():
            await asyncio.to_thread(_leave, shell, settings)


def _lock(keeping: Keeping, shell: int) -> Lock:
    """Whoever has it holds *keeping* for *shell*: one is enough, and each takes its memory."""
    make_folder(keeping.folder / "shells")
    return Lock(keeping.folder / "shells" / f"{shell}.lock")


def _leave(shell: int, settings: Settings) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "proxy.holder", str(shell)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=working_folder(),
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(settings_as_values(settings)).encode())
    with process.stdout:
        said = process.stdout.readline().decode()
    if said.strip() != "held":
        raise UsageError(said.strip() or "no process could be left behind to keep the sidecar running")


async def _hold(shell: int, settings: Settings) -> None:
    from proxy.cli import SIDECAR

    gone = asyncio.Event()
    try:
        life = os.pidfd_open(shell)
    except ProcessLookupError:
        return
    asyncio.get_running_loop().add_reader(life, gone.set)  # readable when the process has ended
    async with await Keeping.open(settings, SIDECAR) as keeping:
        lock = _lock(keeping, shell)
        alone = lock.take()
        print("held", flush=True)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        waiting = asyncio.create_task(gone.wait())
        while alone and not gone.is_set():
            changing = asyncio.create_task(keeping.changed())
            await asyncio.wait({waiting, changing}, return_when=asyncio.FIRST_COMPLETED)
            changing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await changing
        if alone:
            lock.path.unlink(missing_ok=True)


def main() -> int:
    """Hold until the process named has ended."""
    try:
        settings = Settings.model_validate(json.load(sys.stdin))
        asyncio.run(_hold(int(sys.argv[1]), settings))
    except TwiceshyError as error:
        print(error, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
