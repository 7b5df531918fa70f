"""What a ClientHello says, read before anything is answered. Pure.

The leaf must carry the name in it: a client that resolved the name itself asks CONNECT for an address and says the
name in its handshake only. A client whose protocols (ALPN) are HTTP/2 alone can be told so. A hello may come in
pieces: with post-quantum key shares it is larger than a packet.
"""

from dataclasses import dataclass

_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME, _ALPN = 22, 1, 0, 0, 16
#: More than any hello has. What is larger is left to OpenSSL to refuse.
LIMIT = 64 << 10


@dataclass(frozen=True, slots=True)
class Hello:
    """``name``: that is asked for, empty for none. ``protocols``: that are offered, in their order."""

    name: str = ""
    protocols: tuple[str, ...] = ()

    @property
    def http2_only(self) -> bool:
        return "h2" in self.protocols and "http/1.1" not in self.protocols


#: Of what is no ClientHello.
NOTHING = Hello()


def read_hello(data: bytes) -> Hello | None:
    """The ClientHello at the start of *data*; NOTHING when there is none. None: more bytes are needed to tell."""
    hello = b""
    at, need = 0, 4
    while len(hello) < need:
        if len(data) < at + 5:
            return NOTHING if data[at : at + 1] not in (b"", b"\x16") or len(data) > LIMIT else None
        if data[at] != _HANDSHAKE:
            return NOTHING
        length = int.from_bytes(data[at + 3 : at + 5], "big")
        hello += data[at + 5 : at + 5 + length]
        if len(hello) >= 4:
            if hello[0] != _CLIENT_HELLO:
                return NOTHING
            need = 4 + int.from_bytes(hello[1:4], "big")
        at += 5 + length
        if len(hello) < need and len(data) < at:
            return NOTHING if need > LIMIT else None
    try:
        return _read(hello[4:need])
    except (IndexError, UnicodeDecodeError):
        return NOTHING


def _read(body: bytes) -> Hello:
    at = 2 + 32  # version, random
    at += 1 + body[at]  # session id
    at += 2 + _number(body, at)  # cipher suites
    at += 1 + body[at]  # compression methods
    end = at + 2 + _number(body, at)
    at += 2
    name = ""
    protocols: tuple[str, ...] = ()
    while at + 4 <= end:
        kind, length = _number(body, at), _number(body, at + 2)
        at += 4
        if kind == _SERVER_NAME and body[at + 2] == _HOST_NAME:
            size = _number(body, at + 3)
            name = body[at + 5 : at + 5 + size].decode("ascii").lower().removesuffix(".")
        elif kind == _ALPN:
            protocols = _protocols(body[at + 2 : at + length])
        at += length
    return Hello(name, protocols)


def _protocols(listed: bytes) -> tuple[str, ...]:
    found, at = [], 0
    while at < len(listed):
        size = listed[at]
        found.append(listed[at + 1 : at + 1 + size].decode("latin-1"))
        at += 1 + size
    return tuple(found)


def _number(body: bytes, at: int) -> int:
    return body[at] << 8 | body[at + 1]
