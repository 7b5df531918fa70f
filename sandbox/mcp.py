"""A server of MCP over streamable HTTP (protocol 2025-11-25), at ``/mcp``.

Tools: ``refund`` answers in JSON, ``report`` in a stream with three notifications of progress, ``transfer`` asks its
client within the answer (``elicitation/create``) and acts when that accepts, ``fail`` is a tool's error. Each call of
the first two, and each transfer that was accepted, is an effect.

Sessions live in memory: after ``DELETE``, or with another server, an id is unknown (404).
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox.answer import EVENTS, Answer, event, of_json
from sandbox.ledger import Ledger
from sandbox.service import Service
from sandbox.wire import Asked

VERSIONS = ("2025-03-26", "2025-06-18", "2025-11-25")
_TEXT = {"type": "string"}
TOOLS = [
    {"name": name, "description": about, "inputSchema": {"type": "object", "properties": {"what": _TEXT}}}
    for name, about in (
        ("refund", "Pays something back"),
        ("report", "Writes a report, and says how far it is"),
        ("transfer", "Moves money, once somebody has approved it"),
        ("fail", "Fails"),
    )
]


@dataclass
class _Session:
    """``asked``: what waits for a client's response, by the id of the request; they count from 0, as SDKs' do."""

    asked: dict[int, "_Transfer"] = field(default_factory=dict)
    count: int = 0


@dataclass
class _Transfer:
    number: int
    ident: Any
    arguments: Any
    done: "asyncio.Future[Sequence[bytes]]"


class Mcp(Service):
    """``POST``, ``GET`` and ``DELETE /mcp``."""

    name = "mcp"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._sessions: dict[str, _Session] = {}

    def act(self, asked: Asked, number: int) -> Answer:
        ident = asked.header("mcp-session-id")
        session = self._sessions.get(ident or "")
        if asked.method == "POST":
            return self._post(asked, number, ident, session)
        if session is None:
            return _error(400 if ident is None else 404, None, "no such session")
        if asked.method == "DELETE":
            del self._sessions[ident or ""]
            return of_json(200, {})
        if asked.method != "GET":
            return _error(405, None, "not allowed")
        return Answer(
            200, (b": listening\n\n",), (("Mcp-Session-Id", ident or ""),), EVENTS, "chunked", stream=True,
            later=asyncio.get_running_loop().create_future(),
        )  # fmt: skip

    def _post(self, asked: Asked, number: int, ident: str | None, session: _Session | None) -> Answer:
        accept = asked.header("accept") or ""
        if "application/json" not in accept or "text/event-stream" not in accept:
            return _error(406, None, "a client takes JSON and events")
        try:
            message = json.loads(asked.body)
            method = message.get("method")
        except (ValueError, AttributeError) as error:
            return _error(400, None, f"not understood: {error!r}")
        if method == "initialize":
            ident = f"session-{number:04}"
            self._sessions[ident] = session = _Session()
        if session is None or ident is None:
            return _error(400 if ident is None else 404, message.get("id"), "no such session")
        answer = self._answer(message, method, number, session)
        return Answer(
            answer.status, answer.pieces, (("Mcp-Session-Id", ident),), answer.type, answer.framing, answer.stream,
            answer.later,
        )  # fmt: skip

    def _answer(self, message: Any, method: str | None, number: int, session: _Session) -> Answer:
        if method is None:
            self._respond(message, session)
        if method is None or "id" not in message:
            return Answer(202, (b"",))
        ident, params = message["id"], message.get("params") or {}
        if method == "initialize":
            wanted = params.get("protocolVersion")
            result: dict[str, Any] = {
                "protocolVersion": wanted if wanted in VERSIONS else VERSIONS[-1],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "sandbox", "version": "1"},
            }
            return of_json(200, _response(ident, result))
        if method == "tools/list":
            return of_json(200, _response(ident, {"tools": TOOLS}))
        if method == "ping":
            return of_json(200, _response(ident, {}))
        if method == "tools/call":
            return self._call(ident, params, number, session)
        return _error(200, ident, f"no such method: {method}", -32601)

    def _call(self, ident: Any, params: Any, number: int, session: _Session) -> Answer:
        name, arguments = params.get("name"), params.get("arguments") or {}
        if name == "fail":
            return of_json(200, _response(ident, {"content": [_text("it failed")], "isError": True}))
        if name == "refund":
            return of_json(200, _response(ident, self._make(name, number, arguments)))
        if name == "report":
            result = self._make(name, number, arguments)
            events = [*self._progress(params), event(_response(ident, result), "message")]
            return Answer(200, events, (), EVENTS, "chunked", stream=True)
        if name != "transfer":
            return of_json(200, _response(ident, {"content": [_text(f"no such tool: {name}")], "isError": True}))
        transfer = _Transfer(number, ident, arguments, asyncio.get_running_loop().create_future())
        asks = session.count
        session.count += 1
        session.asked[asks] = transfer
        schema = {"type": "object", "properties": {"approve": {"type": "boolean"}}}
        question = {"message": f"Transfer {arguments.get('what')}?", "requestedSchema": schema}
        request = {"jsonrpc": "2.0", "id": asks, "method": "elicitation/create", "params": question}
        return Answer(200, [event(request, "message")], (), EVENTS, "chunked", stream=True, later=transfer.done)

    def _progress(self, params: Any) -> list[bytes]:
        token = (params.get("_meta") or {}).get("progressToken")
        if token is None:
            return []
        told = ({"progressToken": token, "progress": n, "total": 3} for n in (1, 2, 3))
        return [
            event({"jsonrpc": "2.0", "method": "notifications/progress", "params": each}, "message") for each in told
        ]

    def _respond(self, message: Any, session: _Session) -> None:
        """A client says what it was asked for."""
        transfer = session.asked.pop(message.get("id"), None)
        if transfer is None or transfer.done.done():
            return
        if (message.get("result") or {}).get("action") == "accept":
            result = self._make("transfer", transfer.number, transfer.arguments)
        else:
            result = {"content": [_text("it was not approved")], "isError": True}
        transfer.done.set_result([event(_response(transfer.ident, result), "message")])

    def _make(self, tool: str, number: int, arguments: Any) -> dict[str, Any]:
        made = f"{tool}-{1 + len(self.ledger.made(self.name)):04}"
        self.ledger.effect(self.name, tool, number, made=made, arguments=arguments)
        return {"content": [_text(f"{made} for {arguments.get('what')}")], "isError": False}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _response(ident: Any, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": ident, "result": result}


def _error(status: int, ident: Any, message: str, code: int = -32600) -> Answer:
    return of_json(status, {"jsonrpc": "2.0", "id": ident, "error": {"code": code, "message": message}})
