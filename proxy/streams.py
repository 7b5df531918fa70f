"""Streams of server-sent events: which bytes may pass before the record is committed. Pure.

SDKs stop reading at a dialect's *terminal event* and act on it, whatever the framing does afterwards. So that
event and what follows is held back until the answer is recorded; every other event passes as soon as its
blank line is there, and none waits for the next one.

A stream's bytes are never changed, so nothing here keeps them: ``feed`` answers with a position. Only the
event that is not whole yet is looked at, and of a very long one just its beginning.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from proxy.body import media_type, undo

#: An event longer than this is not kept: whether it is the terminal one is judged as it passes by.
EVENT_MAX = 256 << 10
#: No count of tokens is larger: the journal has 63 bits for it.
USAGE_MAX = (1 << 63) - 1

# Atomic groups: a CRLF is one line end, never two.
_LINE_END = re.compile(rb"(?>\r\n|\n|\r)")
_BLANK = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_ENDS = b"\r\n"
_BOM = b"\xef\xbb\xbf"


def parse_event(event: bytes) -> tuple[bytes, bytes]:
    """Name and data of an event without its blank line, as the specification of server-sent events says."""
    name = b""
    data: list[bytes] = []
    for line in _LINE_END.split(event.removeprefix(_BOM)):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value
        elif field == b"data":
            data.append(value)
    return name, b"\n".join(data)


# ---- dialects


@dataclass(slots=True)
class _Progress:
    """What a stream has said so far: Gemini's candidates end one by one."""

    candidates: set[str]
    finished: set[str]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a stream of this kind ends, and where it counts tokens."""

    mark: re.Pattern[bytes]  # what a terminal event contains, whatever else it does
    terminal: Callable[[bytes, bytes, _Progress], bool]  # of name and data of an event that contains it
    named: frozenset[bytes] = frozenset()  # names of terminal events, where events have names
    short: bool = False  # a terminal event is never longer than EVENT_MAX


def _chat_ends(name: bytes, data: bytes, progress: _Progress) -> bool:  # noqa: ARG001
    return data.strip() == b"[DONE]"


def _typed(names: frozenset[bytes]) -> Callable[[bytes, bytes, _Progress], bool]:
    texts = frozenset(name.decode() for name in names)

    def ends(name: bytes, data: bytes, progress: _Progress) -> bool:  # noqa: ARG001
        # Cut data is no end, whatever the name says: the SDK would fail on it.
        message = _loads(data)
        if not isinstance(message, dict):
            return False
        return name in names or message.get("type") in texts

    return ends


def _gemini_ends(name: bytes, data: bytes, progress: _Progress) -> bool:  # noqa: ARG001
    message = _loads(data)
    if not isinstance(message, dict):
        return False
    feedback = message.get("promptFeedback")
    if isinstance(feedback, dict) and feedback.get("blockReason"):
        return True  # a refused prompt has no candidates, and so no finishReason
    candidates = message.get("candidates")
    for candidate in candidates if isinstance(candidates, list) else ():
        if isinstance(candidate, dict):
            index = str(candidate.get("index", 0))
            progress.candidates.add(index)
            if candidate.get("finishReason"):
                progress.finished.add(index)
    return bool(progress.finished) and progress.finished >= progress.candidates


_RESPONSES = frozenset({b"response.completed", b"response.failed", b"response.incomplete"})
_ANTHROPIC = frozenset({b"message_stop"})

DIALECTS: dict[str, Dialect] = {
    "openai_chat": Dialect(re.compile(rb"\[DONE\]"), _chat_ends, short=True),
    "openai_responses": Dialect(
        re.compile(rb"response\.(?:completed|failed|incomplete)"), _typed(_RESPONSES), _RESPONSES
    ),
    "anthropic": Dialect(re.compile(rb"message_stop"), _typed(_ANTHROPIC), _ANTHROPIC),
    # Every event is looked into: it takes all candidates to know which of them is the last to finish.
    "gemini": Dialect(re.compile(rb'"(?:finishReason|blockReason|candidates)"'), _gemini_ends),
}
#: For events too long to be kept: the type, or a reason, anywhere in them. Inside a text the quotes have backslashes.
_LONG_ENDS: dict[str, re.Pattern[bytes]] = {
    "openai_responses": re.compile(rb'"type"\s{0,8}:\s{0,8}"response\.(?:completed|failed|incomplete)"'),
    "anthropic": re.compile(rb'"type"\s{0,8}:\s{0,8}"message_stop"'),
    "gemini": re.compile(rb'"finishReason"\s{0,8}:\s{0,8}"[A-Z]'),
}
_LONG_OVERLAP = 80


# ---- holding back


class Hold:
    """Tells how much of an answer's body may pass to the client.

    A known dialect over ``text/event-stream``: whole events pass at once, the terminal event and what
    follows is held. Anything else passes as it comes (the framing holds the end, elsewhere). Keeps no
    bytes for the caller: the caller has them in its record.
    """

    def __init__(self, dialect: str | None, content_type: bytes, encoding: bytes | None = None) -> None:
        self.ended = False  # the terminal event was seen whole
        self.strict = False  # a terminal event is expected: an end without it is a truncated answer
        self._fed = 0
        self._events: _Events | None = None
        self._inflated: _Inflated | None = None
        coding = (encoding or b"").strip().lower()
        if dialect in DIALECTS and media_type(content_type)[0] == b"text/event-stream":
            if coding in {b"gzip", b"x-gzip", b"deflate"}:
                self._inflated = _Inflated(coding)
            elif coding not in {b"", b"identity"}:
                return  # cannot be looked into
            self._events = _Events(dialect)
            self.strict = True

    def feed(self, chunk: bytes) -> int:
        """Take the next bytes; say how many of all bytes fed so far may pass now. Never shrinks."""
        self._fed += len(chunk)
        if self._events is None:
            return self._fed
        passed = self._events.feed(chunk) if self._inflated is None else self._inflated.feed(chunk, self._events)
        self.ended = self._events.ended
        return passed

    def close(self) -> bool:
        """The body has ended; says ``ended``, with a last event counted that lacks only its blank line."""
        if self._events is not None:
            self.ended = self._events.close()
        return self.ended


class _Events:
    """The events of a plain stream, fed in any pieces. ``passed``: how many bytes may pass."""

    def __init__(self, dialect: str) -> None:
        self.ended = False
        self.passed = 0
        self._dialect = DIALECTS[dialect]
        self._long_ends = _LONG_ENDS.get(dialect)
        self._progress = _Progress(set(), set())
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
            blank = _BLANK.search(event, max(start, self._searched))
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
        return self.ended

    def _skip(self, start: int) -> int:
        """Past line ends and comments before an event's first field: they are no event, and pass."""
        event = self._event
        while start < len(event):
            if event[start] in _LINE_ENDS:
                start += 1
            elif event[start] == 0x3A:  # a colon begins a comment
                line_end = _LINE_END.search(event, start)
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
        blank = _BLANK.search(tail + chunk)
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
        if not self._long.decided and self._long_ends is not None and self._long_ends.search(looked):
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

    def feed(self, chunk: bytes, events: _Events) -> int:
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


# ---- counting tokens


def usage(dialect: str | None, content_type: bytes, body: bytes, encoding: bytes | None = None) -> int:
    """The provider's count of tokens in all, 0 if unknown. Never raises."""
    if dialect not in DIALECTS:
        return 0
    try:
        coding = (encoding or b"").strip().lower()
        text = body if coding in {b"", b"identity"} else undo(coding, body)
        counts: dict[str, int] = {}
        for message in _messages(content_type, text or b""):
            _note(dialect, message, counts)
        if "total" in counts:
            return min(counts["total"], USAGE_MAX)
        return min(sum(counts.values()), USAGE_MAX)
    except (ValueError, RecursionError, MemoryError):
        return 0


def _messages(content_type: bytes, body: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of an answer that may speak of usage: itself, or its events' data."""
    if media_type(content_type)[0] == b"text/event-stream":
        texts = [parse_event(event)[1] for event in _BLANK.split(body) if b'"usage' in event]
    else:
        texts = [body] if b'"usage' in body else []
    for text in texts:
        found = _loads(text)
        for message in found if isinstance(found, list) else [found]:
            if isinstance(message, dict):
                yield message


#: Where the sum stands, and of what it is made where there is none. A later count replaces an earlier one.
_TOTALS = ("total_tokens", "totalTokenCount")
_PARTS = (
    ("input_tokens", "prompt_tokens"),
    ("output_tokens", "completion_tokens"),
    ("cache_creation_input_tokens",),
    ("cache_read_input_tokens",),
)


def _note(dialect: str, message: dict[str, Any], counts: dict[str, int]) -> None:
    for holder in (message, message.get("response"), message.get("message")):
        if not isinstance(holder, dict):
            continue
        said = holder.get("usageMetadata" if dialect == "gemini" else "usage")
        if not isinstance(said, dict):
            continue
        for name in _TOTALS:
            if type(said.get(name)) is int:
                counts["total"] = max(0, said[name])
        for names in _PARTS:
            for name in names:
                if type(said.get(name)) is int:
                    counts[names[0]] = max(0, said[name])


def _loads(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
