"""What the demo plays on: a scratch folder, programs in the background, and the means to kill them.

Whatever was started here, and whatever that started, is gone when the stage is left, however it is left
(but by SIGKILL: the sandbox ends then too, twiceshy's processes end when their run has).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from sandbox.client import PROJECT, Sandbox

#: How long the programs get to end by themselves before they are killed, in seconds.
GRACE = 20.0


class Program:
    """A program in the background, whose lines are passed on and kept."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], show: Callable[[str], None]) -> None:
        self.name = " ".join(command[:4])
        self.lines: list[str] = []
        self._show = show
        # A session of its own, without a terminal: Ctrl-C is for the demo, which then ends its programs.
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._show(self.lines[-1])

    def wait(self, timeout: float) -> int:
        """Its exit code, once it has ended and all it said was passed on."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code


class Stage:
    """Use as a context manager. ``folder`` is there for the time of the demo only."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="twiceshy-demo-"))
        self.folder.chmod(0o711)  # embedded Postgres of a root user is another user, and must get through
        self._programs: list[Program] = []
        self._sandboxes: list[Sandbox] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        before = [
            (each, signal.signal(each, signal.SIG_IGN)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        ]
        try:
            for program in self._programs:
                if program.process.poll() is None:
                    program.process.terminate()
            for sandbox in self._sandboxes:
                sandbox.stop()  # nobody waits for an answer that is held
            self._until(lambda: not any(self._ours()), GRACE)
            for pid in self._ours():
                kill(pid)
            self._until(lambda: not any(self._ours()), GRACE)
            for program in self._programs:
                program.wait(GRACE)
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            for each, handler in before:
                signal.signal(each, handler)

    def sandbox(self, name: str) -> Sandbox:
        """A fresh sandbox."""
        self._sandboxes.append(Sandbox.start(self.folder / f"{name}.log"))
        return self._sandboxes[-1]

    def start(self, command: Sequence[str], show: Callable[[str], None], **more: str) -> Program:
        """Start a program in an environment that holds no settings of the user's, but *more*."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("TWICESHY_") and name != "DATABASE_URL" and not name.lower().endswith("_proxy")
        }
        environment = {**kept, "DEMO_FOLDER": str(self.folder), **more}
        self._programs.append(Program(command, environment, show))
        return self._programs[-1]

    def _ours(self) -> Iterator[int]:
        """Every process that has our folder in its environment or command, but for this one."""
        needle = os.fsencode(self.folder)
        for pid in processes():
            if pid != os.getpid() and (needle in read(pid, "environ") or needle in read(pid, "cmdline")):
                yield pid

    def _until(self, condition: Callable[[], bool], timeout: float) -> bool:
        until = time.monotonic() + timeout
        while not (held := condition()) and time.monotonic() < until:
            time.sleep(0.02)
        return held

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until *condition* holds; TimeoutError when it does not come to that."""
        if not self._until(condition, GRACE):
            raise TimeoutError(f"it did not happen within {GRACE:.0f} s that {what}")

    def logs(self, lines: int = 8) -> Iterator[str]:
        """The last lines of what the programs logged, for when something went wrong."""
        for log in sorted(self.folder.glob("*/**/*.log")):
            yield f"{log.relative_to(self.folder)}:"
            yield from log.read_text("utf-8", "replace").splitlines()[-lines:]

    def running(self, mark: str, *words: str) -> list[int]:
        """The processes whose program got the arguments *words* (first), and *mark* in environment or arguments."""
        sought = b"".join(os.fsencode(word) + b"\0" for word in words)
        found = []
        for pid in processes():
            program, _, arguments = read(pid, "cmdline").partition(b"\0")
            if program and arguments.startswith(sought) and os.fsencode(mark) in read(pid, "environ") + arguments:
                found.append(pid)
        return found

    def find(self, mark: str, *words: str) -> int:
        """The one process that is ``running`` so."""
        found = self.running(mark, *words)
        if len(found) != 1:
            raise LookupError(f"{len(found)} processes with the arguments {' '.join(words)}")
        return found[0]


def processes() -> Iterator[int]:
    """All processes of the machine."""
    return (int(name.name) for name in Path("/proc").iterdir() if name.name.isdigit())


def read(pid: int, what: str) -> bytes:
    """A file of /proc about a process; empty when it is gone or not ours to read."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


def kill(pid: int) -> None:
    """SIGKILL: no handler, no goodbye."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
