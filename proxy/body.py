"""A request's body, understood by its content type. Pure.

What cannot be understood without a doubt stays what it is: bytes. A reader here must never map two bodies
that an upstream may tell apart to one value, beyond spacing, order of names, and escapes. So Python's
``json`` is used for its speed, with hooks against its habits: it makes ``1e400`` and ``2e400`` one number,
drops all but the last of equal names, guesses UTF-16, and takes ``NaN``.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote_to_bytes

from proxy.message import Request

#: Beyond this the body is not decoded: 64 MiB is what a request may have in the first place.
DECODED_MAX = 64 << 20
#: Nor if it grows more than so many times beyond 1 MiB: texts stay under 30, a bomb reaches 1000 and would hold up
#: everybody for half a second.
DECODED_RATIO = 100
#: JSON nested deeper stays bytes. Far under the recursion limit, which counts the caller's frames too: the same
#: body must be read the same way wherever it is read.
DEPTH_MAX = 100
#: Forms of more fields and multipart bodies of more parts stay bytes.
FIELDS_MAX = 100_000


class Ignored:
    """Stands where an element of a list, or the whole body, was left out by a rule."""

    __slots__ = ()


IGNORED = Ignored()


def _name(pair: tuple[str, Any]) -> str:
    return pair[0]


class Pairs:
    """A JSON object that has a name twice: all its pairs as they came. An object without is a plain dict."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pairs) and sorted(self.pairs, key=_name) == sorted(other.pairs, key=_name)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Json:
    """Made of dict, Pairs, list, str, True, False, None, and bytes: a number as it was written."""

    tree: Any


@dataclass(frozen=True, slots=True)
class Form:
    """Names and values, unescaped; the value is None where there was no ``=``. In the order they came."""

    pairs: tuple[tuple[bytes, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a multipart body: its own headers, names in lower case, and the hash of its content."""

    headers: tuple[tuple[bytes, bytes], ...]
    size: int
    sha256: bytes

    @property
    def name(self) -> bytes:
        """``name`` of its Content-Disposition, else nothing."""
        for name, value in self.headers:
            if name == b"content-disposition":
                found = _PART_NAME.search(value)
                if found:
                    return found[1] if found[1] is not None else found[2]
        return b""


@dataclass(frozen=True, slots=True)
class Multipart:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes. ``encoding``: the Content-Encoding that could not be undone, else nothing."""

    data: bytes
    encoding: bytes = b""


Body = Json | Form | Multipart | Raw

_PART_NAME = re.compile(rb';\s*name=(?:"([^"]*)"|([^;\s]+))', re.IGNORECASE)
_PARAMETER = re.compile(rb';\s*([^\s=;"]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))\s*')
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_CHUNK_HEAD = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[^\r\n]*)?\r\n")


def media_type(value: bytes | None) -> tuple[bytes, tuple[tuple[bytes, bytes], ...]]:
    """Media type in lower case and parameters (names in lower case, sorted). What is not one stays as it is."""
    kind, _, rest = (value or b"").partition(b";")
    kind, rest = kind.strip().lower(), rest.strip()
    if not rest:
        return kind, ()
    found: list[tuple[bytes, bytes]] = []
    position, text = 0, b";" + rest.rstrip(b"; \t")
    while position < len(text):
        match = _PARAMETER.match(text, position)
        if match is None:
            return (value or b"").strip(), ()
        quoted, plain = match[2], match[3]
        found.append((match[1].lower(), plain if quoted is None else re.sub(rb"\\(.)", rb"\1", quoted)))
        position = match.end()
    return kind, tuple(sorted(found))


def is_json(kind: bytes) -> bool:
    """True for the media types whose bodies are JSON texts."""
    return kind == b"application/json" or kind.endswith(b"+json")


def read(request: Request) -> Body:
    """The body of *request*, content encoding undone."""
    data = request.body
    if not data:
        return Raw(b"")
    encoding = (request.header("content-encoding") or b"").strip().lower()
    if encoding and encoding != b"identity":
        decoded = undo(encoding, data)
        if decoded is None:
            return Raw(data, encoding)
        data = decoded
    kind, parameters = media_type(request.header("content-type"))
    understood: Body | None = None
    if is_json(kind):
        understood = read_json(data)
    elif kind == b"application/x-www-form-urlencoded":
        understood = read_form(data)
    elif kind.startswith(b"multipart/"):
        boundaries = [value for name, value in parameters if name == b"boundary"]
        understood = read_multipart(data, boundaries[0]) if len(boundaries) == 1 and boundaries[0] else None
    return Raw(data) if understood is None else understood


# ---- content encodings


def undo(encoding: bytes, data: bytes) -> bytes | None:
    """*data* decoded, None if it cannot be (unknown encoding, broken, or a bomb)."""
    if encoding in (b"gzip", b"x-gzip"):
        return _inflate(data, zlib.MAX_WBITS | 16)
    if encoding == b"deflate":
        # RFC 9110 says zlib; many send bare deflate.
        with_head = _inflate(data, zlib.MAX_WBITS)
        return _inflate(data, -zlib.MAX_WBITS) if with_head is None else with_head
    if encoding == b"aws-chunked":
        return _unchunk(data)
    return None


def _inflate(data: bytes, bits: int) -> bytes | None:
    pieces: list[bytes] = []
    left = min(DECODED_MAX, max(1 << 20, DECODED_RATIO * len(data)))
    while data:  # a gzip body may be several members
        inflater = zlib.decompressobj(bits)
        try:
            pieces.append(inflater.decompress(data, left + 1))
        except zlib.error:
            return None
        left -= len(pieces[-1])
        if left < 0 or not inflater.eof:
            return None
        if inflater.unused_data and bits != zlib.MAX_WBITS | 16:
            return None
        data = inflater.unused_data
    return b"".join(pieces)


def _unchunk(data: bytes) -> bytes | None:
    """S3's chunks, whose signatures differ each time; the trailer (a checksum) follows from the content."""
    pieces: list[bytes] = []
    position = 0
    while match := _CHUNK_HEAD.match(data, position):
        size = int(match[1], 16)
        position = match.end()
        if size == 0:
            return b"".join(pieces)
        end = position + size
        if data[end : end + 2] != b"\r\n":
            return None
        pieces.append(data[position:end])
        position = end + 2
    return None


# ---- JSON


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Pairs:
    whole = dict(pairs)
    return whole if len(whole) == len(pairs) else Pairs(pairs)


def _refuse(text: str) -> NoReturn:
    raise ValueError(text)


# Numbers become bytes by a method in C: 1 MB of floats takes 23 ms to read and write, 144 with a hook in Python.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=str.encode, parse_int=str.encode, parse_constant=_refuse
)


def read_json(data: bytes) -> Json | None:
    """The tree, or None for what is no JSON, no UTF-8, or too deep."""
    try:
        tree = _DECODER.decode(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return None if data.count(b"[") + data.count(b"{") > DEPTH_MAX and _too_deep(tree) else Json(tree)


def _too_deep(tree: Any) -> bool:
    level = [tree]
    for _ in range(DEPTH_MAX):
        below: list[Any] = []
        for node in level:
            kind = type(node)
            if kind is dict:
                below += [child for child in node.values() if type(child) in _CONTAINERS]
            elif kind is list:
                below += [child for child in node if type(child) in _CONTAINERS]
            elif kind is Pairs:
                below += [child for _, child in node.pairs if type(child) in _CONTAINERS]
        if not below:
            return False
        level = below
    return True


_CONTAINERS = frozenset({dict, list, Pairs})


def _stand_in(node: Any) -> Any:
    # NaN and Infinity are in no tree that was read, so they mark what JSON has no form for.
    if type(node) is bytes:
        return [_NAN, node.decode("ascii")]
    if type(node) is Pairs:
        return [_INFINITY, sorted(node.pairs, key=_name)]
    if node is IGNORED:
        return [-_INFINITY]
    raise TypeError(type(node).__name__)


_NAN = float("nan")
_INFINITY = float("inf")
_ENCODER = json.JSONEncoder(
    ensure_ascii=True, check_circular=False, allow_nan=True, sort_keys=True, separators=(",", ":"), default=_stand_in
)


def write_json(tree: Any) -> bytes:
    """One text for one tree: names sorted, numbers as written, equal names in the order they came."""
    return _ENCODER.encode(tree).encode("ascii")


# ---- forms


def read_form(data: bytes) -> Form | None:
    """The pairs, or None if an escape is broken: servers differ in what they make of it."""
    if _BAD_ESCAPE.search(data) or data.count(b"&") >= FIELDS_MAX:
        return None
    pairs: list[tuple[bytes, bytes | None]] = []
    for piece in data.split(b"&"):
        name, equals, value = piece.partition(b"=")
        pairs.append((_unescape(name), _unescape(value) if equals else None))
    return Form(tuple(pairs))


def _unescape(data: bytes) -> bytes:
    return unquote_to_bytes(data.replace(b"+", b" "))


def order(name: bytes) -> bytes:
    """What form fields and query parameters are sorted by; equal ones keep their order.

    The fields of ``items[][price]=1&items[][count]=2&items[][price]=3`` belong together by their order, in
    Rails and PHP: all names with the same part before ``[]`` count as equal.
    """
    return name.partition(b"[]")[0]


# ---- multipart


def read_multipart(data: bytes, boundary: bytes) -> Multipart | None:
    """The parts, or None for anything but the strict form: no preamble, no epilogue, CRLF."""
    mark = b"--" + boundary
    if not data.startswith(mark):
        return None
    pieces = (b"\r\n" + data).split(b"\r\n" + mark)[1:]
    last = pieces.pop()
    if last not in (b"--", b"--\r\n") or len(pieces) > FIELDS_MAX:
        return None
    parts: list[Part] = []
    for piece in pieces:
        part = _part(piece)
        if part is None:
            return None
        parts.append(part)
    return Multipart(tuple(parts))


def _part(piece: bytes) -> Part | None:
    padding, line_end, rest = piece.partition(b"\r\n")
    if padding.strip(b" \t") or not line_end:
        return None
    if rest.startswith(b"\r\n"):
        head, content = b"", rest[2:]
    else:
        head, blank, content = rest.partition(b"\r\n\r\n")
        if not blank:
            return None
    headers: list[tuple[bytes, bytes]] = []
    for line in head.split(b"\r\n") if head else ():
        name, colon, value = line.partition(b":")
        if not colon or name != name.strip() or not name:
            return None
        headers.append((name.lower(), value.strip(b" \t")))
    headers.sort(key=lambda header: header[0])
    return Part(tuple(headers), len(content), hashlib.sha256(content).digest())
