"""Which process is at the other end of a connection from this host, from /proc (DESIGN §2).

A process that cannot be read (another host, user or container, a port forwarder) is None: never guess.
"""

import contextlib
import errno
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_PROC = Path("/proc")
_TEXT = re.compile(r"(\d+):(\d+):(\d+):(\S+)\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Process:
    """A process, told apart from a later one with its number by its start time (clock ticks since boot).

    ``world``: in which numbers and times mean anything, see ``world()``.
    """

    pid: int
    group: int
    started: int
    world: str

    def __str__(self) -> str:
        return f"{self.group}:{self.pid}:{self.started}:{self.world}"

    @classmethod
    def parse(cls, text: str) -> "Process | None":
        """What ``str`` made of a process; None for anything else."""
        found = _TEXT.match(text)
        return None if found is None else cls(int(found[2]), int(found[1]), int(found[3]), found[4])


@cache
def world() -> str:
    """This boot of this kernel, and our namespace of process numbers: others count from one again."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot}/{(_PROC / 'self/ns/pid').stat().st_ino}"


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
    return Process(pid, int(fields[2]), int(fields[19]), world())


def alive(process: Process) -> bool:
    """True while exactly this process lives."""
    return read(process.pid) == process


def same_group(first: Process, later: Process) -> bool:
    """True if *later*, which lives, is of the group that *first* is or was of.

    A group's number is given to another group when the last of its processes is gone. The leader of that one
    is younger than *first*.
    """
    if (first.world, first.group) != (later.world, later.group):
        return False
    leader = read(first.group)
    return leader is None or leader.group != first.group or leader.started <= first.started


def group_alive(first: Process) -> bool:
    """True while any process of *first*'s group lives."""
    try:
        os.killpg(first.group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    # There is one of that number, if only a zombie. To look at all processes takes milliseconds.
    return alive(first) or bool(members(first))


def members(first: Process) -> list[Process]:
    """The living processes of *first*'s group."""
    found = [other for other in map(read, _pids()) if other is not None and other.group == first.group]
    return found if found and same_group(first, found[0]) else []


def used(first: Process) -> float:
    """Seconds of processor time that the living processes of *first*'s group have taken, with their ended children."""
    ticks = 0
    for process in members(first):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = (_PROC / str(process.pid) / "stat").read_text("ascii", "replace")
            ticks += sum(map(int, text[text.rfind(")") + 2 :].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def runs(first: Process) -> bool:
    """Whether any thread of *first*'s group has, or waits for, a processor at this moment."""
    for process in members(first):
        for stat in (_PROC / str(process.pid) / "task").glob("*/stat"):
            with contextlib.suppress(OSError):
                text = stat.read_text("ascii", "replace")
                if text[text.rfind(")") + 2 :].startswith("R"):
                    return True
    return False


def name(process: Process) -> str:
    """What its program is called, for people."""
    try:
        return (_PROC / str(process.pid) / "comm").read_text("utf-8", "replace").strip()
    except OSError:
        return "?"


def at(client: tuple[str, int], server: tuple[str, int], first: tuple[int, ...] = ()) -> Process | None:
    """The process that holds the client's end of a TCP connection to *server*. *first*: pids to try first."""
    inode = _inode(_end(*client), _end(*server))
    if inode is None:
        return None
    wanted = f"socket:[{inode}]"
    for pid in _candidates(first):
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for fd in os.listdir(folder):
                with contextlib.suppress(OSError):
                    if os.readlink(f"{folder}/{fd}") == wanted:
                        return read(pid)
    return None


def _candidates(first: tuple[int, ...]) -> Iterator[int]:
    """The *first* ones, then all others, the newest numbers first; never we ourselves."""
    tried = {os.getpid(), *first}
    yield from first
    yield from (pid for pid in sorted(_pids(), reverse=True) if pid not in tried)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir(_PROC) if entry.isdigit()]


# ---- the kernel's table of connections

_End = tuple[IPv4Address | IPv6Address, int]
#: Of <linux/sock_diag.h>, <linux/inet_diag.h>: the exact connection, in 0.02 ms. To read /proc/net/tcp takes 16 ms.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _NLMSG_ERROR = 4, 20, 1, 2
_HEADER = struct.Struct("=IHHII")
_ANY = 0xFFFFFFFF
_TCP_LISTEN = 10


def _end(host: str, port: int) -> _End:
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address, port


def _inode(client: _End, server: _End) -> int | None:
    """The socket whose own end is *client* and whose other one is *server*; None: there is none on this host.

    Whole addresses are compared: another host's client may well have the port number of one of ours.
    """
    try:
        return _asked(client, server)
    except OSError:
        return _listed(client, server)


def _asked(client: _End, server: _End) -> int | None:
    """Ask the kernel. Raises OSError where that is not to be had."""
    family = socket.AF_INET if client[0].version == 4 else socket.AF_INET6
    ends = struct.pack("!HH16s16s", client[1], server[1], client[0].packed, server[0].packed)
    question = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _ANY) + ends + struct.pack("=III", 0, _ANY, _ANY)
    header = _HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(header + question)
        answer = kernel.recv(8192)
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind == _NLMSG_ERROR:
        (error,) = struct.unpack_from("=i", answer, _HEADER.size)
        if -error == errno.ENOENT:
            return None
        raise OSError(-error, os.strerror(-error))
    family, state, own_port, other_port, own, other = struct.unpack_from("!BBxxHH16s16s", answer, _HEADER.size)
    size = 4 if family == socket.AF_INET else 16
    found = _packed_end(own[:size], own_port), _packed_end(other[:size], other_port)
    (inode,) = struct.unpack_from("=I", answer, _HEADER.size + 68)
    # Where there is no such connection, the kernel names a listener of the client's port.
    return int(inode) or None if state != _TCP_LISTEN and found == (client, server) else None


def _listed(client: _End, server: _End) -> int | None:
    """Look it up in the table for people."""
    port = f":{client[1]:04X}"
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            own, other, inode = fields[1], fields[2], fields[9]
            if own.endswith(port) and inode != "0" and (_read_end(own), _read_end(other)) == (client, server):
                return int(inode)
    return None


def _read_end(text: str) -> _End:
    """``0100007F:1F90``: the address in words of 32 bits, each in the machine's order of bytes."""
    digits, _, port = text.partition(":")
    raw = bytes.fromhex(digits)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return _packed_end(raw, int(port, 16))


def _packed_end(address: bytes, port: int) -> _End:
    return _end(str(ip_address(address)), port)
