"""The bytes of an answer to a client: head, framing, end. Pure.

aiohttp's own responses add Date, Server and Content-Type; a relayed or replayed answer carries only what the
upstream sent, so its bytes are made here.
"""

from enum import Enum

from proxy.identity import end_to_end
from proxy.message import Headers

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Framing(Enum):
    """How a client learns where a body ends."""

    NONE = "none"  # there is no body: the head is the end
    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"  # HTTP/1.0


def content_length(headers: Headers) -> int | None:
    """The one Content-Length of *headers*, or None."""
    for name, value in headers:
        if name.lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    return None


def framing(method: str, status: int, headers: Headers, *, http10: bool) -> Framing:
    """Choose the framing of an answer to *method* with *status* and end-to-end *headers*."""
    if method == "HEAD" or status < 200 or status in (204, 304):
        return Framing.NONE
    if content_length(headers) is not None:
        return Framing.LENGTH
    return Framing.CLOSE if http10 else Framing.CHUNKED


def upstream_headers(raw: Headers, status: int) -> Headers:
    """What is kept of an upstream's headers: the end-to-end ones, and Content-Length where it says something."""
    lengths = [pair for pair in raw if status != 204 and content_length((pair,)) is not None]
    return (*end_to_end(raw), *lengths[:1])


def head(
    status: int, reason: bytes, headers: Headers, kind: Framing, *, keep_alive: bool, extra: Headers = ()
) -> bytes:
    """The head of an answer, ready to send."""
    parts = [b"HTTP/1.1 %d %s\r\n" % (status, reason)]
    for name, value in (*headers, *extra):
        parts += (name, b": ", value, b"\r\n")
    if kind is Framing.CHUNKED:
        parts.append(b"Transfer-Encoding: chunked\r\n")
    if not keep_alive or kind is Framing.CLOSE:
        parts.append(b"Connection: close\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


def piece(data: bytes, kind: Framing) -> bytes:
    """A piece of a body as it goes out."""
    if kind is Framing.CHUNKED:
        return b"%x\r\n%s\r\n" % (len(data), data) if data else b""
    return data


def end(kind: Framing) -> bytes:
    """What goes out after the last piece."""
    return b"0\r\n\r\n" if kind is Framing.CHUNKED else b""
