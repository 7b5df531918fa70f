"""Which requests of MCP are steps, on any host, and what tells two of them apart."""

import json
from typing import Any

import pytest

from proxy.canonical import fingerprint, secondary
from proxy.message import Headers, Request
from proxy.profiles import Rule, Rules
from runtime.errors import UsageError
from runtime.step import Effect

PLAIN: Headers = ((b"Content-Type", b"application/json"), (b"Accept", b"application/json, text/event-stream"))
IN_SESSION: Headers = (*PLAIN, (b"Mcp-Session-Id", b"s1"), (b"Mcp-Protocol-Version", b"2025-11-25"))
BUILT = Rules.load([])


def post(body: Any, headers: Headers = PLAIN, host: str = "mcp.example.test", method: str = "POST") -> Request:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Request(method, "https", host, 443, "/mcp", headers, data)


def message(method: str | None, **more: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, **({} if method is None else {"method": method}), **more}


def call(name: str = "refund", ident: Any = 1, **meta: Any) -> dict[str, Any]:
    return message("tools/call", id=ident, params={"name": name, "arguments": {"amount": 5}, "_meta": meta})


def rule(*args: Any, **named: Any) -> Rule:
    return BUILT.match(post(*args, **named))


@pytest.mark.parametrize("headers", [PLAIN, IN_SESSION, PLAIN[:1]])
@pytest.mark.parametrize("host", ["mcp.example.test", "api.stripe.com", "api.openai.com"])
def test_a_tools_call_is_a_step_that_is_made_at_most_once(headers: Headers, host: str) -> None:
    for body in (
        call(),
        [message("ping"), call()],
        json.dumps(call()).replace("tools/call", r"tools\/c\u0061ll").encode(),
        b'{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/call"}',
    ):
        found = rule(body, headers, host)
        assert (found.effect, found.protocol, found.ending, found.key) == (Effect.AT_MOST_ONCE, "mcp", "mcp", None)


@pytest.mark.parametrize(
    "method",
    """initialize server/discover ping notifications/initialized notifications/cancelled tools/list resources/read
    resources/templates/list prompts/get completion/complete logging/setLevel""".split(),
)
def test_what_opens_and_asks_a_session_passes(method: str) -> None:
    for headers in (PLAIN, IN_SESSION):
        assert rule(message(method), headers).effect is Effect.PASSTHROUGH


@pytest.mark.parametrize(
    "body",
    [
        message(None, result={"action": "accept"}),
        message(None, error={"code": 1}),
        message("tasks/get"),
        message("a/new/one"),
        [message("ping"), message(None, result={})],
    ],
)
def test_in_a_session_all_but_calls_passes(body: Any) -> None:
    assert rule(body, IN_SESSION).effect is Effect.PASSTHROUGH
    assert rule(body, PLAIN).effect is Effect.AT_MOST_ONCE


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_listening_and_ending_pass(method: str) -> None:
    assert rule(b"", IN_SESSION, method=method).effect is Effect.PASSTHROUGH
    assert rule(b"", PLAIN, method=method).effect is not Effect.PASSTHROUGH


@pytest.mark.parametrize(
    "body",
    [
        message("eth_sendRawTransaction"),
        message("message/send"),
        {**message("ping"), "jsonrpc": "1.0"},
        {"method": "initialize"},
        b"not json but jsonrpc",
        {"text": {"jsonrpc": "2.0", "method": "ping"}},
    ],
)
def test_another_protocol_is_not_taken_for_it(body: Any) -> None:
    found = rule(body, PLAIN)
    assert (found.effect, found.protocol) == (Effect.AT_MOST_ONCE, None)


def test_ids_sessions_and_traces_tell_no_two_calls_apart() -> None:
    def prints(body: Any, headers: Headers) -> tuple[bytes, bytes]:
        request = post(body, headers)
        found = BUILT.match(request)
        return fingerprint(request, found), secondary(request, found, b"k")

    meta: dict[str, Any] = {
        "progressToken": 1, "traceparent": "00-1", "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "a"}, "tenant": "t",
    }  # fmt: skip
    other: dict[str, Any] = {
        "progressToken": "x", "traceparent": "00-2", "io.modelcontextprotocol/protocolVersion": "2027-01-01",
        "io.modelcontextprotocol/clientInfo": {"name": "b"}, "tenant": "t",
    }  # fmt: skip
    first = prints(call(**meta), IN_SESSION)
    headers = (*PLAIN, (b"mcp-session-id", b"s2"), (b"Mcp-Method", b"tools/call"), (b"Mcp-Param-Amount", b"5"))
    assert prints(call(ident="9", **other), headers) == first
    assert prints(call("cancel", **meta), IN_SESSION) != first
    assert prints(call(**{**meta, "tenant": "u"}), IN_SESSION) != first
    batch = prints([call(ident=1), call("b", 2)], IN_SESSION)
    assert prints([call(ident=7), call("b", "8")], PLAIN) == batch
    assert prints([call("b", 2), call(ident=1)], IN_SESSION) != batch


# ---- rules of a user


def test_a_users_rule_says_what_a_tool_does_and_need_know_nothing_of_the_protocol() -> None:
    rules = Rules.load(
        [
            {"host": "*", "effect": "read", "match_body": [{"path": "$.params.name", "in": ["search*"]}]},
            {"host": "own.test", "effect": "idempotent", "ignore": ["$.params.arguments.at"], "not_processed": [422]},
            {"host": "off.test", "effect": "passthrough"},
        ]
    )
    read = rules.match(post(call("search_web")))
    assert (read.effect, read.protocol) == (Effect.READ, "mcp")
    assert "$.id" in read.ignore
    own = rules.match(post(call(), host="own.test"))
    assert (own.effect, own.protocol, own.not_processed) == (Effect.IDEMPOTENT, "mcp", frozenset({404, 422}))
    assert {"$.id", "$.params.arguments.at"} <= set(own.ignore)
    assert rules.match(post({"amount": 5}, host="own.test")).protocol is None
    off = rules.match(post(call(), host="off.test"))
    assert (off.effect, off.protocol) == (Effect.PASSTHROUGH, None)
    assert rules.match(post(call("refund"))).effect is Effect.AT_MOST_ONCE


def test_a_rule_may_ask_for_headers_and_for_what_is_absent() -> None:
    rules = Rules.load(
        [
            {"host": "h", "effect": "read", "match_headers": ["X-One", "x-two-*"]},
            {"host": "h", "effect": "passthrough", "match_body": [{"path": "$.a.b", "absent": True}]},
        ]
    )

    def effect(body: Any, *names: bytes) -> Effect:
        return rules.match(post(body, (*PLAIN, *((name, b"1") for name in names)), host="h")).effect

    both = {"a": {"b": None}}
    assert effect(both, b"x-one", b"X-Two-Much") is Effect.READ
    assert effect(both, b"x-one") is effect(both, b"x-one", b"x-two") is Effect.AT_MOST_ONCE
    assert effect({"a": {}}) is effect([]) is Effect.PASSTHROUGH
    assert effect(b"{") is effect(b"") is Effect.AT_MOST_ONCE  # of what cannot be read, nothing can be said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"match_headers": ["*"]}, "field 'match_headers': '*' is no header's name"),
        ({"match_headers": ["a*b"]}, "'a*b' is no header's name"),
        ({"match_headers": ["a: b"]}, "'a: b' is no header's name"),
        ({"match_body": [{"path": "$.a", "absent": True, "in": [1]}]}, "exclude each other"),
        ({"match_body": [{"path": "$.a", "absent": "yes"}]}, "field 'match_body[0].absent': "),
        ({"protocol": "a2a"}, "field 'protocol': 'a2a' is unknown"),
        ({"protocol": "mcp", "dialect": "gemini"}, "'protocol' and 'dialect' exclude each other"),
    ],
)
def test_a_mistake_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        Rules.load([{"host": "h", "effect": "at_most_once", **change}])
    assert words in str(raised.value)
