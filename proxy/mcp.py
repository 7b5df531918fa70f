"""MCP over streamable HTTP: calls, and answers that are given to another request than they were made for. Pure.

A ``tools/call`` is a step; its answer names the request by a JSON-RPC id that the agent's SDK counts up. An attempt
that replays or joins an answer counts otherwise, so the answer is *readdressed*: the ids of responses, and the tokens
of progress notifications, become those of the request that it is given to; everything else stays byte for byte.

A server may ask back within an answer (``elicitation/create``, ``sampling/createMessage``). Where nobody is there any
more to hear what the agent says to that, such requests are left out. To one that is still waiting for it, the way of
the agent's response is found by the request's id, which says to which exchange it belongs (``Through``).

What is not done: an answer under a Content-Encoding stays as it is, and so do ids in a batch whose requests have equal
ids or other ones than those that were sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from proxy.body import Pairs, is_json, media_type, read_json
from proxy.jsonrpc import Kind, Name, Piece, Scan, answers, same, text
from proxy.message import Headers, Request
from proxy.sse import Events

SESSION = b"mcp-session-id"
#: Of a refusal. Of the numbers that MCP leaves to implementations (-32000 to -32019), one that no SDK is known to use.
ERROR = -32010
_EVENTS = b"text/event-stream"
_HEADERS = b"mcp-"


# ---- requests


@dataclass(frozen=True, slots=True)
class Call:
    """What an answer has to name: ids and progress tokens of the request's messages, as JSON, None where there is none.

    ``session``: the client's, by the header.
    """

    ids: tuple[bytes | None, ...]
    tokens: tuple[bytes | None, ...]
    batch: bool = False
    session: bytes | None = None

    @property
    def expected(self) -> list[bytes]:
        """The ids that responses will have."""
        return [each for each in self.ids if each is not None]


def looks_like_one(method: str, headers: Headers) -> bool:
    """True if the head alone says that a JSON-RPC request of MCP may follow: its SDKs take events, or name MCP."""
    kinds = [media_type(value)[0] for name, value in headers if name.lower() == b"content-type"]
    return method == "POST" and any(map(is_json, kinds)) and _of_mcp(headers)


def call(method: str, headers: Headers, body: bytes) -> Call | None:
    """The call that a request of MCP makes, None for anything else, and where there is nothing to answer."""
    if method != "POST" or b"jsonrpc" not in body:
        return None
    if not looks_like_one(method, headers) and b"tools/call" not in body:
        return None
    messages, batch = _messages(body)
    methods = [_get(each, "method") for each in messages]
    if not (_of_mcp(headers) or "tools/call" in methods):
        return None
    asked = [isinstance(method, str) for method in methods]
    ids = tuple(_scalar(_get(each, "id")) if asks else None for each, asks in zip(messages, asked, strict=True))
    tokens = tuple(_scalar(_get(_get(_get(each, "params"), "_meta"), "progressToken")) for each in messages)
    found = Call(ids, tokens, batch, _header(headers, SESSION))
    return found if found.expected else None


def _of_mcp(headers: Headers) -> bool:
    return any(
        name.lower().startswith(_HEADERS) or (name.lower() == b"accept" and _EVENTS in value.lower())
        for name, value in headers
    )


def _messages(body: bytes) -> tuple[list[Any], bool]:
    """The messages of a body, none if it is no JSON-RPC; and whether it is a batch."""
    found = read_json(body)
    if found is None:
        return [], False
    batch = isinstance(found.tree, list)
    messages = found.tree if batch else [found.tree]
    return (messages if all(_get(each, "jsonrpc") == "2.0" for each in messages) else []), batch


def _get(node: Any, member: str) -> Any:
    """The member of an object; of equal ones the last, as most readers take it."""
    if isinstance(node, Pairs):
        return next((value for name, value in reversed(node.pairs) if name == member), None)
    return node.get(member) if isinstance(node, dict) else None


def _scalar(value: Any) -> bytes | None:
    if isinstance(value, str):
        return json.dumps(value).encode("ascii")
    return value if isinstance(value, bytes) else None  # a number, as it was written


def _header(headers: Headers, wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name.lower() == wanted), None)


def asked_anew(first: Request, now: Request, by: Call) -> Request:
    """What went first for a step, as the request *now* asks for it: its ids, and its session and protocol version."""
    scan = Scan()

    def written(name: Name) -> bytes:
        names = {"id": by.ids, "params._meta.progressToken": by.tokens}.get(name.member, ())
        ours = names[name.message] if name.message < len(names) else None
        return name.raw if ours is None or name.kind is not Kind.REQUEST or same(name.raw, ours) else ours

    pieces = [*scan.feed(first.body), *scan.finish()]
    kept = [pair for pair in first.headers if not pair[0].lower().startswith(_HEADERS)]
    fresh = [pair for pair in now.headers if pair[0].lower().startswith(_HEADERS)]
    return replace(first, headers=(*kept, *fresh), body=_joined(pieces, written))


# ---- refusals


def refused(by: Call, headers: Headers, problem: bytes) -> tuple[Headers, bytes]:
    """An answer of our own, as the SDKs of MCP show it to the model: JSON-RPC errors, to be given with status 200.

    Of an HTTP error they show nothing. *problem*: problem JSON.
    """
    data = json.loads(problem)
    message = data.get("detail", "") if isinstance(data, dict) else ""
    error = json.dumps({"code": ERROR, "message": message, "data": data}).encode("ascii")
    errors = [b'{"jsonrpc":"2.0","id":' + each + b',"error":' + error + b"}" for each in by.ids if each is not None]
    named = tuple(
        (name, b"application/json" if name.lower() == b"content-type" else value)
        for name, value in headers
        if name.lower() != b"content-length"
    )
    return named, b"[" + b",".join(errors) + b"]" if by.batch else errors[0]


# ---- the server's own requests


@dataclass(frozen=True, slots=True)
class Through:
    """A request of a server, in an exchange that another session than the client's began."""

    exchange: UUID
    id: bytes  # as JSON

    def written(self) -> bytes:
        """An id that no server gives."""
        return json.dumps(f"twiceshy:{self.exchange}:{self.id.decode('utf-8', 'replace')}").encode("ascii")


_THROUGH = re.compile(r"twiceshy:([0-9a-f-]{36}):(.+)", re.DOTALL)


def responded(method: str, headers: Headers, body: bytes) -> bytes | None:
    """The id of the server's request that a client responds to, as JSON; None if it does no such thing."""
    if not looks_like_one(method, headers) or b"jsonrpc" not in body:
        return None
    messages, batch = _messages(body)
    if batch or not messages or _get(messages[0], "method") is not None:
        return None
    return _scalar(_get(messages[0], "id"))


def through(identifier: bytes) -> Through | None:
    """What ``Through.written`` wrote, or None."""
    match = _THROUGH.fullmatch(text(identifier) or "")
    return None if match is None else Through(UUID(match[1]), match[2].encode("utf-8"))


def led_back(response: Request, to: Through, session: bytes | None) -> Request:
    """A client's *response*, as it would have been given in the *session* that the server asked in."""
    scan = Scan()
    pieces = [*scan.feed(response.body), *scan.finish()]
    body = _joined(pieces, lambda name: to.id if name.member == "id" else name.raw)
    return replace(response, headers=_in_session(response.headers, session), body=body)


def _in_session(headers: Headers, session: bytes | None) -> Headers:
    """*headers* with the session where one stood."""
    return tuple(
        (name, session if name.lower() == SESSION and session is not None else value)
        for name, value in headers
        if name.lower() != SESSION or session is not None
    )


# ---- answers


class Names:
    """Which names an answer gets that was made for *old* and is given to *new*.

    *old* None: not known, and what responds in it responds to that.
    """

    def __init__(self, new: Call, old: Call | None, exchange: UUID | None = None) -> None:
        self._new = new
        self._old = old
        self._exchange = exchange
        self._ids = _map(old.ids, new.ids) if new.batch and old is not None else {}
        self._tokens = _map(old.tokens, new.tokens) if new.batch and old is not None else {}

    def __call__(self, name: Name) -> bytes:
        ours: bytes | None = None
        if name.kind is Kind.RESPONSE and name.member == "id" and name.raw != b"null":
            ours = self._ids.get(plain(name.raw)) if self._new.batch else self._of_one(name.raw)
        elif name.kind is Kind.PROGRESS and name.member == "params.progressToken":
            ours = self._tokens.get(plain(name.raw)) if self._new.batch else self._new.tokens[0]
        elif name.kind is Kind.REQUEST and name.member == "id" and self._exchange is not None:
            return Through(self._exchange, name.raw).written()
        return name.raw if ours is None or same(name.raw, ours) else ours

    def _of_one(self, ident: bytes) -> bytes | None:
        new, old = self._new.ids[0], None if self._old is None else self._old.ids[0]
        if old is None or answers(ident, old):
            return new
        # What responded to another request must not seem to respond to this one.
        return json.dumps(f"twiceshy:{plain(ident)!r}").encode("ascii") if answers(ident, new or b"") else None


def plain(raw: bytes) -> str | bytes:
    """One value for all ways of writing a name."""
    return raw if (string := text(raw)) is None else string


def _map(old: tuple[bytes | None, ...], new: tuple[bytes | None, ...]) -> dict[str | bytes, bytes]:
    """By position; empty where that says nothing: equal names, or other numbers of them."""
    pairs = [(one, other) for one, other in zip(old, new, strict=False) if one is not None and other is not None]
    found = {plain(one): other for one, other in pairs}
    return found if len(old) == len(new) and len(found) == len([each for each in old if each is not None]) else {}


class Text:
    """A JSON answer, fed in any pieces and given back readdressed."""

    def __init__(self, names: Callable[[Name], bytes]) -> None:
        self._names = names
        self._scan = Scan()
        self._held: list[Piece] = []

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; what can go on by now."""
        return self._released(self._scan.feed(data))

    def close(self) -> bytes:
        """The body has ended: the rest."""
        return self._released(self._scan.finish())

    def _released(self, pieces: list[Piece]) -> bytes:
        self._held += pieces
        if self._scan.deciding:
            return b""
        held, self._held = self._held, []
        return _joined(held, self._names)


def _joined(pieces: list[Piece], names: Callable[[Name], bytes]) -> bytes:
    return b"".join(names(piece) if isinstance(piece, Name) else piece for piece in pieces)


def readdressed(
    headers: Headers, new: Call, old: Call | None, *, exchange: UUID | None, heard: Callable[[bytes], bool]
) -> tuple[Headers, Text | Events | None]:
    """An answer with *headers* for *new*: its headers, and what its body is to be led through, None: as it is.

    *old*: the call that it was made for, if that is known. *exchange*: the one that it comes from, if that goes on.
    *heard*: of the id of a server's request in it, whether to leave that out.
    """
    headers = _in_session(headers, new.session)
    coding = _header(headers, b"content-encoding")
    if coding is not None and coding.strip().lower() not in (b"", b"identity"):
        return headers, None
    names = Names(new, old, exchange)
    kind = media_type(_header(headers, b"content-type"))[0]
    if kind == _EVENTS:
        body: Text | Events = Events(names, heard)
    elif is_json(kind):
        body = Text(names)
    else:
        return headers, None
    return tuple(pair for pair in headers if pair[0].lower() != b"content-length"), body


def responding(headers: Headers) -> tuple[Text | Events, set[str | bytes]]:
    """What an answer with *headers* is to be led through, and to which requests it responds, as far as it was."""
    found: set[str | bytes] = set()

    def note(name: Name) -> bytes:
        if name.kind is Kind.RESPONSE and name.member == "id" and name.raw != b"null":
            found.add(plain(name.raw))
        return name.raw

    events = media_type(_header(headers, b"content-type"))[0] == _EVENTS
    return (Events(note) if events else Text(note)), found


class Due:
    """The responses that a call still waits for."""

    def __init__(self, asked: Call) -> None:
        self._ids = asked.expected

    def __bool__(self) -> bool:
        return bool(self._ids)

    def answered(self, ident: bytes | None) -> bool:
        """There is a response of this id. True: it is one of those. One that names no request is taken for one."""
        for due in self._ids:
            if ident in (None, b"null") or answers(ident or b"", due):
                self._ids.remove(due)
                return True
        return False


class Ends:
    """Tells how much of a stream of events may pass before its record: all but the last response, and what follows."""

    failed = False  # an error is a response, and final

    def __init__(self, asked: Call) -> None:
        self.ended = False  # the last response was seen whole
        self.passed = 0
        self._due = Due(asked)
        self._events = Events()

    def feed(self, chunk: bytes) -> int:
        """Take the next bytes; ``passed``: how many of all fed so far may pass. Never shrinks."""
        if not self.ended:
            self._events.feed(chunk)
            self.passed = self._look(self._events.harmless)
        return self.passed

    def close(self) -> bool:
        """The body has ended; says ``ended``, with a last event counted that lacks only its blank line."""
        if not self.ended:
            self._events.close()
            self._look(0)
        return self.ended

    def _look(self, harmless: int) -> int:
        """Take the new responses: where the last one begins that is waited for, or else *harmless*."""
        found, self._events.answered = self._events.answered, []
        for at, ident in found:
            self._due.answered(ident)
            if not self._due:
                self.ended = True
                return at
        return harmless


class Whole:
    """Tells whether a JSON answer is one to a call: what responds to other requests, and not to this, is not."""

    failed = False
    ended = False  # no event of it ends it before its last byte

    def __init__(self, asked: Call) -> None:
        self.passed = 0
        self._due = Due(asked)
        self._scan = Scan()

    def feed(self, chunk: bytes) -> int:
        """Take the next bytes: they may pass."""
        self._scan.feed(chunk)
        self.passed += len(chunk)
        return self.passed

    def close(self) -> bool:
        """The body has ended; says whether it is an answer."""
        self._scan.finish()
        found = self._scan.answered
        return not found or any(self._due.answered(ident) for ident in found)
