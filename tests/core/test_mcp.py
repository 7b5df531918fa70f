"""MCP: what is a call, what its refusals say, where a stream ends, and who hears what a server asks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import jsonrpc, mcp
from proxy.mcp import Call, Names, Text
from proxy.message import Headers, Request
from proxy.refusals import Refusal
from proxy.sse import Events
from tests.core.messages import (
    EXCHANGE,
    led,
    many,
    one,
    response,
)

JSON: Headers = ((b"Content-Type", b"application/json"),)
ACCEPT: Headers = (*JSON, (b"Accept", b"application/json, text/event-stream"))


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
    ends = mcp.Ends(one())
    stream = b": ping\n\n" + b"".join(before) + end
    for at in range(0, len(stream), size):
        passed = ends.feed(stream[at : at + size])
        assert passed <= len(stream) - len(end)
    assert (passed, ends.ended) == (len(stream) - len(end), True)
    assert ends.feed(b": more\n\n") == passed


def test_no_event_before_the_end_waits() -> None:
    ends, fed = mcp.Ends(many(b"1", b"2")), 0
    for event in stream_of(TOLD, response(1), ASKS):
        fed += len(event)
        assert ends.feed(event) == fed
    assert not ends.ended
    assert ends.feed(stream_of(response(2))[0]) == fed
    assert ends.ended


@given(st.integers(1, 200))
def test_what_responds_to_another_request_is_no_end(size: int) -> None:
    """It passes, once it is whole, and its end is not taken for that of the stream."""
    foreign, ours, last = stream_of(response("x"), response(7), response(8))
    ends, stream = mcp.Ends(one()), foreign + ours + last
    for at in range(0, len(stream), size):
        passed = ends.feed(stream[at : at + size])
        assert passed <= len(foreign)
    assert (passed, ends.ended) == (len(foreign), True)
    ends = mcp.Ends(one())
    assert ends.feed(foreign + last) == len(foreign + last)
    assert not ends.close()


@pytest.mark.parametrize("ident", [b"7", b'"7"', b"7.0", b"null", b""])
def test_what_an_sdk_may_take_for_its_response_is_one(ident: bytes) -> None:
    named = b'"id":' + ident + b"," if ident else b""
    message = b'{"jsonrpc":"2.0",' + named + b'"error":{"code":1}}'
    ends, whole = mcp.Ends(one()), mcp.Whole(one())
    assert ends.feed(stream_of(message)[0]) == 0
    assert ends.ended
    whole.feed(message)
    assert whole.close()


@pytest.mark.parametrize(
    ("body", "is_one"),
    [
        (response(7), True), (response(8), False), (response("seven"), False), (response(70), False),
        (b"[" + response(8) + b"," + response(7) + b"]", True), (b"[" + response(8) + b"]", False),
        (b'{"result":{"id":7},"id":8,"jsonrpc":"2.0"}', False), (b'{"result":{"id":8},"id":7}', True),
        (b'{"error":"rate limited"}', True), (b"{}", True), (b"[]", True), (b"no JSON", True), (b"", True),
    ],
)  # fmt: skip
def test_what_responds_to_another_request_is_no_answer(body: bytes, is_one: bool) -> None:
    whole = mcp.Whole(one())
    assert whole.feed(body[:9]) + len(body[9:]) == whole.feed(body[9:]) == len(body)
    assert not whole.ended
    assert whole.close() is is_one


def test_each_call_of_a_batch_is_answered_once() -> None:
    ends, (first, second) = mcp.Ends(many(b"1", b"2")), stream_of(response(1), response(2))
    assert ends.feed(first) == len(first)
    assert ends.feed(first) == 2 * len(first)
    assert not ends.ended
    assert ends.feed(second) == 2 * len(first)
    assert ends.ended


def test_of_several_responses_the_one_to_the_call_is_readdressed() -> None:
    body = b"".join(stream_of(response(8), response(7)))
    old, new = one(), one(b'"new"')
    assert led(Events(Names(new, old)), body) == b"".join(stream_of(response(8), response("new")))
    through, found = mcp.responding(((b"Content-Type", b"text/event-stream"),))
    assert led(through, body) == body
    assert found == {b"7", b"8"}


def test_a_long_request_within_an_answer_is_not_taken_for_its_end() -> None:
    ends = mcp.Ends(one())
    start = b'data: {"id":5,"method":"sampling/createMessage","params":{"result":"'
    assert ends.feed(start) == len(start)
    block = b'x\\"result\\":1' * 50_000
    assert ends.feed(block) == len(start) + len(block)
    assert not ends.ended


def test_a_last_event_may_lack_its_blank_line() -> None:
    ends = mcp.Ends(one())
    assert ends.feed(b"data: " + response()) == 0
    assert ends.close()
    ends = mcp.Ends(one())
    ends.feed(stream_of(TOLD)[0])
    assert not ends.close()


def test_names_are_the_same_by_type_and_value() -> None:
    assert jsonrpc.same(b'"a"', rb'"\u0061"')
    assert not jsonrpc.same(b"1", b"1.0")
    assert not jsonrpc.same(b"1", b'"1"')
