"""JSON-RPC messages as they pass by: what each of them is, and where the names of requests stand in it. Pure.

One JSON text (a message, or a batch of them) is fed in any pieces and given back in pieces, byte for byte. What
names a request comes as a ``Name`` of its own, so that another can be put in its place. Nothing else is read into,
and of what passes nothing is kept but a name that is not whole yet.

What is no JSON-RPC comes back as it went in.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum

#: A name longer than this is not told from the rest of the text.
NAME_MAX = 4096
#: What a message is has to show within so many of its bytes, else it is of no kind. Some put its id last.
KIND_WITHIN = 1 << 20
#: No member or method that matters has a longer name, however it is escaped.
_MEMBER_MAX = 128


class Kind(Enum):
    """What a message is, told by the first of ``method``, ``result`` and ``error`` in it."""

    RESPONSE = "response"
    REQUEST = "request"  # it has an id
    PROGRESS = "progress"  # the notification of that name
    NOTIFICATION = "notification"  # any other


@dataclass(slots=True, eq=False)
class Name:
    """A scalar that names a request, as it is written. ``kind``: of its message; None while, or if, it is of none."""

    member: str  # "id", "params.progressToken", "params._meta.progressToken"
    raw: bytes
    message: int  # of the batch, from 0
    kind: Kind | None = None


Piece = bytes | Name


class _Part(Enum):
    """What a container is."""

    BATCH = "batch"
    MESSAGE = "message"
    PARAMS = "params"
    META = "params._meta"


class _Reading(Enum):
    """What a string or number under way is."""

    PLAIN = "plain"
    MEMBER = "member"
    METHOD = "method"
    NAME = "name"


@dataclass(slots=True)
class _Frame:
    part: _Part
    member: str = ""  # whose value comes
    at_member: bool = True  # a string that begins now is the name of a member


# Nothing can be matched in two ways, so that looking back ends at once. Possessive quantifiers would say so, but
# Python before 3.11.5 matches them wrongly.
_STRING = rb'[^"\\]*(?:\\.[^"\\]*)*'
_INSIDE_STRING = re.compile(_STRING, re.DOTALL)
_PLAIN = rb'[^"{}\[\]]*'
_BALANCED = _PLAIN + rb'(?:"' + _STRING + rb'"' + _PLAIN + rb")*"
for _ in range(3):
    # What is nested less deeply is passed in one go: bracket by bracket, a table takes ten times as long.
    _BALANCED = _PLAIN + rb'(?:(?:"' + _STRING + rb'"|[{\[]' + _BALANCED + rb"[}\]])" + _PLAIN + rb")*"
_TO_BRACKET = re.compile(_BALANCED, re.DOTALL)
_TOKEN = re.compile(rb'[ \t\r\n]+|[{}\[\],:"]|[^ \t\r\n{}\[\],:"]+')
_SCALAR = re.compile(rb'[^ \t\r\n{}\[\],:"]*')
_QUOTE, _BACKSLASH = b'"\\'


class Scan:
    """Reads one JSON text. ``feed`` the pieces, then ``finish``; each answers with what is to be passed on."""

    def __init__(self) -> None:
        self.answered: list[bytes | None] = []  # the ids of whole responses, None where there is none to be read
        self.batch = False
        self.kind: Kind | None = None  # of the message that is under way, or was the last
        self.deciding = False  # a message is under way of which nobody can say yet what it is
        self.opaque = False  # what has come is no message, or of no kind
        self.request = b""  # the id of a message that is a request
        self._frames: list[_Frame] = []
        self._begun = False
        self._deep = 0  # brackets open in what is not read into
        self._in_string = self._escaped = self._in_scalar = False
        self._reading = _Reading.PLAIN
        self._taken = bytearray()  # of what is being read, unless it is plain
        self._names: list[Name] = []  # of the message that is being decided on
        self._fed = 0
        self._message = -1
        self._message_at = 0
        self._asks = False  # there is a method, and an id would make the message a request
        self._id: bytes | None = None
        self._data = b""
        self._passed = 0  # how much of _data is in _pieces, or in _taken as a name
        self._pieces: list[Piece] = []

    def feed(self, data: bytes) -> list[Piece]:
        """Take the next bytes of the text."""
        self._data, self._passed = data, 0
        at = 0
        while at < len(data):
            if self._in_string:
                at = self._string(at)
            elif self._in_scalar:
                at = self._scalar(at)
            elif self._deep:
                at = self._deeply(at)
            else:
                at = self._token(at)
        if not self._holding:
            self._pass(at)
        self._fed += len(data)
        if self.deciding and self._fed - self._message_at > KIND_WITHIN:
            self.give_up()
        pieces, self._pieces = self._pieces, []
        return pieces

    def line_end(self) -> list[Piece]:
        """A line of the text has ended, and its end is passed on by somebody else."""
        self._data, self._passed = b"", 0
        if self._in_scalar:
            self._ended(0)
        elif self._in_string:  # no string goes over a line: this is no JSON
            self._give_up_reading()
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """The text has ended."""
        pieces = self.line_end()
        if self.deciding:
            self.give_up()
        return pieces

    def give_up(self) -> None:
        """What is under way is of no kind."""
        self.deciding = False
        self.opaque = True
        self._names.clear()

    # ---- what comes next

    @property
    def _holding(self) -> bool:
        return self._reading is _Reading.NAME and (self._in_string or self._in_scalar)

    def _token(self, at: int) -> int:
        match = _TOKEN.match(self._data, at)
        assert match is not None
        token, end = match[0], match.end()
        first = token[:1]
        if first == b'"':
            self._in_string = True
            self._begin(at, end)
        elif first in b"{[":
            self._open(first, at)
        elif first in b"}]":
            if self._frames:
                self._close(at)
        elif first == b",":
            if self._frames:
                self._frames[-1].at_member = True
        elif first not in b": \t\r\n":
            self._in_scalar = True
            self._begin(at, at)
            return at
        return end

    def _begin(self, at: int, end: int) -> None:
        """A string or a scalar begins: is it one to be read?"""
        self._reading = _Reading.PLAIN
        if not self._frames:
            self._begin_nothing()
            return
        frame = self._frames[-1]
        if frame.part is not _Part.BATCH and frame.at_member and self._in_string:
            self._reading = _Reading.MEMBER
        elif (frame.part, frame.member) in _NAMES:
            self._reading = _Reading.NAME
            self._pass(at)
        elif (frame.part, frame.member) == (_Part.MESSAGE, "method") and self._in_string:
            self._reading = _Reading.METHOD
        self._taken.clear()
        self._take(at, end)

    def _begin_nothing(self) -> None:
        self.opaque = self.opaque or not self._begun
        self._begun = True

    def _open(self, bracket: bytes, at: int) -> None:
        above = self._frames[-1] if self._frames else None
        part: _Part | None = None
        if above is None:
            if self._begun:
                self._deep = 1
                return
            self._begun = True
            part = _Part.MESSAGE if bracket == b"{" else _Part.BATCH
        elif bracket == b"{" and above.part is _Part.BATCH:
            part = _Part.MESSAGE
        elif bracket == b"{":
            part = _INNER.get((above.part, above.member))
        if part is None:
            self._deep = 1
            return
        self._frames.append(_Frame(part))
        self.batch = self.batch or part is _Part.BATCH
        if part is _Part.MESSAGE:
            self.kind, self.deciding, self._asks, self._id = None, True, False, None
            self._message, self._message_at = self._message + 1, self._fed + at

    def _close(self, at: int) -> None:
        if self._frames.pop().part is not _Part.MESSAGE:
            return
        if self.deciding and self._asks:
            self._is(Kind.NOTIFICATION, at)
        elif self.deciding:
            self.give_up()
        elif self.kind is Kind.RESPONSE:
            self.answered.append(self._id)

    def _deeply(self, at: int) -> int:
        match = _TO_BRACKET.match(self._data, at)
        assert match is not None
        at = match.end()
        if at == len(self._data):
            return at
        byte = self._data[at : at + 1]
        if byte == b'"':  # a string that is not whole here
            self._in_string, self._reading = True, _Reading.PLAIN
        else:
            self._deep += 1 if byte in b"{[" else -1
        return at + 1

    # ---- strings and scalars

    def _string(self, at: int) -> int:
        if self._escaped:
            self._escaped = False
            end = at + 1
        else:
            match = _INSIDE_STRING.match(self._data, at)
            assert match is not None
            end = match.end()
            if end < len(self._data):
                if self._data[end] == _QUOTE:
                    self._take(at, end + 1)
                    self._ended(end + 1)
                    return end + 1
                self._escaped = True  # by a backslash that is the last byte here
                end += 1
        self._take(at, end)
        return end

    def _scalar(self, at: int) -> int:
        match = _SCALAR.match(self._data, at)
        assert match is not None
        self._take(at, match.end())
        if match.end() < len(self._data):
            self._ended(match.end())
        return match.end()

    def _take(self, at: int, end: int) -> None:
        """Keep a piece of what is being read; too much of it is plain after all."""
        if self._reading is _Reading.PLAIN:
            return
        self._taken += self._data[at:end]
        if self._reading is _Reading.NAME:
            self._passed = end
        if len(self._taken) > (NAME_MAX if self._reading is _Reading.NAME else _MEMBER_MAX):
            self._give_up_reading()

    def _give_up_reading(self) -> None:
        if self._reading is _Reading.NAME:
            self._pieces.append(bytes(self._taken))
            if self.deciding and self._frames[-1].part is _Part.MESSAGE:
                self.give_up()
        elif self._reading is _Reading.MEMBER:
            self._frames[-1].member, self._frames[-1].at_member = "", False
        elif self._reading is _Reading.METHOD and self.deciding:
            self.give_up()
        self._reading = _Reading.PLAIN

    def _ended(self, end: int) -> None:
        """The string or scalar under way ends before *end*."""
        self._in_string = self._in_scalar = False
        reading, self._reading = self._reading, _Reading.PLAIN
        raw = bytes(self._taken)
        if reading is _Reading.NAME:
            frame = self._frames[-1]
            name = Name(_NAMES[frame.part, frame.member], raw, self._message, self.kind)
            self._pieces.append(name)
            if name.member == "id":
                self._id = raw
            if self.deciding:
                self._names.append(name)
                if name.member == "id":
                    self._has_id(end)
        elif reading is _Reading.MEMBER:
            frame = self._frames[-1]
            frame.member, frame.at_member = text(raw) or "", False
            if frame.part is _Part.MESSAGE and frame.member in ("result", "error") and not self._asks:
                self._is(Kind.RESPONSE, end)
        elif reading is _Reading.METHOD and self.deciding:
            self._has_method(text(raw) or "", end)

    def _pass(self, to: int) -> None:
        if to > self._passed:
            self._pieces.append(self._data[self._passed : to])
            self._passed = to

    # ---- what the message is

    def _has_id(self, end: int) -> None:
        if self._asks:
            self._is(Kind.REQUEST, end)

    def _has_method(self, method: str, end: int) -> None:
        if method == "notifications/progress":
            self._is(Kind.PROGRESS, end)
        elif method.startswith("notifications/"):
            self._is(Kind.NOTIFICATION, end)
        elif self._id is not None:
            self._is(Kind.REQUEST, end)
        else:
            self._asks = True

    def _is(self, kind: Kind, end: int) -> None:
        """What the message is shows before *end*."""
        if not self.deciding:
            return
        if self._fed + end - self._message_at > KIND_WITHIN:
            self.give_up()
            return
        self.kind, self.deciding = kind, False
        self.request = (self._id or b"") if kind is Kind.REQUEST else b""
        for name in self._names:
            name.kind = kind
        self._names.clear()


_INNER = {(_Part.MESSAGE, "params"): _Part.PARAMS, (_Part.PARAMS, "_meta"): _Part.META}
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,6})?")
_NAMES = {
    (_Part.MESSAGE, "id"): "id",
    (_Part.PARAMS, "progressToken"): "params.progressToken",
    (_Part.META, "progressToken"): "params._meta.progressToken",
}


def text(raw: bytes) -> str | None:
    """The string that *raw* is in JSON, or None."""
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def answers(response: bytes, request: bytes) -> bool:
    """True if some SDK takes a response of that id for one to *request*: they take ``"1"`` and ``1.0`` for ``1``."""
    return _loose(response) == _loose(request)


def _loose(raw: bytes) -> str | Decimal:
    shown = text(raw)
    shown = raw.decode("utf-8", "replace") if shown is None else shown
    return Decimal(shown) if _NUMBER.fullmatch(shown) else shown


def same(one: bytes, other: bytes) -> bool:
    """True for two scalars of one type and value: ``"a"`` and ``"\\u0061"``, but not ``1`` and ``"1"``, nor ``1.0``."""
    if one == other:
        return True
    first = text(one)
    return first is not None and first == text(other)
