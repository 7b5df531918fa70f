"""An answer, and the ways to frame it on the wire."""

import json
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

Framing = Literal["length", "chunked", "close"]
EVENTS = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Answer:
    """``pieces`` are written one by one: a body is one piece or several, a stream one per event."""

    status: int
    pieces: Sequence[bytes]
    headers: tuple[tuple[str, str], ...] = ()
    type: str = "application/json"
    framing: Framing = "length"
    #: What a fault needs to know about the pieces; not sent.
    stream: bool = False
    #: Further pieces, once somebody has said what they depend on.
    later: Awaitable[Sequence[bytes]] | None = None

    def head(self, *, extra: tuple[tuple[str, str], ...] = (), keep: bool = True) -> bytes:
        """The status line and headers, as they go out before the pieces."""
        try:
            phrase = HTTPStatus(self.status).phrase
        except ValueError:
            phrase = "Sandbox"
        lines = [f"HTTP/1.1 {self.status} {phrase}", f"Content-Type: {self.type}"]
        lines += [f"{name}: {value}" for name, value in (*self.headers, *extra)]
        if self.framing == "chunked":
            lines.append("Transfer-Encoding: chunked")
        elif self.framing == "length":
            lines.append(f"Content-Length: {sum(map(len, self.pieces))}")
        if not keep or self.framing == "close":
            lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def frame(self, piece: bytes) -> bytes:
        """*piece* as it goes on the wire."""
        return b"%x\r\n%s\r\n" % (len(piece), piece) if self.framing == "chunked" and piece else piece

    @property
    def tail(self) -> bytes:
        """What says that the answer is complete, after the last piece."""
        return b"0\r\n\r\n" if self.framing == "chunked" else b""


def of_json(status: int, value: Any, **headers: str) -> Answer:
    """A JSON answer. Header names are given with underscores."""
    body = _compact(value)
    return Answer(status, (body,), tuple((name.replace("_", "-"), text) for name, text in headers.items()))


def event(value: Any, name: str = "", *, end: str = "\n") -> bytes:
    """A server-sent event whose data is *value* as JSON."""
    line = f"event: {name}{end}" if name else ""
    return f"{line}data: ".encode() + _compact(value) + f"{end}{end}".encode()


def _compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
