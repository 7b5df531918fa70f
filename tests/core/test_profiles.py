"""Rules: which one holds, what the built-in ones say, and that a mistake is named."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.message import Request
from proxy.profiles import BUILT_IN, Rule, Rules, plain_path
from runtime.errors import UsageError
from runtime.step import Effect

JSON = ((b"Content-Type", b"application/json"),)
FORM = ((b"content-type", b"application/x-www-form-urlencoded"),)
BUILT = Rules.load([])


def to(
    host: str, target: str = "/", method: str = "POST", body: bytes = b"", headers: Any = JSON, port: int = 443
) -> Request:
    return Request(method, "https", host, port, target, tuple(headers), body)


def rule(*args: Any, **kwargs: Any) -> Rule:
    return BUILT.match(to(*args, **kwargs))


# ---- a host that nobody described


@pytest.mark.parametrize(
    ("method", "effect", "key"),
    [
        ("GET", Effect.READ, None),
        ("HEAD", Effect.READ, None),
        ("OPTIONS", Effect.READ, None),
        ("PUT", Effect.IDEMPOTENT, None),
        ("DELETE", Effect.IDEMPOTENT, None),
        ("POST", Effect.AT_MOST_ONCE, "Idempotency-Key"),
        ("PATCH", Effect.AT_MOST_ONCE, "Idempotency-Key"),
        ("PURGE", Effect.AT_MOST_ONCE, None),
        ("get", Effect.AT_MOST_ONCE, None),
    ],
)
def test_a_host_that_nobody_described(method: str, effect: Effect, key: str | None) -> None:
    found = rule("example.test", method=method)
    assert found.effect is effect
    assert (found.key.name if found.key else None) == key


def test_the_assigned_key_is_a_setting() -> None:
    named = Rules.load([], assigned_key="X-Once").match(to("example.test"))
    assert named.key is not None
    assert named.key.name == "X-Once"
    none = Rules.load([], assigned_key=None).match(to("example.test"))
    assert none.key is None


def test_a_get_that_says_it_is_a_delete_is_no_read() -> None:
    for name in (b"X-HTTP-Method-Override", b"x-method-override"):
        assert rule("example.test", method="GET", headers=[(name, b"delete")]).effect is Effect.IDEMPOTENT
        assert rule("example.test", method="POST", headers=[(name, b"GET")]).effect is Effect.AT_MOST_ONCE


@pytest.mark.parametrize(
    ("found", "method", "seconds"),
    [
        (rule("example.test", method="PUT"), "PUT", 300),
        (rule("example.test"), "POST", 86400),
        (rule("api.stripe.com", "/v1/refunds"), "POST", 86400),
        (rule("api.stripe.com", "/v2/core"), "POST", 86400),
        (Rules.load([{"host": "h", "effect": "idempotent"}]).match(to("h")), "DELETE", 300),
        (Rules.load([{"host": "h", "effect": "idempotent", "key": {"retention": 60}}]).match(to("h")), "DELETE", 60),
    ],
)
def test_how_long_the_same_may_be_sent_again(found: Rule, method: str, seconds: float) -> None:
    assert found.retention(method) == seconds


# ---- built in


@pytest.mark.parametrize(
    ("host", "path", "effect", "dialect"),
    [
        ("api.openai.com", "/v1/chat/completions", Effect.REPEATABLE, "openai_chat"),
        ("api.openai.com", "/v1/responses", Effect.REPEATABLE, "openai_responses"),
        ("api.openai.com", "/v1/embeddings", Effect.REPEATABLE, "openai_chat"),
        ("api.openai.com", "/v1/images/generations", Effect.REPEATABLE, None),
        ("api.openai.com", "/v1/batches", Effect.AT_MOST_ONCE, None),
        ("api.openai.com", "/v1/responses/r1/cancel", Effect.AT_MOST_ONCE, None),
        ("api.openai.com", "/v1/traces/ingest", Effect.PASSTHROUGH, None),
        ("api.anthropic.com", "/v1/messages", Effect.REPEATABLE, "anthropic"),
        ("api.anthropic.com", "/v1/messages/count_tokens", Effect.REPEATABLE, "anthropic"),
        ("api.anthropic.com", "/v1/messages/batches", Effect.AT_MOST_ONCE, None),
        ("api.stripe.com", "/v1/refunds", Effect.IDEMPOTENT, None),
        ("api.stripe.com", "/v2/core/accounts", Effect.IDEMPOTENT, None),
        ("API.stripe.com.".lower(), "/v1/refunds", Effect.IDEMPOTENT, None),
        ("api.stripe.com", "/%76%31/refunds", Effect.IDEMPOTENT, None),
        ("api.stripe.com", "/x/../v1/refunds", Effect.IDEMPOTENT, None),
        ("evil-api.stripe.com", "/v1/refunds", Effect.AT_MOST_ONCE, None),
        ("api.stripe.com.evil.test", "/v1/refunds", Effect.AT_MOST_ONCE, None),
        ("apixstripe.com", "/v1/refunds", Effect.AT_MOST_ONCE, None),
    ],
)
def test_the_built_in_rules(host: str, path: str, effect: Effect, dialect: str | None) -> None:
    found = rule(host, path, body=b"{}")
    assert (found.effect, found.dialect) == (effect, dialect)


def test_only_hosts_without_a_rule_get_a_key_by_default() -> None:
    assert rule("api.openai.com", "/v1/batches").key is None
    assert rule("api.openai.com", "/v1/models", method="GET").effect is Effect.READ


def test_stripe() -> None:
    v1, v2 = rule("api.stripe.com", "/v1/refunds"), rule("api.stripe.com", "/v2/core")
    assert v1.key is not None
    assert v1.key.name == "Idempotency-Key"
    assert v1.key.kept_over_retries
    assert (v1.stores_errors, v2.stores_errors) == (True, False)
    assert v1.in_flight == {409}
    assert rule("api.stripe.com", "/v1/refunds", method="DELETE").effect is Effect.IDEMPOTENT
    assert rule("api.stripe.com", "/v1/refunds", method="GET").effect is Effect.READ
    assert rule("api.stripe.com", "/v2/core", method="DELETE").key == v2.key


@pytest.mark.parametrize(
    ("host", "path", "body", "effect"),
    [
        ("api.openai.com", "/v1/responses", b'{"tools": [{"type": "function"}]}', Effect.REPEATABLE),
        ("api.openai.com", "/v1/responses", b'{"tools": [{"type": "web_search_preview"}]}', Effect.REPEATABLE),
        ("api.openai.com", "/v1/responses", b'{"tools": [{"type": "function"}, {"type": "mcp"}]}', Effect.AT_MOST_ONCE),
        ("api.openai.com", "/v1/responses", b'{"tools": [{"type": "never_heard_of"}]}', Effect.AT_MOST_ONCE),
        ("api.openai.com", "/v1/responses", b'{"\\u0074ools": [{"\\u0074\\u0079pe": "mcp"}]}', Effect.AT_MOST_ONCE),
        ("api.openai.com", "/v1/responses", b'{"tools": [], "tools": [{"type": "mcp"}]}', Effect.AT_MOST_ONCE),
        ("api.openai.com", "/v1/responses", b'{"background": true}', Effect.AT_MOST_ONCE),
        ("api.openai.com", "/v1/responses", b'{"background": false}', Effect.REPEATABLE),
        ("api.openai.com", "/v1/responses", b'{"conversation": "c1"}', Effect.AT_MOST_ONCE),
        ("api.openai.com", "/v1/responses", b'{"conversation": null}', Effect.REPEATABLE),
        ("api.openai.com", "/v1/responses", b'{"input": "background: true"}', Effect.REPEATABLE),
        ("api.openai.com", "/v1/responses", b"{broken", Effect.AT_MOST_ONCE),
        ("api.openai.com", "/v1/chat/completions", b'{"tools": [{"type": "function"}]}', Effect.REPEATABLE),
        ("api.openai.com", "/v1/chat/completions", b'{"tools": [{"type": "mcp"}]}', Effect.AT_MOST_ONCE),
        (
            "api.anthropic.com",
            "/v1/messages",
            b'{"tools": [{"name": "x"}, {"type": "bash_20250124"}]}',
            Effect.REPEATABLE,
        ),
        ("api.anthropic.com", "/v1/messages", b'{"tools": [{"type": "code_execution_1"}]}', Effect.AT_MOST_ONCE),
        ("api.anthropic.com", "/v1/messages", b'{"mcp_servers": [{"url": "x"}]}', Effect.AT_MOST_ONCE),
        ("api.anthropic.com", "/v1/messages", b'{"mcp_servers": []}', Effect.REPEATABLE),
        ("api.anthropic.com", "/v1/messages", b'{"container": "c1"}', Effect.AT_MOST_ONCE),
    ],
)
def test_a_model_that_may_act_is_asked_once(host: str, path: str, body: bytes, effect: Effect) -> None:
    assert rule(host, path, body=body).effect is effect
    assert rule(host, path, body=body).dialect is not None


@pytest.mark.parametrize(
    ("body", "headers", "effect"),
    [
        (b"grant_type=client_credentials&scope=a", FORM, Effect.PASSTHROUGH),
        (b"scope=a&grant%5Ftype=refresh%5Ftoken&refresh_token=x", FORM, Effect.PASSTHROUGH),
        (b"grant_type=urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Atoken-exchange", FORM, Effect.PASSTHROUGH),
        (b'{"grant_type": "password"}', JSON, Effect.PASSTHROUGH),
        (b"grant_type=rsu&shares=100", FORM, Effect.AT_MOST_ONCE),
        (b'{"grant": {"grant_type": "password"}}', JSON, Effect.AT_MOST_ONCE),
        (b'{"text": "grant_type=password"}', JSON, Effect.AT_MOST_ONCE),
        (b"grant_type=password", (), Effect.AT_MOST_ONCE),
    ],
)
def test_token_requests_are_known_by_their_shape(body: bytes, headers: Any, effect: Effect) -> None:
    assert rule("login.example.test", "/any/path", body=body, headers=headers).effect is effect


def test_rules_are_the_only_place_that_knows_a_provider() -> None:
    names = (
        "openai.com",
        "anthropic.com",
        "stripe.com",
        "stripe-version",
        "x-stainless",
        "amz-sdk",
        "prompt_cache_key",
    )
    for path in BUILT_IN.parent.glob("*.py"):
        code = path.read_text("utf-8").lower()
        assert [name for name in names if name in code] == [], path.name


# ---- the user's


def test_first_match_wins_and_the_users_come_first() -> None:
    rules = Rules.load(
        [
            {"host": "api.stripe.com", "path": "/v1/search", "effect": "read", "name": "search"},
            {"host": "api.stripe.com", "path": "/v1/*", "methods": ["POST"], "effect": "at_most_once"},
        ]
    )
    assert rules.match(to("api.stripe.com", "/v1/search?q=1")).name == "search"
    assert rules.match(to("api.stripe.com", "/v1/refunds")).name == "route 2"
    assert rules.match(to("api.stripe.com", "/v1/refunds/x")).name == "Stripe v1"
    assert rules.match(to("api.stripe.com", "/v1/refunds")) is rules.match(to("api.stripe.com", "/v1/charges"))


@pytest.mark.parametrize(
    ("pattern", "host", "port", "matches"),
    [
        ("localhost", "localhost", 80, True),
        ("localhost", "localhost", 9001, True),
        ("LocalHost", "localhost", 9001, True),
        ("127.0.0.1:9001", "127.0.0.1", 9001, True),
        ("127.0.0.1:9001", "127.0.0.1", 9002, False),
        ("127.0.0.1", "127a0b0c1", 80, False),
        ("*:9001", "anything.test", 9001, True),
        ("*:9001", "anything.test", 443, False),
        ("*:*", "a", 1, True),
        ("*", "a.b.c", 1, True),
        ("*.example.test", "a.b.example.test", 1, True),
        ("*.example.test", "example.test", 1, False),
        ("api-*.example.test", "api-eu.example.test", 1, True),
        ("[::1]:9001", "::1", 9001, True),
        ("[::1]", "::1", 80, True),
        ("::1", "::1", 80, True),
        ("example.test.", "example.test", 80, True),
        ("example.test", "example.test.", 80, True),
    ],
)
def test_hosts(pattern: str, host: str, port: int, matches: bool) -> None:
    rules = Rules.load([{"host": ["never.test", pattern], "effect": "read", "name": "it"}])
    assert (rules.match(to(host, port=port)).name == "it") == matches


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("/v1/refunds", "/v1/refunds", True),
        ("/v1/refunds", "/v1/refunds/", False),
        ("/v1/*", "/v1/refunds", True),
        ("/v1/*", "/v1/", False),
        ("/v1/*", "/v1/a/b", False),
        ("/v1/*/capture", "/v1/a/capture", True),
        ("/v1/*/capture", "/v1//capture", False),
        ("/v1/**", "/v1/a/b", True),
        ("/v1/**", "/v1", False),
        ("/v1*/**", "/v1beta/x", True),
        ("/v1*/models/*:generate", "/v1beta/models/m-1:generate", True),
        ("/v1*/models/*:generate", "/v1/models/a/b:generate", False),
        ("/**/get", "/get", True),
        ("/**/get", "/a/b/get", True),
        ("/**/get", "/a/forget", False),
        ("**", "/anything", True),
        ("/a.b", "/axb", False),
        ("/a\nb", "/a\nb", True),
    ],
)
def test_paths(pattern: str, path: str, matches: bool) -> None:
    rules = Rules.load([{"host": "h", "path": ["/never", pattern], "effect": "read", "name": "it"}])
    assert (rules.match(to("h", path)).name == "it") == matches


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("/a/b", "/a/b"),
        ("/%61/%7e%2D%5f%2E", "/a/~-_."),
        ("/a%2Fb%3F%25%20%00", "/a%2Fb%3F%25%20%00"),
        ("/a/./b/../c", "/a/c"),
        ("/a/%2e%2E/b", "/b"),
        ("/../../a", "/a"),
        ("/a/..", "/"),
        ("/a/b/.", "/a/b/"),
        ("/a/.b/..c", "/a/.b/..c"),
        ("/a//b/", "/a//b/"),
        ("*", "*"),
    ],
)
def test_a_path_is_matched_as_an_upstream_takes_it(raw: str, plain: str) -> None:
    assert plain_path(raw) == plain


@given(st.text(st.sampled_from("/.a%2eE5F"), max_size=30).map("/".__add__))
def test_a_plain_path_stays_plain(path: str) -> None:
    plain = plain_path(path)
    assert plain.startswith("/")
    assert "/../" not in plain
    assert "/./" not in plain


def test_a_route_may_ask_the_body() -> None:
    rules = Rules.load(
        [
            {
                "host": "h",
                "effect": "read",
                "name": "query",
                "match_body": [{"path": "$.query", "in": ["query*", "{*"]}],
            },
            {
                "host": "h",
                "effect": "idempotent",
                "name": "keyed",
                "match_body": [{"path": "body.id"}, {"path": "$.n"}],
            },
        ]
    )
    assert rules.match(to("h", body=b'{"query": "query { me }"}')).name == "query"
    assert rules.match(to("h", body=b'{"query": "mutation { pay }"}')).effect is Effect.AT_MOST_ONCE
    assert rules.match(to("h", body=b'{"id": 1, "n": 2}')).name == "keyed"
    assert rules.match(to("h", body=b'{"id": 1}')).name != "keyed"
    assert rules.match(to("h", body=b"id=1&n=2", headers=FORM)).name == "keyed"
    assert rules.match(to("h", body=b"\x00")).name != "keyed"


WHOLE: dict[str, Any] = {
    "name": "n", "host": "h", "methods": ["POST"], "path": "/p", "match_body": [{"path": "$.a", "not_in": [1]}],
    "effect": "idempotent", "kind": "money", "key": {"in": "header", "name": "K", "retention": 5, "sdk": "caller"},
    "ignore": ["$.b", "query.c", "header.d"], "dialect": "gemini", "stores_errors": True, "in_flight": [409],
    "not_processed": [422], "secret_query": ["key"],
}  # fmt: skip


def test_a_whole_route() -> None:
    found = Rules.load([WHOLE]).match(to("h", "/p", body=b'{"a": 2}'))
    assert found.key is not None
    assert (found.key.name, found.key.retention, found.key.sdk, found.key.where) == ("K", 5, "caller", "header")
    assert (found.name, found.effect, found.kind, found.dialect) == ("n", Effect.IDEMPOTENT, "money", "gemini")
    assert (found.ignore, found.secret_query) == (("$.b", "query.c", "header.d"), frozenset({"key"}))
    assert (found.in_flight, found.not_processed) == (frozenset({409}), frozenset({422}))
    assert found.stores_errors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hots": "h"}, "unknown field 'hots'; is 'host' meant?"),
        ({"zzz": 1}, "unknown field 'zzz'; there are name, host, methods"),
        ({"host": None}, "field 'host': "),
        ({"host": []}, "field 'host': an empty list"),
        ({"host": "https://h"}, "field 'host': 'https://h' is no host"),
        ({"host": "h/p"}, "is no host"),
        ({"host": "h:99999"}, "there is no port 99999"),
        ({"host": ["h", 1]}, "field 'host[1]': "),
        ({"path": "v1/x"}, "field 'path': 'v1/x' is no path"),
        ({"path": "/p?q=1"}, "is no path"),
        ({"methods": ["post"]}, "field 'methods': 'post' is no method: write 'POST'"),
        ({"methods": "POST"}, "field 'methods': "),
        ({"effect": "once"}, "field 'effect': 'once' is unknown, there are 'read', 'repeatable'"),
        ({"kind": "cash"}, "field 'kind': 'cash' is unknown"),
        ({"dialect": "openai"}, "field 'dialect': 'openai' is unknown"),
        ({"stores_errors": "yes"}, "field 'stores_errors': "),
        ({"stores_errors": 1}, "field 'stores_errors': "),
        ({"in_flight": [200]}, "field 'in_flight': 200 is no status of an error"),
        ({"in_flight": ["409"]}, "field 'in_flight[0]': "),
        ({"ignore": ["prompt_cache_key"]}, "field 'ignore': 'prompt_cache_key' names no field"),
        ({"ignore": ["$.a["]}, "field 'ignore': '$.a['"),
        ({"key": {"in": "body"}}, "field 'key.in': 'body' is unknown, there are 'header'"),
        ({"key": {"where": "header"}}, "unknown field 'key.where'; there are in, name, retention, sdk"),
        ({"key": {"retenton": 5}}, "unknown field 'key.retenton'; is 'retention' meant?"),
        ({"key": {"retention": 0}}, "field 'key.retention': "),
        ({"key": {"retention": float("inf")}}, "field 'key.retention': "),
        ({"key": {"name": "Authorization"}}, "'Authorization' cannot be the header of a key"),
        ({"key": {"name": "a b"}}, "cannot be the header of a key"),
        ({"key": {"name": "Twiceshy-Step"}}, "cannot be the header of a key"),
        ({"key": {"sdk": "random"}}, "field 'key.sdk': 'random' is unknown"),
        ({"key": "Idempotency-Key"}, "field 'key': "),
        ({"match_body": [{"path": "a"}]}, "field 'match_body[0].path': 'a' is no path"),
        (
            {"match_body": [{"path": "$.a", "is": 1}]},
            "unknown field 'match_body[0].is'; there are path, in, not_in, names",
        ),
        ({"match_body": [{"path": "$.a", "in": [1], "not_in": [2]}]}, "exclude each other"),
        ({"match_body": [{"path": "$.a", "names_not_in": [], "not_in": [2]}]}, "exclude each other"),
        ({"match_body": [{"path": "$.a", "names_not_in": [1]}]}, "field 'match_body[0].names_not_in[0]': "),
        ({"repeatable_except": [{"path": "$.a"}]}, "'repeatable_except' is of no use to effect = 'idempotent'"),
        ({"effect": "read"}, "a key is of no use to effect = 'read'"),
    ],
)
def test_a_mistake_is_named_with_file_and_route(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        Rules.load([WHOLE, {**WHOLE, **change}], origin="/home/me/twiceshy.toml")
    text = str(raised.value)
    assert text.startswith("/home/me/twiceshy.toml: route 2 (n): ")
    assert words in text
    assert "\n" not in text


def test_a_missing_field_and_what_is_no_table() -> None:
    with pytest.raises(UsageError, match=r"^twiceshy.toml: route 1 \(h\): field 'effect' is missing$"):
        Rules.load([{"host": "h"}])
    with pytest.raises(UsageError, match=r"^twiceshy.toml: route 1: "):
        Rules.load(["h"])  # type: ignore[list-item]


def test_the_built_in_file_has_a_name_for_every_route() -> None:
    routes = tomllib.loads(BUILT_IN.read_text("utf-8"))["route"]
    names = [route["name"] for route in routes]
    assert len(set(names)) == len(names)


def test_the_hash_names_the_rules() -> None:
    one, two = {"host": "h", "effect": "read"}, {"host": "g", "effect": "read"}
    assert len(BUILT.hash) == 32
    assert Rules.load([one]).hash == Rules.load([dict(reversed(one.items()))], origin="other").hash
    hashes = [
        BUILT,
        Rules.load([one]),
        Rules.load([one, two]),
        Rules.load([two, one]),
        Rules.load([], assigned_key=None),
    ]
    assert len({rules.hash for rules in hashes}) == len(hashes)
