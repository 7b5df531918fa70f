"""Agents, as their sidecar sees them: tokens and sockets. What is asked and what comes back is kept byte by byte."""

import asyncio
import base64
import json
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from tests.raw import unchunked
from tests.stack import Reply

#: So little that a client which does not read acknowledges next to nothing of a big answer.
_SMALL = 2048


@dataclass(frozen=True)
class Ask:
    """A request of an agent's program. ``named``: it says which step it is."""

    kind: str
    name: str
    named: bool = False

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}{' by name' if self.named else ''}"

    def like(self, other: "Ask") -> bool:
        """A request for the same, whether or not it says which step it is."""
        return (self.kind, self.name) == (other.kind, other.name)


class Ending(Enum):
    WHOLE = "answered"
    CUT = "cut off"
    UNHEARD = "hung up"


@dataclass(eq=False)
class Call(asyncio.Protocol):
    """One request of an attempt, from its connection to the end of its answer."""

    n: int
    attempt: "Attempt"
    place: int  # in the program
    ask: Ask
    again: bool  # the agent tries again
    reads: bool = True
    barred: bool = False  # its attempt has been told that its run is stopped
    ending: Ending | None = None
    reply: Reply | None = None
    data: bytes = b""
    tell: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._transport: asyncio.Transport | None = None

    def __str__(self) -> str:
        said = self.ending.value if self.ending else "waits"
        status = f" {self.reply.status} {self.reply.error or ''}" if self.reply else ""
        return f"call {self.n} ({self.ask}, place {self.place}): {said}{status}"

    @property
    def answered(self) -> Reply | None:
        """The whole answer of the upstream, as it came or as it was recorded."""
        return self.reply if self.reply is not None and self.reply.error is None else None

    @property
    def refused(self) -> str | None:
        """The code of the refusal."""
        return self.reply.error if self.reply is not None else None

    @property
    def accepted(self) -> bool:
        """The agent goes on with it. After a mail that failed, too: it does not know whether it was sent."""
        reply = self.answered
        return reply is not None and (reply.status < 300 or (self.ask.kind == "mail" and reply.status >= 500))

    # ---- asking

    async def begin(self, url: str) -> None:
        """Connect and send."""
        sock = socket.socket()
        sock.setblocking(False)
        if not self.reads:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(sock, ("127.0.0.1", self.attempt.port))
            await loop.create_connection(lambda: self, sock=sock)
        except OSError:
            sock.close()
            self._end(Ending.CUT)
            return
        assert self._transport is not None
        self._transport.write(self._request(url))

    def _request(self, url: str) -> bytes:
        attempt, ask = self.attempt, self.ask
        pair = base64.b64encode(f"{attempt.run}:{attempt.token}".encode()).decode()
        lines = [
            f"{'GET' if ask.kind == 'read' else 'POST'} {url} HTTP/1.1",
            f"Host: {url.split('/')[2]}",
            f"Proxy-Authorization: Basic {pair}",
            f"Authorization: Bearer {attempt.n}/{self.n}",
        ]
        body = b""
        if ask.named:
            lines.append(f"Twiceshy-Step: {ask.kind}-{ask.name}-{self.place}")
        if ask.kind in ("call", "stream"):
            lines.append(f"x-stainless-retry-count: {int(self.again)}")
        if ask.kind == "charge":
            lines.append(f"Idempotency-Key: {uuid5(NAMESPACE_URL, f'{attempt.run}/{attempt.n}/{self.place}')}")
        if ask.kind != "read":
            told: dict[str, Any] = {"name": ask.name, "stream": ask.kind == "stream"}
            # What no rule says is to be ignored tells two mails apart.
            body = json.dumps(told if ask.kind == "mail" else {**told, "attempt": attempt.n}).encode()
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self.reads:
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self.data += data
        self._look(over=False)

    def eof_received(self) -> None:
        self._look(over=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look(over=True)

    def _look(self, *, over: bool) -> None:
        if self.ending is None:
            reply = _read(self.data)
            if reply is not None and not reply.cut:
                self.reply = reply
                self._end(Ending.WHOLE)
            elif over:
                self._end(Ending.CUT)

    def _end(self, ending: Ending) -> None:
        if self.ending is None:
            self.ending = ending
            self.tell()

    # ---- ending

    def read_on(self) -> None:
        """A client that had not read does so."""
        self.reads = True
        if self._transport is not None and self.ending is None:
            self._transport.resume_reading()

    def hang_up(self, *, reset: bool = False) -> None:
        """Close the connection, whatever has come."""
        self._end(Ending.UNHEARD)
        if self._transport is not None:
            if reset and not self._transport.is_closing():
                sock = self._transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()


def _read(data: bytes) -> Reply | None:
    """The answer in *data*; ``cut``: its end is not there."""
    head, whole, body = data.partition(b"\r\n\r\n")
    if not whole:
        return None
    line, *lines = head.decode("latin-1").split("\r\n")
    _, status, reason = line.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body, ended = _chunks(body)
    else:
        ended = len(body) >= int(headers["content-length"])
    return Reply(int(status), reason, headers, body, cut=not ended)


def _chunks(data: bytes) -> tuple[bytes, bool]:
    try:
        return unchunked(data)
    except ValueError:  # a size of which only a part is here
        return b"", False


@dataclass(eq=False)
class Attempt:
    """One execution of a run's program, while it lives."""

    run: str
    n: int
    token: str
    home: str  # the name of the sidecar that it speaks through
    process: int  # the pid of that, when it began
    port: int
    program: list[Ask]
    alive: bool = True
    ended: bool = False  # its launcher wrote its end down
    fenced: int | None = None  # the judge's log was so long when another attempt was claimed
    sent_at_fence: dict[str, int] = field(default_factory=dict)  # by URL: its steps that were sent then
    calls: list[Call] = field(default_factory=list)

    @property
    def current(self) -> bool:
        return self.fenced is None

    def at(self, place: int) -> list[Call]:
        return [call for call in self.calls if call.place == place]

    def waiting(self) -> list[Call]:
        return [call for call in self.calls if call.ending is None]

    def accepted(self, place: int) -> Call | None:
        return next((call for call in self.at(place) if call.accepted), None)

    def failed(self) -> list[int]:
        """Places whose calls have all ended, and none was accepted."""
        return [
            place
            for place in range(len(self.program))
            if (calls := self.at(place))
            and all(call.ending is not None for call in calls)
            and not any(call.accepted for call in calls)
        ]

    @property
    def stopped(self) -> bool:
        """It was told that its run is stopped, or that it is not its run any more."""
        return any(call.refused in ("ambiguous", "fenced", "sidecar-changed", "not-running") for call in self.calls)

    def next_place(self) -> int | None:
        """Where the program goes on, perhaps beside what still waits; None: it cannot go on now.

        What waits for an answer has another name: who is given which of two equal answers, nobody promises.
        """
        if not self.alive or self.failed():
            return None
        waiting = self.waiting()
        if len(waiting) >= 3:
            return None
        place = max((call.place for call in self.calls), default=-1) + 1
        if place < len(self.program) and any(call.ask.like(self.program[place]) for call in waiting):
            return None
        return place

    def done(self) -> bool:
        """The program came to its end."""
        return bool(self.program) and all(self.accepted(place) for place in range(len(self.program)))

    def die(self) -> None:
        """The process is gone."""
        self.alive = False
        for call in self.calls:
            call.hang_up()
