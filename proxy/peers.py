"""Which process is at the other end of a loopback connection, from /proc (DESIGN §2).

A process that cannot be read (another host, user or container, a port forwarder) is None: never guess.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A process, told apart from a later one with its number by its start time (clock ticks since boot)."""

    pid: int
    group: int
    started: int

    def __str__(self) -> str:
        return f"{self.group}:{self.pid}:{self.started}"

    @classmethod
    def parse(cls, text: str) -> "Process":
        group, pid, started = (int(part) for part in text.split(":"))
        return cls(pid, group, started)


def read(pid: int) -> Process | None:
    """The living process *pid*, or None."""
    try:
        text = (_PROC / str(pid) / "stat").read_text("ascii", "replace")
    except OSError:
        return None
    # The command's name stands in parentheses and may hold anything, parentheses too.
    fields = text[text.rfind(")") + 2 :].split()
    if fields[0] in ("Z", "X"):
        return None
    return Process(pid, int(fields[2]), int(fields[19]))


def alive(process: Process) -> bool:
    """True while exactly this process lives."""
    return read(process.pid) == process


def group_alive(process: Process) -> bool:
    """True while any process of *process*'s group lives."""
    return any(other is not None and other.group == process.group for other in map(read, _pids()))


def at(client: tuple[str, int], server: tuple[str, int], first: tuple[int, ...] = ()) -> Process | None:
    """The process that holds the client's end of a TCP connection to *server*. *first*: pids to try first."""
    inode = _inode(client, server)
    if inode is None:
        return None
    wanted = f"socket:[{inode}]"
    seen = set(first)
    for pid in (*first, *(pid for pid in sorted(_pids(), reverse=True) if pid not in seen)):
        folder = f"/proc/{pid}/fd"
        try:
            for name in os.listdir(folder):
                try:
                    if os.readlink(f"{folder}/{name}") == wanted and pid != os.getpid():
                        return read(pid)
                except OSError:
                    continue
        except OSError:
            continue
    return None


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def _inode(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    for name in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / name).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            local, remote, inode = fields[1], fields[2], fields[9]
            if _port(local) == client[1] and _port(remote) == server[1] and _loopback(local) and inode != "0":
                return int(inode)
    return None


def _port(text: str) -> int:
    return int(text.rpartition(":")[2], 16)


_LOOPBACK = re.compile(r"(?:[0-9A-F]{6}7F|0{24}01000000|0{16}0000FFFF[0-9A-F]{6}7F):[0-9A-F]{4}\Z")


def _loopback(text: str) -> bool:
    return _LOOPBACK.match(text) is not None
