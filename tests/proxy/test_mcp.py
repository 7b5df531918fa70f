"""MCP through the sidecar: each tool is called once, and whoever asks again hears it under the name of his request."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from proxy.message import Request
from proxy.profiles import Rules
from tests.raw import Origin, Wire, credentials, locked
from tests.stack import Attempt, Reply, Stack, stack

ACCEPT = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


@dataclass
class Client:
    """A client of MCP, as SDKs are: its ids count up from where the test says, its session is its own."""

    stack: Stack
    attempt: Attempt
    ident: int = 0
    path: str = "/mcp"
    session: dict[str, str] = field(default_factory=dict)

    def post(self, message: Any, **headers: str) -> Reply:
        body = json.dumps(message).encode()
        return self.attempt.ask("POST", self.stack.url(self.path), body, {**ACCEPT, **self.session, **headers})

    def send(self, message: dict[str, Any]) -> HTTPConnection:
        return self.attempt.send("POST", self.stack.url(self.path), message, {**ACCEPT, **self.session})

    def request(self, method: str, params: Any = None, ident: Any = None) -> dict[str, Any]:
        self.ident += 1
        return {"jsonrpc": "2.0", "id": self.ident if ident is None else ident, "method": method, "params": params}

    def open(self) -> "Client":
        opened = self.post(self.request("initialize", {"protocolVersion": "2025-11-25"}))
        assert opened.status == 200, opened
        assert not opened.replayed
        self.session = {
            "Mcp-Session-Id": opened.headers["mcp-session-id"], "MCP-Protocol-Version": "2025-11-25",
        }  # fmt: skip
        assert self.post({"jsonrpc": "2.0", "method": "notifications/initialized"}).status == 202
        return self

    def message(self, tool: str, what: str = "tea", ident: Any = None, token: Any = None) -> dict[str, Any]:
        meta = {} if token is None else {"progressToken": token}
        return self.request("tools/call", {"name": tool, "arguments": {"what": what}, "_meta": meta}, ident)

    def call(self, tool: str, what: str = "tea", ident: Any = None, token: Any = None) -> Reply:
        return self.post(self.message(tool, what, ident, token))

    def respond(self, ident: Any, action: str = "accept") -> Reply:
        return self.post({"jsonrpc": "2.0", "id": ident, "result": {"action": action, "content": {"approve": True}}})


CALL = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "refund"}}'


def client(stack: Stack, run: str, ident: int = 0) -> Client:
    """A client in a new attempt of *run*."""
    return Client(stack, stack.claim(run), ident).open()


def die(stack: Stack, *clients: Client) -> None:
    for each in clients:
        stack.end(each.attempt, "died")


def events(body: bytes) -> list[dict[str, Any]]:
    """The messages of a stream."""
    return [json.loads(event.partition(b"data: ")[2]) for event in body.split(b"\n\n") if b"data: " in event]


def next_event(answer: HTTPResponse) -> dict[str, Any]:
    """The next message of a stream that goes on."""
    line = b""
    while not line.startswith(b"data: "):
        line = answer.readline()
        assert line, "the stream has ended"
    found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return found


def said(message: dict[str, Any]) -> str:
    return str(message["result"]["content"][0]["text"])


def tools(stack: Stack) -> list[str]:
    return [each.effect for each in stack.effects("mcp")]


# ---- calls


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


# ---- streams


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


@pytest.fixture
def origin() -> Iterator[Origin]:
    made = Origin()
    yield made
    made.close()


def post_raw(attempt: Attempt, origin: Origin, message: dict[str, Any], session: bytes) -> Wire:
    wire, body = Wire.to(attempt), json.dumps(message).encode()
    lines = [
        f"POST {origin.url('/mcp')} HTTP/1.1".encode(), credentials(attempt), b"Host: h",
        b"Content-Type: application/json", b"Accept: application/json, text/event-stream",
        b"Mcp-Session-Id: " + session, b"Content-Length: %d" % len(body), b"", body,
    ]  # fmt: skip
    wire.send(b"\r\n".join(lines))
    return wire


def taken(origin: Origin) -> tuple[Wire, bytes, dict[str, Any]]:
    """A request at the upstream: its connection, head and message."""
    wire = origin.accept()
    head = wire.head()
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    return wire, head, json.loads(wire.exactly(int(length.split(b":")[1])))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


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


# ---- what twiceshy itself says


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
