"""JSON that passes through as it was written: read out of a body, and put into an answer, byte for byte. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from runtime import payload
from runtime.errors import UsageError

_BLANK = " \t\r\n"


class Raw(bytes):
    """JSON text that is part of an answer as it is."""

    __slots__ = ()


def members(text: bytes, limit: int, what: str) -> tuple[Any, dict[str, bytes]]:
    """The value of the JSON *text* and, if that is an object, the text of each of its members.

    Raises UsageError for what ``payload.read`` refuses, and for an object that names a member twice.
    """
    value = payload.read(text, limit, what)
    if not isinstance(value, dict):
        return value, {}
    found: dict[str, bytes] = {}
    for name, raw in _members(text.decode("utf-8")):
        if name in found:
            raise UsageError(f"{what} names {name[:100]!r} twice")
        found[name] = raw.encode("utf-8")
    return value, found


def _members(text: str) -> Iterator[tuple[str, str]]:
    """Of an object that is known to be well formed."""
    decode = json.JSONDecoder().raw_decode
    at = _skip(text, _skip(text, 0) + 1)
    while text[at] != "}":
        name, at = decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
        start = at
        _, at = decode(text, at)
        yield name, text[start:at]
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    while text[at] in _BLANK:
        at += 1
    return at


def stored(text: bytes | None) -> Raw | None:
    """What the database holds as JSON. What is none after all is shown as a string: the answer stays readable."""
    if text is None:
        return None
    try:
        payload.read(text, len(text), "")
    except UsageError:
        return Raw(json.dumps(text.decode("utf-8", "replace")).encode("ascii"))
    return Raw(text)


def encode(value: Any) -> bytes:
    """*value* as JSON: models by their fields, ``Raw`` as it is."""
    return "".join(_pieces(value)).encode("utf-8")


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, Raw):
        yield value.decode("utf-8")
    elif isinstance(value, BaseModel):
        yield from _pieces({name: getattr(value, name) for name in type(value).model_fields})
    elif isinstance(value, datetime):
        yield json.dumps(value.isoformat())
    elif isinstance(value, Mapping):
        yield "{"
        for n, (name, inner) in enumerate(value.items()):
            yield f"{', ' if n else ''}{json.dumps(str(name))}: "
            yield from _pieces(inner)
        yield "}"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield "["
        for n, inner in enumerate(value):
            yield ", " if n else ""
            yield from _pieces(inner)
        yield "]"
    else:
        yield json.dumps(value, allow_nan=False)
