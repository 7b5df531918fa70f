"""What twiceshy itself says to a client of MCP, so that a model can read it."""

import json
from typing import Any

from proxy.message import Request
from proxy.profiles import Rules
from tests.proxy.mcp.client import ACCEPT, Client, client, said, tools
from tests.raw import Origin, Wire
from tests.stack import Attempt, Reply, Stack

CALL = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "refund"}}'


def problem(reply: Reply) -> tuple[Any, str]:
    """Of a refusal in JSON-RPC: the id, and the words."""
    assert reply.headers["content-type"] == "application/json"
    message = reply.json()
    assert message["error"]["data"]["detail"] == message["error"]["message"]
    return message["id"], message["error"]["message"]


def test_a_fenced_attempt_can_read_why(shared: Stack, run: str) -> None:
    first = client(shared, run)
    client(shared, run)
    for message in (first.message("refund", ident="a"), first.request("initialize"), first.request("tools/list")):
        refused = first.post(message)
        assert (refused.status, refused.error) == (200, "fenced")
        ident, words = problem(refused)
        assert (ident, "another attempt took the run over" in words) == (message["id"], True)
    plain = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    assert [first.post(plain).status, first.respond(0).status] == [423, 423]
    for method in ("GET", "DELETE"):
        assert first.attempt.ask(method, shared.url("/mcp"), None, first.session).status == 423
    assert tools(shared) == []


def test_who_names_no_run_or_a_wrong_one_can_read_why(shared: Stack, run: str) -> None:
    attempt = Attempt(run, "no-such-token", shared.sidecar.port)
    stranger = Client(shared, attempt)
    large = stranger.message("refund", "x" * 200_000, ident=4)
    refused = stranger.post(large)
    assert (refused.status, refused.error, problem(refused)[0]) == (200, "fenced", 4)
    batch = stranger.post([stranger.message("refund", ident=1), stranger.message("refund", ident="b")])
    assert [each["id"] for each in batch.json()] == [1, "b"]
    too_large = stranger.post(stranger.message("refund", "x" * (1 << 20)))
    assert too_large.status == 423
    wire = Wire.to(attempt)
    body = json.dumps(stranger.message("refund", ident=5)).encode()
    url = shared.url("/mcp").encode()
    lines = [b"POST " + url + b" HTTP/1.1", b"Host: h", b"Content-Type: application/json", b"Accept: text/event-stream"]
    wire.send(b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body[:20]]))
    wire.send(body[20:])
    head = wire.head()
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"Twiceshy-Error: no-run" in head
    assert json.loads(wire.until(b"}}}"))["id"] == 5
    assert shared.received("mcp") == []


def test_a_run_that_needs_a_person_says_so_to_the_model(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/mcp", "body": "refund"}, hold="slow")
    first = client(shared, run)
    first.send(first.message("refund"))
    shared.sandbox.wait_held("slow")
    shared.restart()
    second = client(shared, run)
    stopped = second.call("refund", ident=8)
    assert (stopped.status, stopped.error) == (200, "ambiguous")
    ident, words = problem(stopped)
    assert (ident, f"twiceshy resolve {run}" in words) == (8, True)
    shared.sandbox.release("slow")
    second.attempt.die()

    # What the built-in rule says that "it happened" means is an answer as tools give it.
    request = Request("POST", "http", "h", 80, "/mcp", ((b"Content-Type", b"application/json"),), CALL)
    done = Rules.load([]).match(request).assumed
    assert done is not None
    shared.resolve(run, stopped.step, "assume_done", headers=done.headers, body=done.body)
    third = client(shared, run)
    answer = third.call("refund", ident="last")
    assert (answer.json()["id"], said(answer.json())) == ("last", "This was done. What came of it is not known.")
    assert tools(shared) == ["refund"]


def test_a_server_that_cannot_be_reached_is_told_as_an_error_too(shared: Stack, origin: Origin, run: str) -> None:
    origin.close()
    for ident in (1, 2):
        attempt = shared.claim(run)
        for method in ("initialize", "tools/call"):
            body = {"jsonrpc": "2.0", "id": ident, "method": method, "params": {"name": "t"}}
            failed = attempt.ask("POST", origin.url("/mcp"), body, ACCEPT)
            assert (failed.status, failed.error) == (200, "upstream")
            told, words = problem(failed)
            assert (told, "Nothing was sent" in words) == (ident, True)
        shared.end(attempt, "failed")
