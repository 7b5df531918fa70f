"""MCP through the sidecar: each tool is called once, and who asks again hears it under the name of his request."""

import json
from pathlib import Path
from typing import Any

from tests.proxy.mcp.client import ACCEPT, client, die, events, said, taken, tools
from tests.raw import Origin
from tests.stack import Stack, stack


def test_an_answer_is_replayed_to_another_request_of_another_session(shared: Stack, run: str) -> None:
    first = client(shared, run)
    live = first.call("refund", ident=7)
    assert live.json()["id"] == 7
    die(shared, first)

    second = client(shared, run, ident=100)
    again = second.call("refund", ident="7")
    assert again.replayed
    assert (again.json()["id"], said(again.json())) == ("7", said(live.json()))
    assert again.body == live.body.replace(b'"id":7', b'"id":"7"')
    assert again.headers["content-length"] == str(len(again.body))
    # Clients take the session's id from any answer: the recorded one is dead.
    assert again.headers["mcp-session-id"] == second.session["Mcp-Session-Id"] != first.session["Mcp-Session-Id"]
    more = second.call("refund", "milk")
    assert (more.status, more.replayed) == (200, False)
    assert tools(shared) == ["refund", "refund"]
    die(shared, second)
    third = client(shared, run)
    same = third.call("refund", ident=7)
    assert (same.body, same.replayed) == (live.body, True)


def test_everything_but_a_call_happens_again(shared: Stack, run: str) -> None:
    for _ in range(2):
        each = client(shared, run)
        assert len(each.post(each.request("tools/list")).json()["result"]["tools"]) == 4
        assert each.post(each.request("ping")).status == 200
        listening = each.attempt.send("GET", shared.url("/mcp"), None, {"Accept": "text/event-stream", **each.session})
        assert listening.getresponse().readline() == b": listening\n"
        assert each.attempt.ask("DELETE", shared.url("/mcp"), None, each.session).status == 200
        assert each.attempt.steps() == []
        assert each.call("refund").status == 404  # the session has ended
        die(shared, each)
    assert shared.effects() == []
    assert [row["state"] for row in shared.fetch("SELECT state FROM twiceshy.step WHERE run_id = $1", run)] == [
        "answered"
    ]


def test_a_call_in_a_dead_session_goes_again_in_the_new_one_under_its_new_name(shared: Stack, run: str) -> None:
    first = client(shared, run)
    first.attempt.ask("DELETE", shared.url("/mcp"), None, first.session)
    assert first.call("refund", ident=5, token="a").status == 404
    first.open()
    made = first.call("refund", ident="six", token=9)
    assert (made.status, made.json()["id"]) == (200, "six")
    asked = [each for each in shared.received("mcp") if b"tools/call" in each.body]
    assert [each.json()["id"] for each in asked] == [5, "six"]
    assert [each.json()["params"]["_meta"] for each in asked] == [{"progressToken": "a"}, {"progressToken": 9}]
    assert asked[1].header("mcp-session-id") == first.session["Mcp-Session-Id"]
    die(shared, first)
    again = client(shared, run)
    assert again.call("refund", ident=7).status == 404  # the list of answers is replayed
    assert again.call("refund", ident=8).json()["id"] == 8


def test_a_tools_error_is_its_answer(shared: Stack, run: str) -> None:
    for replayed in (False, True):
        each = client(shared, run, ident=10 * replayed)
        failed, unknown = each.call("fail"), each.post(each.request("tools/call", {"name": "nothing"}))
        assert failed.json()["result"]["isError"]
        assert (failed.replayed, unknown.replayed) == (replayed, replayed)
        assert [failed.json()["id"], unknown.json()["id"]] == [each.ident - 1, each.ident]
        die(shared, each)
    assert len([each for each in shared.received("mcp") if b"tools/call" in each.body]) == 2


def test_equal_calls_at_once_are_as_many_effects(shared: Stack, run: str) -> None:
    first = client(shared, run)
    answers = [
        first.attempt.in_background(
            "POST", shared.url("/mcp"), first.message("refund", ident=n), {**ACCEPT, **first.session}
        )
        for n in (1, 2)
    ]
    assert [each.result().json()["id"] for each in answers] == [1, 2]
    assert tools(shared) == ["refund", "refund"]


# ---- batches, and rules of a user


def test_a_batch_is_replayed_by_the_names_of_its_requests(shared: Stack, origin: Origin, run: str) -> None:
    def batch(*idents: Any) -> list[dict[str, Any]]:
        return [
            {"jsonrpc": "2.0", "id": ident, "method": "tools/call", "params": {"name": f"t{n}"}}
            for n, ident in enumerate(idents)
        ]

    first = shared.claim(run)
    body = json.dumps(batch(1, 2)).encode()
    asking = first.in_background("POST", origin.url("/mcp"), body, ACCEPT)
    serving, _, _ = taken(origin)
    answers = b'[{"jsonrpc":"2.0","id":2,"result":{"x":[2]}}, {"id":1,"result":{"id":1}}]'
    serving.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answers))
    serving.send(answers)
    assert asking.result().body == answers
    shared.end(first, "died")
    again = shared.claim(run).ask("POST", origin.url("/mcp"), json.dumps(batch("a", 20)).encode(), ACCEPT)
    assert again.replayed
    assert again.body == b'[{"jsonrpc":"2.0","id":20,"result":{"x":[2]}}, {"id":"a","result":{"id":1}}]'


RULES = """
[[route]]
host = "*"
match_body = [{ path = "$.params.name", in = ["refund"] }]
effect = "idempotent"
key = { in = "header", name = "Idempotency-Key" }

[[route]]
host = "*"
match_body = [{ path = "$.params.name", in = ["report"] }]
effect = "read"
"""


def test_what_a_user_says_of_a_tool_holds(dsn: str, tmp_path: Path) -> None:
    rules = tmp_path / "twiceshy.toml"
    rules.write_text(RULES)
    with stack(dsn, tmp_path, config=rules) as own:
        own.sandbox.fault(match={"path": "/mcp", "body": "refund"}, hold="slow")
        first = client(own, "r")
        assert said(events(first.call("report").body)[-1]) == "report-0001 for tea"
        first.send(first.message("refund", ident=5, token="a"))
        own.sandbox.wait_held("slow")
        own.restart()
        second = client(own, "r", ident=50)
        again = second.call("report")
        assert (again.replayed, events(again.body)[-1]["id"]) == (True, second.ident)
        made = second.call("refund", ident="six", token=6)
        assert (made.status, made.json()["id"]) == (200, "six")
        one, other = [each for each in own.received("mcp") if b"refund" in each.body]
        assert other.json() == {
            **one.json(),
            "id": "six",
            "params": {**one.json()["params"], "_meta": {"progressToken": 6}},
        }
        assert one.header("idempotency-key") == other.header("idempotency-key") is not None
        assert other.header("mcp-session-id") == second.session["Mcp-Session-Id"]
        own.sandbox.release("slow")


def test_the_old_transport_is_told(shared: Stack, origin: Origin, run: str) -> None:
    attempt = shared.claim(run)
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "t"}}
    asking = attempt.in_background("POST", origin.url("/messages?session_id=s"), call)
    serving, _, _ = taken(origin)
    serving.send(b"HTTP/1.1 202 Accepted\r\nContent-Length: 8\r\n\r\nAccepted")
    assert asking.result().body == b"Accepted"
    [hint] = attempt.ask("GET", "http://twiceshy.internal/attempt").json()["hints"]
    assert "old HTTP+SSE transport" in hint
