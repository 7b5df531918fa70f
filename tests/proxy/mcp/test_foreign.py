"""A server that responds to another request than the call that it was asked: that is no answer to it."""

import json

import pytest

from tests.proxy.mcp.client import chunk, events, post_raw, taken
from tests.raw import Origin, headers
from tests.stack import Stack

CALL = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "t"}}
FOREIGN = {"jsonrpc": "2.0", "id": 4, "result": {"content": [{"type": "text", "text": "of another"}]}}
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(message: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def plain(message: dict[str, object]) -> bytes:
    body = json.dumps(message).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("answer", [EVENTS + chunk(event(FOREIGN)) + b"0\r\n\r\n", plain(FOREIGN)], ids=["sse", "json"])
def test_a_call_that_was_not_responded_to_is_unknown(shared: Stack, origin: Origin, run: str, answer: bytes) -> None:
    first = shared.claim(run)
    asking = post_raw(first, origin, CALL, b"s1")
    serving, _, _ = taken(origin)
    serving.send(answer)
    assert not asking.rest_of_cut().endswith((b"0\r\n\r\n", b"}]}}"))  # it is cut
    again = post_raw(first, origin, {**CALL, "id": 5}, b"s1")
    assert (b"Twiceshy-Error", b"ambiguous") in headers(again.head())
    assert origin.nobody()


def test_among_several_responses_each_attempt_finds_its_own(shared: Stack, origin: Origin, run: str) -> None:
    first = shared.claim(run)
    asking = post_raw(first, origin, CALL, b"s1")
    serving, _, _ = taken(origin)
    ours = {**FOREIGN, "id": 3, "result": {}}
    serving.send(EVENTS + chunk(event(FOREIGN)))
    asking.head()
    assert asking.body_until(b"\n\n") == event(FOREIGN)  # at once: it ends nothing
    serving.send(chunk(event(ours)) + b"0\r\n\r\n")
    assert asking.body_until(None) == event(ours)
    shared.end(first, "died")
    asking = post_raw(shared.claim(run), origin, {**CALL, "id": 4}, b"s2")
    assert (b"Twiceshy-Replayed", b"true") in headers(asking.head())
    foreign, mine = events(asking.body_until(None))
    assert (mine["id"], mine["result"]) == (4, {})
    assert (foreign["id"] == 4, foreign["result"]) == (False, FOREIGN["result"])  # though that was its name
