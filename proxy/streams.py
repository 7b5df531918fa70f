"""Streams of server-sent events: which bytes may pass before the record is committed. Pure.

SDKs stop reading at a dialect's *terminal event* and act on it, whatever the framing does afterwards. So that
event and what follows is held back until the answer is recorded; every other event passes as soon as its
blank line is there, and none waits for the next one.

A stream's bytes are never changed, so nothing here keeps them: ``feed`` answers with a position. Only the
event that is not whole yet is looked at, and of a very long one just its beginning.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from proxy import mcp
from proxy.body import is_json, media_type
from proxy.dialects import BLANK, DIALECTS, LINE_END, Progress, parse_event

#: An event longer than this is not kept: whether it is the terminal one is judged as it passes by.
EVENT_MAX = 256 << 10
_LINE_ENDS = b"\r\n"
_LONG_OVERLAP = 80


class Hold:
    """Tells how much of an answer's body may pass to the client.

    A known dialect over ``text/event-stream``: whole events pass at once, the terminal event and what
    follows is held. Anything else passes as it comes (the framing holds the end, elsewhere). Keeps no
    bytes for the caller: the caller has them in its record.

    ``lacks``: what is wrong with an answer that ``close`` does not take for one.
    """

    def __init__(
        self, ending: str | None, content_type: bytes, encoding: bytes | None = None, asked: mcp.Call | None = None
    ) -> None:
        """*ending*: a dialect, or ``mcp`` with responses to come to what was *asked*."""
        self.ended = False  # the terminal event was seen whole
        self.strict = False  # a terminal event or response is expected: an end without it is a truncated answer
        self._fed = 0
        self.lacks = "the stream ended without its end marker"
        self._events: _Events | mcp.Ends | mcp.Whole | None = None
        self._inflated: _Inflated | None = None
        coding = (encoding or b"").strip().lower()
        plain = coding in {b"", b"identity"}
        kind = media_type(content_type)[0]
        if ending == "mcp" and asked is not None and is_json(kind) and plain:
            self._events = mcp.Whole(asked)
            self.lacks = "it responds to another request than this one"
        elif ending is None or kind != b"text/event-stream":
            return
        elif ending in DIALECTS:
            self._events = _Events(ending)
        elif ending == "mcp" and asked is not None:
            self._events = mcp.Ends(asked)
        if self._events is not None and not plain:
            if coding not in {b"gzip", b"x-gzip", b"deflate"}:
                self._events = None  # cannot be looked into
                return
            self._inflated = _Inflated(coding)
        self.strict = self._events is not None

    def feed(self, chunk: bytes) -> int:
        """Take the next bytes; say how many of all bytes fed so far may pass now. Never shrinks."""
        self._fed += len(chunk)
        if self._events is None:
            return self._fed
        passed = self._events.feed(chunk) if self._inflated is None else self._inflated.feed(chunk, self._events)
        self.ended = self._events.ended
        return passed

    def close(self) -> bool:
        """The body has ended; says ``ended``, with a last event counted that lacks only its blank line, or one that
        the dialect can do without."""
        if self._events is not None:
            self.ended = self._events.close()
        return self.ended

    @property
    def failed(self) -> bool:
        """The stream has told of an error, with which it may have ended well all the same."""
        return self._events is not None and self._events.failed


class _Events:
    """The events of a plain stream, fed in any pieces. ``passed``: how many bytes may pass."""

    def __init__(self, dialect: str) -> None:
        self.ended = False
        self.passed = 0
        self._dialect = DIALECTS[dialect]
        self._progress = Progress()
        self._fed = 0
        self._event = bytearray()  # the event that is not whole yet, from its first line on
        self._searched = 0  # no blank line begins before this place in it
        self._long: _Long | None = None

    def feed(self, chunk: bytes) -> int:
        if self.ended:
            return self.passed
        self._fed += len(chunk)
        if self._long is not None:
            rest = self._pass_by(chunk)
            if rest is None:
                return self.passed
            chunk = rest
        event = self._event
        event += chunk
        start = 0
        while True:
            start = self._skip(start)
            blank = BLANK.search(event, max(start, self._searched))
            if blank is None:
                break
            if self._ends(bytes(event[start : blank.start()])):
                self.ended = True
                self.passed = self._fed - len(event) + start
                event.clear()
                return self.passed
            start = self._searched = blank.end()
        del event[:start]
        self.passed = self._fed - len(event)
        # A blank line may have begun in the last three bytes.
        self._searched = max(0, len(event) - 3)
        if len(event) > EVENT_MAX:
            self._begin_long()
        return self.passed

    def close(self) -> bool:
        if not self.ended and self._event and self._long is None:
            self.ended = self._ends(bytes(self._event))
        elif self._dialect.unmarked and self._long is None:
            self.ended |= self._progress.all_finished
        return self.ended

    @property
    def failed(self) -> bool:
        return self._progress.failed

    def _skip(self, start: int) -> int:
        """Past line ends and comments before an event's first field: they are no event, and pass."""
        event = self._event
        while start < len(event):
            if event[start] in _LINE_ENDS:
                start += 1
            elif event[start] == 0x3A:  # a colon begins a comment
                line_end = LINE_END.search(event, start)
                if line_end is None:
                    break
                start = line_end.end()
            else:
                break
        return start

    def _ends(self, event: bytes) -> bool:
        if self._dialect.mark.search(event) is None:
            return False
        name, data = parse_event(event)
        return self._dialect.terminal(name, data, self._progress)

    # ---- events too long to be kept

    def _begin_long(self) -> None:
        event = bytes(self._event)
        name, _ = parse_event(event[: max(event.rfind(b"\n"), event.rfind(b"\r")) + 1])  # whole lines: no half name
        named = self._dialect.named
        if self._dialect.short or (named and name and name not in named):
            self._long = _Long(decided=True)
        else:
            self._long = _Long(decided=name in named, ends=name in named)
        self._event.clear()
        self._searched = 0
        self._look(event, self._fed)

    def _pass_by(self, chunk: bytes) -> bytes | None:
        """Take *chunk* as part of a long event; what follows the event, or None if it goes on (or ended all)."""
        assert self._long is not None
        tail = self._long.tail[-3:]
        blank = BLANK.search(tail + chunk)
        end = len(chunk) if blank is None else blank.end() - len(tail)
        self._look(chunk[:end], self._fed - len(chunk) + end)
        if blank is None:
            return None
        if self._long.ends:
            self.ended = True
            return None
        self._long = None
        return chunk[end:]

    def _look(self, piece: bytes, fed: int) -> None:
        assert self._long is not None
        looked = self._long.tail + piece
        if not self._long.decided and (ends := self._dialect.long_ends) is not None and ends.search(looked):
            self._long.ends = self._long.decided = True
        self._long.tail = looked[-_LONG_OVERLAP:]
        if self._long.decided and not self._long.ends:
            self.passed = fed


@dataclass(slots=True)
class _Long:
    """A long event as it passes by. Decided not to be the terminal one, it passes as it comes."""

    decided: bool
    ends: bool = False
    tail: bytes = b""


class _Inflated:
    """A compressed stream: finds how many compressed bytes give no more than what may pass.

    Byte by byte, because only so it is known which of them brought an event to its end; streams are small.
    """

    def __init__(self, coding: bytes) -> None:
        self._inflater = zlib.decompressobj(zlib.MAX_WBITS | (0 if coding == b"deflate" else 16))
        self._head = b"" if coding == b"deflate" else None  # until it is known whether zlib's head is there
        self._fed = 0
        self._given = 0
        self._passed = 0

    def feed(self, chunk: bytes, events: _Events | mcp.Ends | mcp.Whole) -> int:
        for n in range(len(chunk)):
            before = self._given
            text = self._inflate(chunk[n : n + 1])
            if text is None:
                return self._passed  # the client cannot read it either
            self._fed += 1
            self._given += len(text)
            passed = events.feed(text) if text else events.passed
            if passed >= self._given:
                self._passed = self._fed
            elif passed >= before:
                self._passed = self._fed - 1
        return self._passed

    def _inflate(self, data: bytes) -> bytes | None:
        if self._head is not None:
            self._head += data
        try:
            return self._inflater.decompress(data)
        except zlib.error:
            if self._head is None or len(self._head) > 2:
                return None
        # RFC 9110 says zlib; some send bare deflate, which shows in the first two bytes.
        data, self._head = self._head, None
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        return self._inflate(data)
