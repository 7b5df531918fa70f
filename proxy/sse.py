"""Server-sent events whose data are JSON-RPC messages, readdressed as they pass by. Pure.

A stream is fed in any pieces and given back in pieces. An event passes as soon as it is known what its message is;
one that asks the client something can be left out whole. Lines, line ends, comments and fields stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum

from proxy.jsonrpc import KIND_WITHIN, Kind, Name, Piece, Scan

_LINE_END = re.compile(rb"\r\n|\n|\r")
_DATA = b"data:"
_BOM = b"\xef\xbb\xbf"


class _Fate(Enum):
    """What becomes of an event."""

    OPEN = "open"
    PASSES = "passes"
    LEFT_OUT = "left out"


class _Line(Enum):
    """What kind of line is under way."""

    EMPTY = "empty"  # nothing of it has come
    BEGUN = "begun"  # too little to tell
    DATA = "data"
    OTHER = "other"


class Events:
    """A stream on its way to a client. *names*: what to write for a name. *left_out*: of the id of a server's request.

    Without these, all passes as it is.
    """

    def __init__(
        self,
        names: Callable[[Name], bytes] = lambda name: name.raw,
        left_out: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        self.answered: list[tuple[int, bytes | None]] = []  # responses: where their event begins, and their ids
        self._names = names
        self._left_out = left_out
        self._fed = 0
        self._started = 0  # where the event begins that is not whole yet
        self._scan = Scan()
        self._fate = _Fate.OPEN
        self._held: list[Piece] = []
        self._lines = 0  # bytes of this event that are no data
        self._line = _Line.EMPTY
        self._start = b""  # of a line, while it is too little
        self._first = True  # this is the stream's first line
        self._after_cr: _Fate | None = None  # a line feed that comes now belongs to the line of that fate
        self._out: list[bytes] = []

    @property
    def harmless(self) -> int:
        """How many of the bytes fed come before anything that is, or may become, a response."""
        scan = self._scan
        told = scan.kind not in (None, Kind.RESPONSE) or scan.opaque
        return self._fed if told and not scan.deciding and not scan.batch else self._started

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; what can go on by now."""
        at = 0
        if self._after_cr is not None and data[:1] == b"\n":
            at = 1
            self._line_feed(self._after_cr)
        if data:
            self._after_cr = None
        while at < len(data):
            match = _LINE_END.search(data, at)
            end = len(data) if match is None else match.start()
            if end > at:
                self._text(data[at:end])
            if match is None:
                break
            at = match.end()
            fate = self._line_ended(match[0], self._fed + at)
            if match[0] == b"\r" and at == len(data):
                self._after_cr = fate
        self._fed += len(data)
        return self._taken()

    def close(self) -> bytes:
        """The stream has ended: the rest."""
        if self._line is not _Line.EMPTY:
            self._end_text()
        self._event_ended(b"", self._fed)
        return self._taken()

    def _taken(self) -> bytes:
        out, self._out = self._out, []
        return b"".join(out)

    # ---- lines

    def _text(self, piece: bytes) -> None:
        """A piece of a line."""
        if self._line is _Line.EMPTY:
            self._line = _Line.BEGUN
        if self._line is _Line.BEGUN:
            self._start += piece
            marks = (_DATA, _BOM + _DATA) if self._first else (_DATA,)
            mark = next((mark for mark in marks if self._start.startswith(mark)), None)
            if mark is None and any(mark.startswith(self._start) for mark in marks):
                return
            piece, self._start = self._start, b""
            self._line = _Line.OTHER if mark is None else _Line.DATA
            if mark is not None:
                self._put([mark])
                piece = piece.removeprefix(mark)
        if self._line is _Line.DATA:
            self._put(self._scan.feed(piece))
        else:
            self._other(piece)

    def _other(self, piece: bytes) -> None:
        self._lines += len(piece)
        if self._lines > KIND_WITHIN:
            self._scan.give_up()
        self._put([piece])

    def _end_text(self) -> None:
        start, self._start = self._start, b""
        if start:
            self._other(start)
        if self._line is _Line.DATA:
            self._put(self._scan.line_end())
        self._line, self._first = _Line.EMPTY, False

    def _line_ended(self, line_end: bytes, at: int) -> _Fate:
        """A line has ended, and the place behind its end is *at*; the fate of what may follow that."""
        if self._line is _Line.EMPTY:
            return self._event_ended(line_end, at)
        self._end_text()
        self._put([line_end])
        return _Fate.OPEN

    def _line_feed(self, fate: _Fate) -> None:
        if fate is _Fate.OPEN:
            self._put([b"\n"])
            return
        # The event has ended with the carriage return before it.
        self._started += 1
        if fate is _Fate.PASSES:
            self._out.append(b"\n")

    # ---- events

    def _event_ended(self, line_end: bytes, at: int) -> _Fate:
        self._put([*self._scan.finish(), line_end])
        if self._fate is _Fate.OPEN:
            self._fate = _Fate.PASSES
            self._release()
        self.answered += [(self._started, each) for each in self._scan.answered]
        fate = self._fate
        self._scan, self._fate, self._lines, self._started, self._first = Scan(), _Fate.OPEN, 0, at, False
        return fate

    def _put(self, pieces: list[Piece]) -> None:
        self._held += pieces
        scan = self._scan
        if self._fate is _Fate.OPEN and not scan.deciding:
            if scan.batch or scan.opaque:
                self._fate = _Fate.PASSES
            elif scan.kind is Kind.REQUEST and self._left_out(scan.request):
                self._fate = _Fate.LEFT_OUT
            elif scan.kind is not None:
                self._fate = _Fate.PASSES
        self._release()

    def _release(self) -> None:
        if self._fate is _Fate.LEFT_OUT:
            self._held.clear()
        elif self._fate is _Fate.PASSES and not self._scan.deciding:
            self._out += [self._names(piece) if isinstance(piece, Name) else piece for piece in self._held]
            self._held.clear()
