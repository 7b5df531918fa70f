"""Streams of MCP: replayed, joined, cut; and servers that ask back within their answers."""

import pytest

from tests.proxy.mcp.client import chunk, client, die, events, next_event, post_raw, said, taken, tools
from tests.raw import Origin, Wire, locked
from tests.stack import Stack


def test_a_stream_is_replayed_with_the_names_of_the_new_request(shared: Stack, run: str) -> None:
    first = client(shared, run)
    live = first.call("report", ident=3, token=3)
    assert [each["params"]["progressToken"] for each in events(live.body)[:-1]] == [3, 3, 3]
    die(shared, first)
    second = client(shared, run)
    again = second.call("report", ident="x", token="é")
    assert again.replayed
    names = [each["params"]["progressToken"] for each in events(again.body)[:-1]]
    assert (names, events(again.body)[-1]["id"]) == (["é"] * 3, "x")
    changed = live.body.replace(b'"progressToken":3', rb'"progressToken":"\u00e9"').replace(b'"id":3', b'"id":"x"')
    assert again.body == changed
    assert tools(shared) == ["report"]


def test_a_stream_is_joined_half_way_under_the_new_name(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/mcp", "body": "report"}, hold_events={2: "half"})
    first = client(shared, run)
    first.send(first.message("report", ident=3, token=30))
    shared.sandbox.wait_held("half")
    die(shared, first)
    second = client(shared, run)
    answer = second.send(second.message("report", ident=44, token=440)).getresponse()
    assert [next_event(answer)["params"] for _ in range(2)] == [
        {"progressToken": 440, "progress": n, "total": 3} for n in (1, 2)
    ]
    shared.sandbox.release("half")
    assert next_event(answer)["params"]["progressToken"] == 440
    last = next_event(answer)
    assert (last["id"], said(last)) == (44, f"report-{len(shared.sandbox.effects('mcp')):04} for tea")
    assert answer.headers["Mcp-Session-Id"] == second.session["Mcp-Session-Id"]
    assert tools(shared) == ["report"]


@pytest.mark.parametrize("tool", ["refund", "report"])
def test_a_large_answer_is_replayed_in_pieces(shared: Stack, run: str, tool: str) -> None:
    large = 'héllo \\ "id":3 }{\n' * (3 << 16)
    first = client(shared, run)
    live = first.call(tool, large, ident=3)
    assert len(live.body) > 3 << 20
    die(shared, first)
    second = client(shared, run)
    again = second.call(tool, large, ident="three")
    assert again.replayed
    assert not again.cut
    assert again.body == live.body.replace(b'"id":3,"result"', b'"id":"three","result"')
    assert len(again.body) == len(live.body) + len('"three"') - 1
    assert tools(shared) == [tool]


def test_the_response_waits_for_its_record_and_nothing_before_it_does(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/mcp", "body": "report"}, hold_events={3: "response"})
    first = client(shared, run)
    connection = first.send(first.message("report", token=1))
    answer = connection.getresponse()
    assert [next_event(answer)["params"]["progress"] for _ in range(3)] == [1, 2, 3]
    assert answer.readline() == b"\n"
    with locked(shared.dsn, run) as lock:
        shared.sandbox.release("response")
        lock.wait_wanted()
        assert Wire(connection.sock).silent()
    assert said(next_event(answer)).startswith("report-")
    assert answer.read() == b"\n"


def test_a_stream_that_ends_without_a_response_is_no_answer(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/mcp", "body": "report"}, drop="mid", cut_at=2, clean=True)
    first = client(shared, run)
    assert first.call("report", token=1).cut
    stopped = first.call("refund")
    assert (stopped.status, stopped.error) == (200, "ambiguous")
    assert "report" not in tools(shared)[1:]


# ---- a server asks back


def test_a_server_that_asks_within_its_answer_hears_the_response_and_nobody_is_asked_again(
    shared: Stack, run: str
) -> None:
    first = client(shared, run)
    answer = first.send(first.message("transfer", "5 EUR", ident=3)).getresponse()
    question = next_event(answer)
    assert (question["id"], question["method"]) == (0, "elicitation/create")
    assert tools(shared) == []
    assert first.respond(0).status == 202
    done = next_event(answer)
    assert (done["id"], done["result"]["isError"]) == (3, False)
    assert answer.read() == b"\n"
    die(shared, first)

    second = client(shared, run)
    again = events(second.call("transfer", "5 EUR", ident=9).body)
    assert [each["id"] for each in again] == [9]
    assert said(again[0]) == said(done)
    # The response of the new session to a question of its own, under the same id, is not taken for the old one.
    answer = second.send(second.message("transfer", "6 EUR")).getresponse()
    assert next_event(answer)["id"] == 0
    assert second.respond(0).status == 202
    assert next_event(answer)["id"] == second.ident
    assert tools(shared) == ["transfer", "transfer"]


def test_a_question_that_nobody_had_answered_is_asked_the_next_attempt(shared: Stack, run: str) -> None:
    first = client(shared, run)
    answer = first.send(first.message("transfer", "5 EUR", ident=3)).getresponse()
    assert next_event(answer)["id"] == 0
    die(shared, first)

    second = client(shared, run)
    other = second.send(second.message("transfer", "6 EUR", ident=1)).getresponse()
    mine = next_event(other)
    joined = second.send(second.message("transfer", "5 EUR", ident=2)).getresponse()
    old = next_event(joined)
    assert (mine["id"], old["method"], old["params"]["message"]) == (0, "elicitation/create", "Transfer 5 EUR?")
    assert old["id"] != 0
    assert second.respond(old["id"]).status == 202
    done = next_event(joined)
    assert (done["id"], "5 EUR" in said(done)) == (2, True)
    assert tools(shared) == ["transfer"]
    assert second.respond(mine["id"], "decline").status == 202
    declined = next_event(other)
    assert (declined["id"], declined["result"]["isError"]) == (1, True)
    assert tools(shared) == ["transfer"]


def test_a_question_that_was_answered_is_not_asked_again(shared: Stack, origin: Origin, run: str) -> None:
    """The agent died while the server went on working, after a person had said yes."""
    first = shared.claim(run)
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "t"}}
    asking = post_raw(first, origin, call, b"s1")
    serving, _, _ = taken(origin)
    serving.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    questions = [
        b'data: {"method":"elicitation/create","params":{"message":"%d"},"jsonrpc":"2.0","id":"q%d"}\n\n' % (n, n)
        for n in (1, 2)
    ]
    serving.send(chunk(questions[0] + questions[1]))
    assert asking.body_until(questions[1][-30:]) if asking.head() else False
    yes = {"jsonrpc": "2.0", "id": "q1", "result": {"action": "accept"}}
    responding = post_raw(first, origin, yes, b"s1")
    wire, _, passed = taken(origin)
    assert passed == yes
    wire.send(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    assert b" 202 " in responding.head()
    shared.end(first, "died")

    second = shared.claim(run)
    joining = post_raw(second, origin, {**call, "id": 2}, b"s2")
    joining.head()
    got = joining.body_until(b"\n\n")
    (left,) = events(got)
    assert left["params"] == {"message": "2"}
    responding = post_raw(second, origin, {**yes, "id": left["id"]}, b"s2")
    wire, head, passed = taken(origin)
    assert passed == {**yes, "id": "q2"}
    assert b"s1" in head
    assert b"s2" not in head
    wire.send(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    serving.send(chunk(b'data: {"jsonrpc":"2.0","id":1,"result":{}}\n\n') + b"0\r\n\r\n")
    assert events(joining.body_until(None)) == [{"jsonrpc": "2.0", "id": 2, "result": {}}]
