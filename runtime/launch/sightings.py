"""Where a process tree connects to, as the kernel's tables and strace tell it, and what such an address is. Pure.

A table of ``/proc/net`` has a line for each socket of a network namespace; whose it is, its inode tells. strace tells
each call as it is made. What cannot be read in either is left out: both belong to others and may change.
"""

import contextlib
import ipaddress
import re
import sys
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Transport(StrEnum):
    """What carries the bytes. Whatever is no stream counts as UDP."""

    TCP = "tcp"
    UDP = "udp"


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """``host`` is a number; an IPv4 address that is mapped into IPv6 stands as IPv4."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback


def address(host: str, port: int) -> Address:
    """An address as somebody wrote it. Raises ValueError when *host* is no number."""
    number = ipaddress.ip_address(host.partition("%")[0])
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return Address(str(mapped or number), port)


def destination(host: str, port: int) -> Address:
    """Where a connection ends: to connect to "any address" is to connect to this machine. Raises ValueError."""
    found = address(host, port)
    return Address("127.0.0.1", port) if ipaddress.ip_address(found.host).is_unspecified else found


# ---- the kernel's tables

_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class Socket:
    """A line of /proc/net/tcp, tcp6, udp or udp6. ``remote`` None: connected to nobody."""

    inode: int
    local: Address
    remote: Address | None
    listening: bool


def table(text: str, inodes: Container[int]) -> list[Socket]:
    """Those sockets of one table that are among *inodes*. A busy machine has thousands of others."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split(None, 10)
        try:
            inode = int(fields[9])
            if inode not in inodes:
                continue
            local, remote = _hexadecimal(fields[1]), _hexadecimal(fields[2])
            to = destination(remote.host, remote.port) if remote.port else None
        except (ValueError, IndexError):
            continue
        found.append(Socket(inode, local, to, fields[3] == _LISTENING))
    return found


def _hexadecimal(text: str) -> Address:
    """``0100007F:1F90``: 32-bit words as they lie in memory, and the port as a number."""
    digits, _, port = text.partition(":")
    words = bytes.fromhex(digits)
    if sys.byteorder == "little":
        words = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return address(str(ipaddress.ip_address(words)), int(port, 16))


# ---- strace

#: What the options of ``runtime.launch.watcher`` make strace tell.
CALLS = "connect,listen,sendto,sendmsg,sendmmsg,execve,clone,?clone3,?fork,?vfork"
_LINE = re.compile(r"(\d+) +(.*)")
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>")
_UNFINISHED = " <unfinished ...>"
_CALL = re.compile(r"(\w+)\((?:(\d+)(?:<([A-Za-z0-9-]+):\[(.*?)\]>)?)?")
_RESULT = re.compile(r"= (-?\d+)(?: (E[A-Z0-9]+)\b.*)?$")
_V4 = re.compile(r'sa_family=AF_INET, sin_port=htons\((\d+)\), sin_addr=inet_addr\("([^"]+)"\)')
_V6 = re.compile(r'sa_family=AF_INET6, sin6_port=htons\((\d+)\)[^}]*?inet_pton\(AF_INET6, "([^"]+)"')
_PEER = re.compile(r"->(\[?[0-9A-Fa-f:.]+\]?):(\d+)\Z")
_BOUND = re.compile(r"(\[?[0-9A-Fa-f:.]+\]?):(\d+)\Z")
_PROGRAM = re.compile(r'execve\("((?:[^"\\]|\\.)*)"')
_STREAMS = ("TCP", "MPTCP", "SCTP", "socket", "")
#: Calls on a socket that is connecting already.
_AGAIN = frozenset({"EALREADY", "EISCONN"})
_OUTCOMES = {
    "ECONNREFUSED": "refused", "ENETUNREACH": "unreachable", "EHOSTUNREACH": "unreachable",
    "EADDRNOTAVAIL": "unreachable", "EAFNOSUPPORT": "unreachable", "EACCES": "forbidden", "EPERM": "forbidden",
    "ETIMEDOUT": "timed out",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Called:
    """A connection that was begun, or a datagram sent. ``outcome``: how it failed, as far as it was told at once."""

    thread: int
    transport: Transport
    address: Address
    outcome: str = ""


class Trace:
    """Reads strace's lines (``-f -yy``), one after the other."""

    def __init__(self) -> None:
        #: Thread -> the process that it belongs to. Who is not here is a process, or one whose beginning was not told.
        self.threads: dict[int, int] = {}
        #: Process -> the program that it runs.
        self.programs: dict[int, str] = {}
        #: Where the processes listen.
        self.listeners: set[Address] = set()
        self._open: dict[int, str] = {}  # thread -> a call that has not ended
        self._peers: dict[tuple[int, int], Address] = {}  # process, descriptor -> whom its datagrams go to

    def process(self, thread: int) -> int:
        return self.threads.get(thread, thread)

    def read(self, line: str) -> list[Called]:
        """What *line* tells of connections."""
        found = _LINE.match(line.rstrip("\n"))
        if found is None:
            return []
        thread, text = int(found[1]), found[2]
        if (resumed := _RESUMED.match(text)) is not None:
            text = self._open.pop(thread, "") + text[resumed.end() :]
        elif text.endswith(_UNFINISHED):
            self._open[thread] = text.removesuffix(_UNFINISHED)
            return []
        call = _CALL.match(text)
        result = _RESULT.search(text)
        if call is None or result is None:
            return []
        match call[1]:
            case "connect":
                return self._connected(thread, call, text, result[2] or "")
            case "sendto" | "sendmsg" | "sendmmsg":
                return self._sent(thread, call, text)
            case "listen" if call[4] and (bound := _BOUND.match(call[4])) is not None:
                with contextlib.suppress(ValueError):
                    self.listeners.add(address(bound[1].strip("[]"), int(bound[2])))
            case "clone" | "clone3" if "CLONE_THREAD" in text and int(result[1]) > 0:
                self.threads[int(result[1])] = self.process(thread)
            case "execve" if result[1] == "0" and (program := _PROGRAM.match(text)) is not None:
                self.programs[self.process(thread)] = program[1]
        return []

    def _connected(self, thread: int, call: re.Match[str], text: str, error: str) -> list[Called]:
        to = next(_addresses(text), None)
        if to is None or error in _AGAIN:
            return []
        if not (call[3] or "").startswith(_STREAMS[:3]) and (call[3] or "") not in _STREAMS:
            # Nothing is sent by this: the C library sorts addresses by asking which of them has a way to it.
            self._peers[self.process(thread), int(call[2])] = to
            return []
        return [Called(thread, Transport.TCP, to, _OUTCOMES.get(error, ""))]

    def _sent(self, thread: int, call: re.Match[str], text: str) -> list[Called]:
        stream = (call[3] or "").startswith(_STREAMS[:3])
        named = list(_addresses(text))
        if stream or (call[3] or "") in _STREAMS:
            # With an address a connection is opened by the first bytes (TCP fast open).
            return [Called(thread, Transport.TCP if stream else Transport.UDP, to) for to in named]
        peer = _PEER.search(call[4])
        if not named and peer is not None:
            named = _addressed(peer[1].strip("[]"), peer[2])
        known = self._peers.get((self.process(thread), int(call[2])))
        if not named and known is not None:
            named = [known]
        return [Called(thread, Transport.UDP, to) for to in named]


def _addresses(text: str) -> Iterator[Address]:
    for pattern in (_V4, _V6):
        for port, host in pattern.findall(text):
            yield from _addressed(host, port)


def _addressed(host: str, port: str) -> list[Address]:
    try:
        return [destination(host, int(port))] if 0 < int(port) < 65536 else []
    except ValueError:
        return []


# ---- what an address is


class Kind(StrEnum):
    """What a connection that does not lead to the sidecar is."""

    PAST = "past"  # a stream that the journal knows nothing of
    QUIC = "quic"  # HTTP/3
    SERVICE = "service"  # of this machine, and known not to speak HTTP
    LOOKUP = "lookup"  # a name is asked for
    DATAGRAM = "datagram"
    ALLOWED = "allowed"  # said to be well


#: Who listens at these ports does not speak HTTP. Mail is not among them: it is an effect.
SERVICES = {
    1433: "SQL Server", 1521: "Oracle", 3306: "MySQL", 4222: "NATS", 5432: "PostgreSQL", 5672: "RabbitMQ",
    6379: "Redis", 6432: "PgBouncer", 7687: "Neo4j", 9042: "Cassandra", 9092: "Kafka", 11211: "memcached",
    26257: "CockroachDB", 27017: "MongoDB",
}  # fmt: skip
MAIL = frozenset({25, 465, 587})
WEB = frozenset({80, 443, 8000, 8080, 8443})
_LOOKUPS = frozenset({53, 853, 5353})


@dataclass(frozen=True, slots=True)
class Allowed:
    """Addresses that may be reached past the sidecar. None: any."""

    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    port: int | None

    def covers(self, found: Address) -> bool:
        number = ipaddress.ip_address(found.host)
        return self.port in (None, found.port) and (self.network is None or number in self.network)


def allowed(text: str) -> tuple[str, int | None]:
    """Host (name, address, network, or empty) and port of ``HOST``, ``HOST:PORT`` or ``:PORT``. Raises ValueError."""
    host, port = text, ""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        if rest and not rest.startswith(":"):
            raise ValueError(text)
        port = rest[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not (host or port) or (port and not 0 < int(port) < 65536):
        raise ValueError(text)
    return host, int(port) if port else None


def kind(
    transport: Transport, to: Address, *, sidecars: Collection[Address], listeners: Collection[Address],
    permitted: Sequence[Allowed] = (),
) -> Kind | None:  # fmt: skip
    """What a connection to *to* is. None: to the sidecar, or to what the process tree itself listens at."""
    if to in sidecars or to in listeners or (to.loopback and _everywhere(to, listeners)):
        return None
    if to.port in _LOOKUPS:
        return Kind.LOOKUP
    if any(each.covers(to) for each in permitted):
        return Kind.ALLOWED
    if transport is Transport.UDP:
        return Kind.QUIC if to.port == 443 else Kind.DATAGRAM
    return Kind.SERVICE if to.loopback and to.port in SERVICES else Kind.PAST


def _everywhere(to: Address, listeners: Collection[Address]) -> bool:
    return any(each.port == to.port and ipaddress.ip_address(each.host).is_unspecified for each in listeners)
