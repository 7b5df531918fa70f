"""Rules for hosts that are not opened, and for what is refused."""

from typing import Any

import pytest

from proxy.message import Request
from proxy.profiles import Rules
from runtime.errors import UsageError
from runtime.step import Effect


def to(host: str, target: str = "/", method: str = "POST") -> Request:
    return Request(method, "https", host, 443, target, (), b"")


def test_a_host_is_tunnelled_where_the_first_rule_for_it_says_so() -> None:
    rules = Rules.load(
        [
            {"host": "admin.test", "path": "/secret", "effect": "deny"},
            {"host": ["*.test", "odd.example:8443"], "effect": "tunnel", "name": "blind", "kind": "infra"},
            {"host": "late.test", "effect": "read"},
        ]
    )
    assert rules.is_blind("grpc.test", 443)
    assert rules.is_blind("grpc.test", 50051)
    assert rules.is_blind("late.test", 443)
    assert rules.is_blind("odd.example", 8443)
    assert not rules.is_blind("odd.example", 443)
    assert not rules.is_blind("api.openai.com", 443)
    # What stands before it would be lost in a tunnel: nobody sees a path there.
    assert not rules.is_blind("admin.test", 443)
    # What of such a host can be seen (plain http, the gateway address) is passed on.
    found = rules.match(to("grpc.test"))
    assert (found.name, found.effect, found.denied) == ("blind", Effect.PASSTHROUGH, False)
    assert not Rules.load([]).is_blind("grpc.test", 443)


def test_what_is_denied_is_found_like_any_rule() -> None:
    rules = Rules.load(
        [
            {"host": "a.test", "path": "/admin/**", "methods": ["DELETE"], "effect": "deny", "name": "no deletes"},
            {"host": "a.test", "effect": "read"},
            {"host": "*", "effect": "deny"},
        ]
    )
    assert rules.match(to("a.test", "/admin/x", "DELETE")).name == "no deletes"
    assert rules.match(to("a.test", "/admin/x", "DELETE")).denied
    assert not rules.match(to("a.test", "/admin/x", "GET")).denied
    assert rules.match(to("b.test")).denied
    assert not rules.is_blind("b.test", 443)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", "/v1"),
        ("methods", ["GET"]),
        ("match_body", [{"path": "$.a"}]),
        ("ignore", ["$.a"]),
        ("dialect", "openai_chat"),
        ("stores_errors", True),
        ("secret_query", ["key"]),
        ("in_flight", [409]),
    ],
)
def test_a_tunnel_has_a_host_and_nothing_else(field: str, value: Any) -> None:
    with pytest.raises(UsageError) as raised:
        Rules.load([{"host": "h", "effect": "tunnel", field: value}], origin="/home/me/twiceshy.toml")
    text = str(raised.value)
    assert text.startswith("/home/me/twiceshy.toml: route 1 (h): ")
    assert f"field {field!r} is of no use to effect = 'tunnel'" in text


def test_a_key_is_of_no_use_to_what_is_denied() -> None:
    with pytest.raises(UsageError, match="a key is of no use to effect = 'deny'"):
        Rules.load([{"host": "h", "effect": "deny", "key": {}}])
