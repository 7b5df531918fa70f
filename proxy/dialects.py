"""What streams of server-sent events say in each dialect: that they are over, that they failed, what they cost. Pure.

A *terminal* event is the one at which SDKs stop reading. An *error* inside a stream is told by an event as well, of
which some upstreams go on to a proper end: such an answer has a good status and is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from proxy.body import media_type, undo

#: No count of tokens is larger: the journal has 63 bits for it.
USAGE_MAX = (1 << 63) - 1

# A CRLF is one line end, never two.
LINE_END = re.compile(rb"\r\n?|\n")
BLANK = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
_BOM = b"\xef\xbb\xbf"


def parse_event(event: bytes) -> tuple[bytes, bytes]:
    """Name and data of an event without its blank line, as the specification of server-sent events says."""
    name = b""
    data: list[bytes] = []
    for line in LINE_END.split(event.removeprefix(_BOM)):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value
        elif field == b"data":
            data.append(value)
    return name, b"\n".join(data)


# ---- how a stream goes


@dataclass(slots=True)
class Progress:
    """What a stream has said so far: its answers may end one by one."""

    begun: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    failed: bool = False

    def note(self, answers: Any, reason: str) -> None:
        """Note which of *answers* are there, and which of them give a *reason* for their end."""
        for answer in answers if isinstance(answers, list) else ():
            if isinstance(answer, dict):
                index = str(answer.get("index", 0))
                self.begun.add(index)
                if answer.get(reason):
                    self.finished.add(index)
                    self.failed |= answer[reason] == "error"

    @property
    def all_finished(self) -> bool:
        return bool(self.finished) and self.finished >= self.begun


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a stream of this kind goes."""

    mark: re.Pattern[bytes]  # what an event that says anything of it contains, whatever else it does
    terminal: Callable[[bytes, bytes, Progress], bool]  # of name and data of an event that contains it
    named: frozenset[bytes] = frozenset()  # names of terminal events, where events have names
    short: bool = False  # a terminal event is never longer than can be kept
    unmarked: bool = False  # some servers leave the terminal event out: when all answers are finished, it is whole
    #: Anywhere in an event too long to be kept: the type, or a reason. Inside a text the quotes have backslashes.
    long_ends: re.Pattern[bytes] | None = None


def _chat_ends(name: bytes, data: bytes, progress: Progress) -> bool:  # noqa: ARG001
    if data.strip() == b"[DONE]":
        return True
    message = loads(data)
    if isinstance(message, dict):
        progress.failed |= bool(message.get("error"))
        progress.note(message.get("choices"), "finish_reason")
    return False


def _typed(names: frozenset[bytes], failures: frozenset[str]) -> Callable[[bytes, bytes, Progress], bool]:
    texts = frozenset(name.decode() for name in names)

    def ends(name: bytes, data: bytes, progress: Progress) -> bool:
        # Cut data is no end, whatever the name says: the SDK would fail on it.
        message = loads(data)
        if not isinstance(message, dict):
            return False
        progress.failed |= message.get("type") in failures or name.decode("latin-1") in failures
        return name in names or message.get("type") in texts

    return ends


def _gemini_ends(name: bytes, data: bytes, progress: Progress) -> bool:  # noqa: ARG001
    message = loads(data)
    if not isinstance(message, dict):
        return False
    progress.failed |= bool(message.get("error"))
    feedback = message.get("promptFeedback")
    if isinstance(feedback, dict) and feedback.get("blockReason"):
        return True  # a refused prompt has no candidates, and so no finishReason
    progress.note(message.get("candidates"), "finishReason")
    return progress.all_finished


_RESPONSES = frozenset({b"response.completed", b"response.failed", b"response.incomplete"})
_ANTHROPIC = frozenset({b"message_stop"})

DIALECTS: dict[str, Dialect] = {
    # Every event is looked into, as Gemini's: it takes all answers to know which of them is the last to finish.
    "openai_chat": Dialect(re.compile(rb'\[DONE\]|"(?:choices|error)"'), _chat_ends, short=True, unmarked=True),
    "openai_responses": Dialect(
        re.compile(rb"response\.(?:completed|failed|incomplete)|error"),
        _typed(_RESPONSES, frozenset({"response.failed", "error"})),
        _RESPONSES,
        long_ends=re.compile(rb'"type"\s{0,8}:\s{0,8}"response\.(?:completed|failed|incomplete)"'),
    ),
    "anthropic": Dialect(
        re.compile(rb"message_stop|error"),
        _typed(_ANTHROPIC, frozenset({"error"})),
        _ANTHROPIC,
        long_ends=re.compile(rb'"type"\s{0,8}:\s{0,8}"message_stop"'),
    ),
    "gemini": Dialect(
        re.compile(rb'"(?:finishReason|blockReason|candidates|error)"'),
        _gemini_ends,
        long_ends=re.compile(rb'"finishReason"\s{0,8}:\s{0,8}"[A-Z]'),
    ),
}


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
        texts = [parse_event(event)[1] for event in BLANK.split(body) if b'"usage' in event]
    else:
        texts = [body] if b'"usage' in body else []
    for text in texts:
        found = loads(text)
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


def loads(data: bytes) -> Any:
    """*data* as JSON, or None for what is none."""
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
