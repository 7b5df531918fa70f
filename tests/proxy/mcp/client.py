"""A client of MCP as SDKs are, for tests, and what a test's own upstream hears of one."""

import json
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from tests.raw import Origin, Wire, credentials
from tests.stack import Attempt, Reply, Stack

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


# ---- by hand


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
