"""The name in a ClientHello, read before anything is answered: the leaf must carry it too. Pure.

A client that resolved the name itself asks CONNECT for an address and says the name in its handshake only. A hello
may come in pieces: with post-quantum key shares it is larger than a packet.
"""

_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
#: More than any hello has. What is larger is left to OpenSSL to refuse.
LIMIT = 64 << 10


def server_name(data: bytes) -> str | None:
    """The name that the ClientHello at the start of *data* asks for; empty: it asks for none, or is no such thing.

    None: more bytes are needed to tell.
    """
    hello = b""
    at, need = 0, 4
    while len(hello) < need:
        if len(data) < at + 5:
            return "" if data[at : at + 1] not in (b"", b"\x16") or len(data) > LIMIT else None
        if data[at] != _HANDSHAKE:
            return ""
        length = int.from_bytes(data[at + 3 : at + 5], "big")
        hello += data[at + 5 : at + 5 + length]
        if len(hello) >= 4:
            if hello[0] != _CLIENT_HELLO:
                return ""
            need = 4 + int.from_bytes(hello[1:4], "big")
        at += 5 + length
        if len(hello) < need and len(data) < at:
            return "" if need > LIMIT else None
    try:
        return _name(hello[4:need])
    except (IndexError, UnicodeDecodeError):
        return ""


def _name(body: bytes) -> str:
    at = 2 + 32  # version, random
    at += 1 + body[at]  # session id
    at += 2 + _number(body, at)  # cipher suites
    at += 1 + body[at]  # compression methods
    end = at + 2 + _number(body, at)
    at += 2
    while at + 4 <= end:
        kind, length = _number(body, at), _number(body, at + 2)
        at += 4
        if kind == _SERVER_NAME and body[at + 2] == _HOST_NAME:
            size = _number(body, at + 3)
            return body[at + 5 : at + 5 + size].decode("ascii").lower().removesuffix(".")
        at += length
    return ""


def _number(body: bytes, at: int) -> int:
    return body[at] << 8 | body[at + 1]
