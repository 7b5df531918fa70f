"""Follows an agent's processes and notes every address that they connect to. Shell.

* ``/proc`` is looked at each ``BEAT``: the sockets of all processes below the guardian, with the addresses that they
  are connected to. What is over within a beat is missed.
* ``strace``, where it is there and may trace, tells of each call besides: nothing is missed but what makes no calls.
* What Python and Node write down themselves (``TWICESHY_DOCTOR``) names the code that connected.

What is seen is judged in ``sightings``, ``causes`` and ``diagnosis``.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from runtime.launch import guardian
from runtime.launch.causes import LOADED, Evidence, Process, Told, told
from runtime.launch.diagnosis import Connection
from runtime.launch.sightings import CALLS, Address, Allowed, Kind, Socket, Trace, Transport, kind, table

#: Between two looks at /proc, in seconds.
BEAT = 0.02
#: How long strace may take to show that it works, in seconds.
TRIAL = 10.0
#: The agent stays its guardian's child (-D), stops only where it calls what is traced (--seccomp-bpf), and of what is
#: sent no more than a byte is looked at (-s 1).
OPTIONS = ("-D", "-f", "--seccomp-bpf", "-qq", "-yy", "-s", "1", "-e", "signal=none", "-e", f"trace={CALLS}")
#: The most distinct connections that are remembered; an agent that makes more is not understood better by them.
MOST = 10_000


def tracer() -> tuple[str | None, str]:
    """The path of a strace that works here, or None and why not. Blocking."""
    path = shutil.which("strace")
    if path is None:
        return None, "strace is not installed"
    with tempfile.TemporaryDirectory(prefix="twiceshy-") as folder:
        out = Path(folder) / "trial"
        try:
            tried = subprocess.run(
                [path, *OPTIONS, "-o", str(out), "--", "/bin/sh", "-c", ":"], stdin=subprocess.DEVNULL,
                capture_output=True, timeout=TRIAL, check=False,
            )  # fmt: skip
            if tried.returncode == 0 and "execve(" in out.read_text("utf-8", "replace"):
                return path, ""
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"strace does not work here: {error}"
    said = tried.stderr.decode("utf-8", "replace").strip().splitlines()
    return None, f"strace may not trace here{': ' + said[-1] if said else ''}"


@dataclass(slots=True)
class _Noted:
    """What one process did with one address."""

    kind: Kind | None
    process: Process
    calls: int = 0
    outcome: str = ""
    sockets: set[int] = field(default_factory=set)


class Watcher:
    """Watches one agent. Use as a context manager; it lives in a thread from ``begin`` to ``end``."""

    def __init__(
        self, given: Mapping[str, str], sidecar: Address, permitted: Sequence[Allowed], strace: str | None,
        say: Callable[[Connection], None],
    ) -> None:  # fmt: skip
        """*given*: what the environment of every process must hold. *say*: told of each connection past the sidecar."""
        self._given = given
        self._sidecars = {sidecar}
        self._permitted = permitted
        self._strace = strace
        self._tracing = None if strace is None else os.path.realpath(strace)
        self._say = say
        self._folder = tempfile.TemporaryDirectory(prefix="twiceshy-")
        self._trace = Trace()
        self._files: list[IO[str] | None] = [None, None]
        self._rest = ["", ""]
        self._group = 0
        self._processes: dict[int, Process] = {}
        self._noted: dict[tuple[int, Transport, Address], _Noted] = {}
        self._told: list[Told] = []
        self._listeners: set[Address] = set()
        self._datagrams: set[tuple[int, Address]] = set()  # sockets that were connected so a beat ago
        self._owners: dict[int, int] = {}  # connected socket -> the process that was first seen with it
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)
        #: Processes whose sockets may not be looked at.
        self.unseen: dict[int, str] = {}
        #: More connections were made than are remembered.
        self.overflowed = False
        #: Why the watching ended before the agent did; empty: it did not.
        self.failure = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for file in self._files:
            if file is not None:
                file.close()
        self._folder.cleanup()

    # ---- as ``runtime.launch.attempt.Watch``

    @property
    def environment(self) -> Mapping[str, str]:
        return {"TWICESHY_DOCTOR": str(self._path("told"))}

    def command(self, command: Sequence[str]) -> Sequence[str]:
        """*command*, under strace where that is."""
        if self._strace is None:
            return command
        return [self._strace, *OPTIONS, "-o", str(self._path("trace")), "--", *command]

    def begin(self, group: int) -> None:
        """Watch the processes below the guardian *group*."""
        self._group = group
        self._thread.start()

    def end(self) -> None:
        """The agent is gone: look a last time."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    # ---- what was seen

    @property
    def how(self) -> str:
        """By what it is watched."""
        return "looking at /proc" if self._strace is None else "strace, and by looking at /proc"

    def connections(self) -> list[Connection]:
        """Everything, with what the processes told of it themselves. Once ``end`` has returned."""
        for (_, transport, to), noted in self._noted.items():
            noted.kind = self._kind(transport, to)  # somebody may have listened there a moment later only
        return [
            each
            for (pid, transport, to), noted in self._noted.items()
            if noted.kind is not None
            for each in self._seen(pid, transport, to, noted)
        ]

    def _seen(self, pid: int, transport: Transport, to: Address, noted: _Noted) -> list[Connection]:
        """One for each place in the program's source, and one for what it did not tell of."""
        assert noted.kind is not None
        places: dict[object, list[Told]] = {}
        for each in self._told:
            if transport is Transport.TCP and each.fits(pid, to):
                places.setdefault(Evidence(noted.process, to, self._given, each.frames).caller, []).append(each)
        found = [
            (group[0].frames, len(group), next((e.name for e in group if e.name), "")) for group in places.values()
        ]
        untold = max(noted.calls, len(noted.sockets)) - sum(count for _, count, _ in found)
        if untold > 0 or not found:
            found.append(((), max(untold, 1), ""))
        return [
            Connection(
                noted.kind, transport, Evidence(noted.process, to, self._given, frames), count, noted.outcome, name
            )
            for frames, count, name in found
        ]

    # ---- how

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def _watch(self) -> None:
        try:
            pause = BEAT
            while not self._over.wait(pause):
                begun = time.monotonic()
                self._look()
                pause = max(BEAT, 2 * (time.monotonic() - begun))  # the processor is the agent's
            self._look()
        except Exception as error:  # it must be known that not all was seen
            self.failure = repr(error)

    def _look(self) -> None:
        living = [pid for pid in guardian.below(self._group, self._group) if self._is_the_agents(pid)]
        fresh = [each for line in self._lines(0, "told") if (each := told(line)) is not None]
        self._told += fresh[: MOST - len(self._told)]
        self._look_at_tables(living)
        for each in fresh:
            if (to := each.to) is not None:
                self._note(each.pid, Transport.TCP, to)
        if self._strace is not None:
            for line in self._lines(1, "trace"):
                for called in self._trace.read(line):
                    pid = _process_of(called.thread) or self._trace.process(called.thread)
                    self._note(pid, called.transport, called.address, traced=True, outcome=called.outcome)
            self._listeners |= self._trace.listeners

    def _is_the_agents(self, pid: int) -> bool:
        """Whether *pid* is a process of the agent, and not strace; it is read anew when it runs another program."""
        try:
            program = os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
        except OSError:
            program = self._processes[pid].program if pid in self._processes else ""
        if program and program == self._tracing:
            return False
        if pid not in self._processes or self._processes[pid].program != program:
            self._processes[pid] = self._read(pid, program)
        return True

    def _read(self, pid: int, program: str) -> Process:
        words = _file(pid, "cmdline").rstrip(b"\0").split(b"\0")
        known = None
        if held := _file(pid, "environ"):
            pairs = (each.decode("utf-8", "surrogateescape").partition("=") for each in held.split(b"\0"))
            known = {name: value for name, _, value in pairs if name in self._given}
        loaded = _file(pid, "maps").decode("utf-8", "replace")
        libraries = frozenset(name for name, mark in LOADED.items() if mark in loaded)
        return Process(pid, program, tuple(each.decode("utf-8", "replace") for each in words if each), known, libraries)

    def _look_at_tables(self, living: list[int]) -> None:
        spaces: dict[str, dict[int, set[int]]] = {}  # network namespace -> process -> its sockets
        for pid in living:
            with contextlib.suppress(OSError):
                if inodes := self._sockets(pid):
                    spaces.setdefault(os.readlink(f"/proc/{pid}/ns/net"), {})[pid] = inodes
        before, self._datagrams = self._datagrams, set()
        for owners in spaces.values():
            wanted = set[int]().union(*owners.values())
            streams, packets = (_table(next(iter(owners)), each, wanted) for each in Transport)
            self._listeners |= {each.local for each in streams.values() if each.listening}
            ports = {each.port for each in self._listeners}
            for pid, inodes in owners.items():
                for inode in inodes & streams.keys():
                    if self._owners.setdefault(inode, pid) != pid:
                        continue  # it was inherited: between fork and exec every child has all that its parent has
                    to = streams[inode].remote
                    if to is not None and streams[inode].local.port not in ports:  # else it came from there
                        self._note(pid, Transport.TCP, to, inode=inode)
                for inode in inodes & packets.keys():
                    to = packets[inode].remote
                    if to is not None:
                        self._datagrams.add((inode, to))
                        # To sort addresses the C library connects sockets that it never sends by, for a moment.
                        if (inode, to) in before:
                            self._note(pid, Transport.UDP, to, inode=inode)

    def _sockets(self, pid: int) -> set[int]:
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except PermissionError:
            self.unseen[pid] = self._processes[pid].command
            return set()
        except OSError:
            return set()
        found = set()
        for each in descriptors:
            with contextlib.suppress(OSError, ValueError):
                target = os.readlink(f"/proc/{pid}/fd/{each}")
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
        return found

    def _note(
        self, pid: int, transport: Transport, to: Address, *, inode: int = 0, traced: bool = False, outcome: str = ""
    ) -> None:
        key = (pid, transport, to)
        noted = self._noted.get(key)
        if noted is None:
            what = self._kind(transport, to)
            if what is None:
                return
            if len(self._noted) >= MOST:
                self.overflowed = True
                return
            noted = self._noted[key] = _Noted(what, self._known(pid), outcome=outcome)
            if what in (Kind.PAST, Kind.QUIC):
                self._say(self._seen(pid, transport, to, noted)[0])
        if inode:
            noted.sockets.add(inode)
        if traced:
            noted.calls += 1
            noted.outcome = noted.outcome and outcome  # one that came through counts for all

    def _kind(self, transport: Transport, to: Address) -> Kind | None:
        return kind(transport, to, sidecars=self._sidecars, listeners=self._listeners, permitted=self._permitted)

    def _known(self, pid: int) -> Process:
        """*pid* as it is now, or was when it was last seen."""
        known = self._processes.get(pid, Process(pid, self._trace.programs.get(pid, "")))
        fresh = self._read(pid, known.program)
        if fresh.words:
            self._processes[pid] = known = fresh
        return known

    def _lines(self, number: int, name: str) -> Iterator[str]:
        """The whole lines that were appended to a file since the last time."""
        if self._files[number] is None:
            with contextlib.suppress(FileNotFoundError):
                self._files[number] = self._path(name).open(encoding="utf-8", errors="replace")
        file = self._files[number]
        while file is not None and (text := file.read(1 << 20)):
            *lines, self._rest[number] = (self._rest[number] + text).split("\n")
            yield from lines


def _file(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _table(pid: int, transport: Transport, inodes: set[int]) -> dict[int, Socket]:
    texts = (_file(pid, f"net/{transport}{family}").decode("ascii", "replace") for family in ("", "6"))
    return {each.inode: each for text in texts for each in table(text, inodes)}


def _process_of(thread: int) -> int:
    """The process that a living thread belongs to; 0 when it is gone."""
    for line in _file(thread, "status").splitlines():
        if line.startswith(b"Tgid:"):
            return int(line.split()[1])
    return 0
