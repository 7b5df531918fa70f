"""Answers of MCP given to another request: its id and progress token, and every other byte as it was."""

import json
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy import jsonrpc, mcp
from proxy.jsonrpc import KIND_WITHIN, NAME_MAX
from proxy.mcp import Call, Names, Text
from proxy.message import Headers, Request
from proxy.refusals import Refusal
from proxy.sse import Events

JSON: Headers = ((b"Content-Type", b"application/json"),)
ACCEPT: Headers = (*JSON, (b"Accept", b"application/json, text/event-stream"))
EXCHANGE = UUID("11111111-2222-4333-8444-555555555555")
Make = Callable[[], Text | Events]


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


# ---- what holds for all of them


@given(responses(), scalars, scalars, cuts)
def test_a_response_gets_the_id_of_the_new_request_and_nothing_else(
    message: bytes, old: bytes, new: bytes, at: tuple[int, ...]
) -> None:
    sent = message.replace(PLACE, old)
    expected = sent if jsonrpc.same(old, new) else message.replace(PLACE, new)
    assert led(text(one(new)), sent, at) == expected


@given(streams(), scalars, scalars, cuts, st.booleans())
def test_a_stream_gets_the_names_of_the_new_request(
    stream: list[tuple[str, bytes]], old: bytes, new: bytes, at: tuple[int, ...], live: bool
) -> None:
    sent = b"".join(event.replace(PLACE, old) for _, event in stream)
    name = old if jsonrpc.same(old, new) else new
    expected = b"".join(event.replace(PLACE, name) for kind, event in stream if live or kind != "request")
    through = Events(Names(one(new, new), None), lambda _: not live)
    assert led(through, sent, at) == expected


@given(st.lists(responses(), min_size=1, max_size=4), cuts)
def test_the_ids_of_a_batch_change_by_the_requests_that_had_them(messages: list[bytes], at: tuple[int, ...]) -> None:
    count = len(messages)
    olds, news = [b"%d" % n for n in range(count)], [b'"new%d"' % n for n in range(count)]
    order = list(range(count))[::-1]

    def batch(names: list[bytes]) -> bytes:
        return b"[" + b" , ".join(messages[n].replace(PLACE, names[n]) for n in order) + b"]"

    assert led(text(many(*news), many(*olds)), batch(olds), at) == batch(news)
    event = b"data: " + batch(olds).replace(b"\n", b" ") + b"\n\n"
    assert led(replayed(many(*news), many(*olds)), event, at) == event.replace(
        batch(olds).replace(b"\n", b" "), batch(news).replace(b"\n", b" ")
    )


_bits = [b'{"id":', b"7", b'"', b"\\", b"}", b"]", b"[", b"{", b",", b":", b'"method":"', b'"result":', b"null", b" "]
_lines = [b"data: ", b"\n", b"\r", b"\r\n", b"\n\n", b"\xff", b"\x00", "é".encode(), b'"params":{', b'"progressToken":']
_soup = st.lists(st.sampled_from(_bits + _lines) | st.binary(max_size=4), max_size=30).map(b"".join)


@given(_soup, cuts)
@example(b'data: {"id": "a\ndata: b"}\n\n', ())
@example(b'{"id":7', ())
def test_however_it_is_cut_it_is_the_same_and_nothing_is_lost(soup: bytes, at: tuple[int, ...]) -> None:
    makes: list[Make] = [
        lambda: text(one(b'"n"', b'"t"')),
        lambda: replayed(one(b'"n"', b'"t"')),
        lambda: Events(Names(one(b'"n"'), None, EXCHANGE)),
    ]
    for make in makes:
        assert led(make(), soup, at) == each_byte(make(), soup) == led(make(), soup)
    assert led(Events(), soup, at) == soup
    assert led(Text(lambda name: name.raw), soup, at) == soup


# ---- one by one


def response(ident: object = 7, **result: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": ident, "result": result}).encode()


@pytest.mark.parametrize(
    ("sent", "given"),
    [
        (b'{"id":"7","result":1}', b'{"id":7,"result":1}'),
        (b'{"id":null,"error":{}}', b'{"id":null,"error":{}}'),  # the server could not read which one it answers
        (b'{"id":3,"id":4,"result":1}', b'{"id":7,"id":7,"result":1}'),
        (b'{"id":[3],"result":1}', b'{"id":[3],"result":1}'),
        (b'{"id":3}', b'{"id":3}'),
        (b'{"result":{"id":3}}', b'{"result":{"id":3}}'),
        (b'"id"', b'"id"'),
        (b'{"id":3,"result":1}{"id":3,"result":1}', b'{"id":7,"result":1}{"id":3,"result":1}'),
        (b'{"id":"' + b"x" * NAME_MAX + b'","result":1}', b'{"id":"' + b"x" * NAME_MAX + b'","result":1}'),
        (b'\xef\xbb\xbf{"id":3,"result":1}', b'\xef\xbb\xbf{"id":3,"result":1}'),
    ],
)
def test_odd_ones(sent: bytes, given: bytes) -> None:
    assert led(text(one()), sent) == given
    assert each_byte(text(one()), sent) == given


def test_a_large_answer_goes_on_while_it_comes() -> None:
    block = b"x\\n" * (100 << 10)
    through = text(one())
    assert through.feed(b'{"result":{"text":"') == b'{"result":{"text":"'
    for _ in range(3):
        assert through.feed(block) == block
    assert through.feed(b'"},"id":3') == b'"},"id":'
    assert through.feed(b"}") == b"7}"
    first = b'data: {"jsonrpc":"2.0","id":3,"result":{"text":"'
    events = replayed(one())
    assert events.feed(first) == first.replace(b"3,", b"7,")
    assert events.feed(block) == block


def test_what_a_long_message_is_must_show_in_time() -> None:
    long = b'"x":"' + b"x" * KIND_WITHIN + b'",'
    late = b'{"id":3,' + long + b'"result":1}'
    assert led(text(one()), late) == each_byte_of_few(text(one()), late) == late
    asks = b'data: {"method":"elicitation/create","params":{' + long[:-1] + b'},"id":3}\n\n'
    assert led(replayed(one()), asks) == asks
    comment = b":" + b"x" * KIND_WITHIN + b"\n"
    request = comment + b'data: {"id":1,"method":"roots/list"}\n\n'
    assert led(replayed(one()), request) == each_byte_of_few(replayed(one()), request) == request


def each_byte_of_few(through: Text | Events, data: bytes) -> bytes:
    return led(through, data, tuple(range(0, len(data), 4099)))


def test_a_batch_whose_ids_say_nothing_stays_as_it_is() -> None:
    sent = b'[{"id":1,"result":1},{"id":2,"result":2}]'
    for old in (None, many(b"1", b"1"), many(b"1"), many(b"5", b"6")):
        assert led(text(many(b"8", b"9"), old), sent) == sent
    assert led(text(many(b"8", b"9"), many(b"1", b"2")), sent) == sent.replace(b":1,", b":8,").replace(b":2,", b":9,")
    note = b'data: {"method":"notifications/progress","params":{"progressToken":"b"}}\n\n'
    old, new = many(b"1", b"2", tokens=(b'"a"', b'"b"')), many(b"8", b"9", tokens=(b"80", b"90"))
    assert led(replayed(new, old), note) == note.replace(b'"b"', b"90")


def test_an_event_passes_as_soon_as_it_is_whole() -> None:
    through = Events(Names(one(), None))
    asks = b'event: message\ndata: {"method":"elicitation/create","id":0,"params":{}}\n\n'
    assert through.feed(asks) == asks
    told = b'data: {"method":"notifications/progress","params":{"progressToken":5}}\r\r'
    assert through.feed(told) == told.replace(b"5", b"70")
    assert through.feed(b"\n: ping\n\n") == b"\n: ping\n\n"


def test_an_events_last_line_feed_goes_where_the_event_went() -> None:
    asks = b'data: {"method":"elicitation/create","id":0}\r\n\r'
    through = replayed(one())
    assert through.feed(asks) == b""
    assert through.feed(b"\ndata: {}\n\n") == b"data: {}\n\n"


# ---- to whom a server's request goes


def test_a_request_that_is_still_open_goes_to_a_new_client_and_the_response_back() -> None:
    asks = b'data: {"jsonrpc":"2.0","id":%b,"method":"elicitation/create","params":{}}\n\n'
    heard = {b"1"}
    for ident in (b"2", b'"a\\u00e9"', b"1"):
        got = led(Events(Names(one(), None, EXCHANGE), heard.__contains__), asks.replace(b"%b", ident))
        if ident == b"1":
            assert got == b""
            continue
        message = json.loads(got.removeprefix(b"data: "))
        body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {"id": message["id"]}}).encode()
        headers = (*ACCEPT, (b"Mcp-Session-Id", b"new"))
        found = mcp.through(mcp.responded("POST", headers, body) or b"")
        assert found is not None
        assert (found.exchange, jsonrpc.same(found.id, ident)) == (EXCHANGE, True)
        request = Request("POST", "http", "h", 80, "/mcp", headers, body)
        back = mcp.led_back(request, found, b"old")
        assert back.header("mcp-session-id") == b"old"
        assert json.loads(back.body) == {"jsonrpc": "2.0", "id": json.loads(ident), "result": {"id": message["id"]}}
        assert mcp.led_back(request, found, None).header("mcp-session-id") is None


@pytest.mark.parametrize(
    "body", [b'{"jsonrpc":"2.0","id":1,"method":"ping"}', b'{"id":1,"result":{}}', b"[]", b"{", b'"jsonrpc"']
)
def test_what_is_no_response_responds_to_nothing(body: bytes) -> None:
    assert mcp.responded("POST", ACCEPT, body) is None


@pytest.mark.parametrize(
    "ident", [b"1", b'"a"', b'"twiceshy:x:1"', b'"twiceshy:11111111-2222-4333-8444-555555555555:"']
)
def test_a_servers_own_id_leads_nowhere(ident: bytes) -> None:
    assert mcp.through(ident) is None


# ---- which request it is

CALL = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "t", "_meta": {"progressToken": "p"}}}


def asked(body: object, headers: Headers = ACCEPT, method: str = "POST") -> Call | None:
    return mcp.call(method, headers, body if isinstance(body, bytes) else json.dumps(body).encode())


def test_a_call_is_known_by_its_shape() -> None:
    found = Call((b"3",), (b'"p"',))
    assert asked(CALL) == asked(CALL, JSON) == found
    assert asked({**CALL, "method": "initialize"}) == found
    session = (*JSON, (b"MCP-Session-Id", b"s1"))
    assert asked({**CALL, "method": "ping"}, session) == Call((b"3",), (b'"p"',), session=b"s1")
    assert asked([CALL, {"jsonrpc": "2.0", "method": "notifications/x"}, {**CALL, "id": "3"}]) == Call(
        (b"3", None, b'"3"'), (b'"p"', None, b'"p"'), batch=True
    )
    assert asked(b'{"jsonrpc":"2.0","method":"tools/call","id":1.0,"id":"\\u0061"}') == Call((b'"a"',), (None,))


@pytest.mark.parametrize(
    ("body", "headers", "method"),
    [
        (CALL, ACCEPT, "PUT"),
        ({**CALL, "method": "eth_sendTransaction"}, JSON, "POST"),
        ({**CALL, "id": None}, ACCEPT, "POST"),
        ({"jsonrpc": "2.0", "method": "notifications/initialized"}, ACCEPT, "POST"),
        ({"jsonrpc": "2.0", "id": 1, "result": {}}, ACCEPT, "POST"),
        ({**CALL, "jsonrpc": "1.0"}, ACCEPT, "POST"),
        (b'{"jsonrpc"', ACCEPT, "POST"),
        (b'{"model": "m", "messages": ["jsonrpc tools/call"]}', JSON, "POST"),
        ([], ACCEPT, "POST"),
        (b'[1, "jsonrpc"]', ACCEPT, "POST"),
    ],
)
def test_nothing_else_is_one(body: object, headers: Headers, method: str) -> None:
    assert asked(body, headers, method) is None


def test_what_goes_again_has_the_ids_of_who_asks_now() -> None:
    def request(ident: object, token: object, session: bytes, name: str) -> Request:
        body = json.dumps(
            {**CALL, "id": ident, "params": {"name": name, "_meta": {"progressToken": token, "x": [token]}}}
        )
        headers = (*JSON, (b"Mcp-Session-Id", session), (b"Mcp-Protocol-Version", session), (b"X", b"x" + session))
        return Request("POST", "http", "h", 80, "/mcp", headers, body.encode())

    first, now = request(1, "a", b"old", "first"), request("1", 8, b"new", "now")
    by = mcp.call("POST", now.headers, now.body)
    assert by is not None
    again = mcp.asked_anew(first, now, by)
    assert again.body == first.body.replace(b'"id": 1', b'"id": "1"').replace(b'Token": "a"', b'Token": 8')
    assert (again.header("mcp-session-id"), again.header("mcp-protocol-version")) == (b"new", b"new")
    assert again.header("x") == b"xold"


# ---- answers


def test_a_refusal_is_an_error_that_a_model_can_read() -> None:
    refusal = Refusal("fenced", "Another attempt took the run over.", "r", "s")
    headers, body = mcp.refused(one(b'"q"'), refusal.headers(), refusal.body())
    said = json.loads(body)
    assert (said["id"], said["error"]["message"]) == ("q", "Another attempt took the run over.")
    assert said["error"]["data"]["run"] == "r"
    assert dict(headers)[b"Content-Type"] == b"application/json"
    assert dict(headers)[b"Twiceshy-Error"] == b"fenced"
    _, body = mcp.refused(many(b"1", None, b"2"), refusal.headers(), refusal.body())
    assert [each["id"] for each in json.loads(body)] == [1, 2]


def test_an_answer_names_the_session_of_who_gets_it() -> None:
    headers: Headers = ((b"Content-Type", b"application/json"), (b"Content-Length", b"9"), (b"mcp-session-id", b"old"))

    def given(new: Call, *more: tuple[bytes, bytes]) -> tuple[dict[bytes, bytes], Text | Events | None]:
        kept, body = mcp.readdressed((*headers, *more), new, None, exchange=None, heard=lambda _: True)
        return dict(kept), body

    kept, body = given(one(session=b"new"))
    assert isinstance(body, Text)
    assert kept == {b"Content-Type": b"application/json", b"mcp-session-id": b"new"}
    assert b"mcp-session-id" not in given(one())[0]
    kept, body = given(one(session=b"new"), (b"Content-Encoding", b"br"))
    assert body is None
    assert kept[b"Content-Length"] == b"9"


def stream_of(*messages: bytes) -> list[bytes]:
    return [b"event: message\ndata: " + message + b"\n\n" for message in messages]


ASKS = b'{"jsonrpc":"2.0","method":"sampling/createMessage","params":{"result":1,"text":"\\"result\\":"},"id":0}'
TOLD = b'{"jsonrpc":"2.0","method":"notifications/message","params":{"error":{"result":1}}}'


@given(st.integers(1, 200))
def test_the_end_of_a_stream_is_its_response_and_all_before_it_passes(size: int) -> None:
    before, end = stream_of(TOLD, ASKS), stream_of(response())[0]
    ends = mcp.Ends(1)
    stream = b": ping\n\n" + b"".join(before) + end
    for at in range(0, len(stream), size):
        passed = ends.feed(stream[at : at + size])
        assert passed <= len(stream) - len(end)
    assert (passed, ends.ended) == (len(stream) - len(end), True)
    assert ends.feed(b": more\n\n") == passed


def test_no_event_before_the_end_waits() -> None:
    ends, fed = mcp.Ends(2), 0
    for event in stream_of(TOLD, response(1), ASKS):
        fed += len(event)
        assert ends.feed(event) == fed
    assert not ends.ended
    assert ends.feed(stream_of(response(2))[0]) == fed
    assert ends.ended


def test_a_long_request_within_an_answer_is_not_taken_for_its_end() -> None:
    ends = mcp.Ends(1)
    start = b'data: {"id":5,"method":"sampling/createMessage","params":{"result":"'
    assert ends.feed(start) == len(start)
    block = b'x\\"result\\":1' * 50_000
    assert ends.feed(block) == len(start) + len(block)
    assert not ends.ended


def test_a_last_event_may_lack_its_blank_line() -> None:
    ends = mcp.Ends(1)
    assert ends.feed(b"data: " + response()) == 0
    assert ends.close()
    ends = mcp.Ends(1)
    ends.feed(stream_of(TOLD)[0])
    assert not ends.close()


def test_names_are_the_same_by_type_and_value() -> None:
    assert jsonrpc.same(b'"a"', rb'"\u0061"')
    assert not jsonrpc.same(b"1", b"1.0")
    assert not jsonrpc.same(b"1", b'"1"')
