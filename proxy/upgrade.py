"""The handshake of a WebSocket: what goes upstream, and how the answer is read. Pure.

The answer's head goes to the client as it came. An answer that does not open the WebSocket has a body like any other;
its bytes go through as they are, and ``Extent`` tells where they end.
"""

import re
from dataclasses import dataclass

from proxy.message import Headers, Request

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-9][0-9]{2})(?: .*)?\Z")
#: Of a chunk's size line or a trailer.
_LINE_LIMIT = 64 << 10
SWITCHED = 101


class Malformed(Exception):
    """What came is no answer of HTTP/1.1."""


def is_http2(first: bytes) -> bool:
    """True for the first 9 bytes of an HTTP/2 server: whatever it is asked, it begins with SETTINGS of stream 0."""
    return first[:2] == b"\0\0" and first[3:4] == b"\4" and first[5:] == b"\0\0\0\0"


def is_asked_for(headers: Headers) -> bool:
    """True if a client asks for a WebSocket."""
    return any(name.lower() == b"upgrade" and b"websocket" in value.lower() for name, value in headers)


def fault(method: str, headers: Headers, *, http10: bool) -> str | None:
    """Why a request for a WebSocket is none, in words."""
    connection = b",".join(value for name, value in headers if name.lower() == b"connection")
    if method != "GET" or http10:
        return "it is a GET of HTTP/1.1"
    if b"upgrade" not in [each.strip().lower() for each in connection.split(b",")]:
        return "Upgrade stands in its Connection header"
    if any(name.lower() in (b"content-length", b"transfer-encoding") and value != b"0" for name, value in headers):
        return "it has no body"
    return None


def request_head(request: Request, via: tuple[bytes, bytes]) -> bytes:
    """The head that goes upstream: the raw target, the end-to-end headers, and what asks for the WebSocket."""
    lines = [
        f"{request.method} {request.target} HTTP/1.1".encode("utf-8", "surrogateescape"),
        b"Host: " + request.authority.encode("utf-8", "surrogateescape"),
        *(name + b": " + value for name, value in (*request.headers, via)),
        b"Connection: Upgrade",
        b"Upgrade: websocket",
    ]
    return b"\r\n".join([*lines, b"", b""])


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's head, read. ``raw``: as it came."""

    status: int
    headers: Headers
    raw: bytes

    def closing(self) -> bytes:
        """The head for a client whose connection ends with this answer."""
        first, *lines = self.raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
        kept = [line for line in lines if line.partition(b":")[0].lower() not in (b"connection", b"keep-alive")]
        return b"\r\n".join([first, *kept, b"Connection: close", b"", b""])


def read_answer(raw: bytes) -> Answer:
    """Read a head with its empty line. Raises Malformed."""
    first, *lines = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
    match = _STATUS_LINE.match(first)
    if match is None:
        raise Malformed(f"the answer begins with {first[:80]!r}")
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip() or b"\n" in line:
            raise Malformed(f"the answer has a malformed header {line[:80]!r}")
        headers.append((name, value.strip()))
    return Answer(int(match[1]), tuple(headers), raw)


class Extent:
    """How far the body of *answer* reaches. ``over``: it is here to its end."""

    def __init__(self, answer: Answer) -> None:
        named = {name.lower(): value for name, value in answer.headers}
        self._chunked = named.get(b"transfer-encoding", b"").lower() == b"chunked"
        length = named.get(b"content-length", b"")
        self._left: int | None = 0 if self._chunked else int(length) if length.isdigit() else None
        self._line = b""
        self._trailers = False
        self.over = answer.status in (204, 304) or (not self._chunked and self._left == 0)

    @property
    def by_close(self) -> bool:
        """Only the connection's end tells."""
        return self._left is None

    def take(self, data: bytes) -> bytes:
        """What of *data* belongs to the body, as it came. Raises Malformed."""
        if self._left is None:
            return data
        at = 0
        while at < len(data) and not self.over:
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                self.over = not self._chunked and self._left == 0
            else:
                at = self._chunk_line(data, at)
        return data[:at]

    def _chunk_line(self, data: bytes, at: int) -> int:
        end = data.find(b"\n", at)
        self._line += data[at : end if end >= 0 else len(data)]
        if len(self._line) > _LINE_LIMIT:
            raise Malformed("the answer has a chunk that does not say its size")
        if end < 0:
            return len(data)
        line, self._line = self._line.rstrip(b"\r"), b""
        if self._trailers:
            self.over = not line
            return end + 1
        size = line.partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,16}", size):
            raise Malformed(f"the answer has a chunk of the size {line[:80]!r}")
        self._trailers = int(size, 16) == 0
        self._left = 0 if self._trailers else int(size, 16) + 2  # with the line's end behind it
        return end + 1
