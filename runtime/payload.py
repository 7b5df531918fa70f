"""JSON that is kept as it was written: byte for byte, never made anew. Pure."""

import json
import re
from typing import Any, NoReturn

from runtime.errors import UsageError

#: How deep arrays and objects may stand in one another: readers in other languages give up sooner than ours.
DEPTH_MAX = 200
#: How many digits a whole number may have: Python takes no more.
DIGITS_MAX = 4300
_MANY_DIGITS = re.compile(rb"[0-9]{%d}" % (DIGITS_MAX + 1))
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def read(text: bytes, limit: int, what: str) -> Any:
    """The value of the JSON *text*. UsageError says of *what* that it is no JSON (as NaN), or longer than *limit*."""
    if len(text) > limit:
        raise UsageError(f"{what} has {len(text)} bytes, more than payload_max ({limit})")
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_refuse)
        deep = _depth(value) > DEPTH_MAX
    except RecursionError:
        deep = True
    except ValueError as error:
        if _MANY_DIGITS.search(text):
            raise UsageError(f"{what} has a whole number of more than {DIGITS_MAX} digits") from error
        raise UsageError(f"{what} is not JSON: {error}") from error
    if deep:
        raise UsageError(f"{what} is nested more than {DEPTH_MAX} deep")
    return value


def member(text: bytes, name: str) -> bytes | None:
    """The member *name* of the JSON object *text*, as it was written; None: there is none. Of equal names the last."""
    words, found = text.decode("utf-8"), None
    at = _inside(words, _inside(words, 0) + 1)
    while words[at] != "}":
        key, at = _DECODER.raw_decode(words, at)
        began = _inside(words, _inside(words, at) + 1)  # behind the colon
        _, at = _DECODER.raw_decode(words, began)
        if key == name:
            found = words[began:at].encode("utf-8")
        at = _inside(words, at)
        at = _inside(words, at + (words[at] == ","))
    return found


def _inside(words: str, at: int) -> int:
    """Where the next character of *words* from *at* on is that is no space."""
    space = _SPACE.match(words, at)
    assert space is not None
    return space.end()


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level:
        deepest += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return deepest
