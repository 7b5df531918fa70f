"""Messages of JSON-RPC as various servers write them, and what leads them through."""

import json
from typing import Any
from uuid import UUID

from hypothesis import strategies as st

from proxy.mcp import Call, Names, Text
from proxy.sse import Events

EXCHANGE = UUID("11111111-2222-4333-8444-555555555555")


def one(ident: bytes | None = b"7", token: bytes | None = b"70", session: bytes | None = None) -> Call:
    return Call((ident,), (token,), session=session)


def many(*ids: bytes | None, tokens: tuple[bytes | None, ...] = ()) -> Call:
    return Call(ids, tokens or (None,) * len(ids), batch=True)


def led(through: Text | Events, data: bytes, cuts: tuple[int, ...] = ()) -> bytes:
    """*data* led through in pieces."""
    out, at = b"", 0
    for cut in (*sorted(cut % (len(data) + 1) for cut in cuts), len(data)):
        out += through.feed(data[at:cut])
        at = cut
    return out + through.close()


def each_byte(through: Text | Events, data: bytes) -> bytes:
    return led(through, data, tuple(range(len(data))))


def text(new: Call, old: Call | None = None, exchange: UUID | None = None) -> Text:
    return Text(Names(new, old, exchange))


def replayed(new: Call, old: Call | None = None) -> Events:
    return Events(Names(new, old), lambda _: True)


def response(ident: object = 7, **result: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": ident, "result": result}).encode()


# ---- messages with a place for a name, as various servers write them

_spaces = st.sampled_from([b"", b"", b" ", b"\t", b" \n "])
_keys = {"id": [b'"id"', rb'"\u0069d"', rb'"i\u0064"'], "method": [b'"method"', rb'"meth\u006fd"']}
_members = st.sampled_from(["id", "method", "result", "params", "progressToken", "é"])
_decoys = ['"id"', '{"id":1}', '"{\\"id\\": 1}"', '[{"id":1,"result":{}}]', '"\\\\"', '"]}\\""', "-1.5e3", "null"]
_nested = st.recursive(
    st.sampled_from(_decoys) | st.text(max_size=8).map(json.dumps),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: "[" + ",".join(each) + "]")
        | st.lists(st.tuples(_members, inner), max_size=3).map(
            lambda pairs: "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in pairs) + "}"
        )
    ),
    max_leaves=6,
)
nested = _nested.map(str.encode)
#: What stands in for a name while a message is made.
PLACE = b"\x00"


@st.composite
def objects(draw: st.DrawFn, members: list[tuple[str, bytes]]) -> bytes:
    """These members in any order, with spaces and escapes."""
    out = []
    for name, value in draw(st.permutations(members)):
        key = draw(st.sampled_from(_keys.get(name, [json.dumps(name).encode()])))
        out.append(draw(_spaces) + key + draw(_spaces) + b":" + draw(_spaces) + value + draw(_spaces))
    return b"{" + b",".join(out) + b"}"


@st.composite
def responses(draw: st.DrawFn) -> bytes:
    member = draw(st.sampled_from(["result", "error"]))
    extra = [("x", draw(nested))] if draw(st.booleans()) else []
    return draw(objects([("jsonrpc", b'"2.0"'), ("id", PLACE), (member, draw(nested)), *extra]))


@st.composite
def progress(draw: st.DrawFn) -> bytes:
    params = draw(objects([("progressToken", PLACE), ("progress", b"1"), ("_meta", draw(nested))]))
    return draw(objects([("jsonrpc", b'"2.0"'), ("method", b'"notifications/progress"'), ("params", params)]))


@st.composite
def notifications(draw: st.DrawFn) -> bytes:
    params = draw(objects([("progressToken", b"70"), ("requestId", b"3"), ("data", draw(nested))]))
    return draw(objects([("jsonrpc", b'"2.0"'), ("method", b'"notifications/message"'), ("params", params)]))


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    meta = b'{"progressToken": 70}'
    params = draw(objects([("_meta", meta), ("progressToken", b"70"), ("message", draw(nested))]))
    return draw(objects([("jsonrpc", b'"2.0"'), ("id", b"7"), ("method", b'"elicitation/create"'), ("params", params)]))


scalars = st.sampled_from([b"1", b"7", b"-3", b"1.0", b'"1"', b'"7"', rb'"\u0037"', '"é"'.encode(), b'"a\\"b"', b'""'])
cuts = st.lists(st.integers(0, 1 << 20), max_size=6).map(tuple)


@st.composite
def events(draw: st.DrawFn, message: bytes) -> bytes:
    """An event whose data is *message*."""
    end = draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    space = draw(st.sampled_from([b" ", b""]))
    before = draw(st.lists(st.sampled_from([b"event: message", b"id: 9", b": ping", b"retry: 5", b"data"]), max_size=2))
    lines = [*before, *(b"data:" + space + line for line in message.split(b"\n"))]
    return b"".join(line + end for line in lines) + end


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[str, bytes]]:
    """Events with the kinds of their messages, a name's place in each that has one."""
    kinds = {"response": responses(), "progress": progress(), "request": requests(), "notification": notifications()}
    found: list[tuple[str, bytes]] = []
    for kind in draw(st.lists(st.sampled_from([*kinds, "comment"]), max_size=5)):
        found.append((kind, b": ping\n\n" if kind == "comment" else draw(events(draw(kinds[kind])))))
    return found
