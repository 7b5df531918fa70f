import tomllib

import pytest

from proxy.message import Request
from proxy.profiles import Rules
from runtime.step import Effect
from sandbox.client import PROJECT


@pytest.fixture(scope="module")
def rules() -> Rules:
    return Rules.load(tomllib.loads((PROJECT / "sandbox" / "routes.toml").read_text("utf-8"))["route"])


@pytest.mark.parametrize(
    ("method", "target", "effect", "key", "dialect"),
    [
        ("GET", "/pantry", Effect.READ, False, None),
        ("GET", "/orders/A-1/status", Effect.READ, False, None),
        ("POST", "/orders", Effect.IDEMPOTENT, True, None),
        ("POST", "/payments/v1/refunds", Effect.IDEMPOTENT, True, None),
        ("GET", "/payments/v1/refunds?limit=1", Effect.READ, False, None),
        ("POST", "/v1/refunds", Effect.IDEMPOTENT, True, None),
        ("GET", "/v1/refunds/re_0001", Effect.READ, False, None),
        ("POST", "/crm/notes", Effect.IDEMPOTENT, True, None),
        ("POST", "/email/send", Effect.AT_MOST_ONCE, False, None),
        ("POST", "/v1/chat/completions", Effect.REPEATABLE, False, "openai_chat"),
        ("POST", "/v1/responses", Effect.REPEATABLE, False, "openai_responses"),
        ("POST", "/v1/embeddings", Effect.REPEATABLE, False, "openai_chat"),
        ("POST", "/v1/messages", Effect.REPEATABLE, False, "anthropic"),
        ("POST", "/v1beta/models/m:generateContent", Effect.REPEATABLE, False, "gemini"),
        ("POST", "/v1/models/m:streamGenerateContent?alt=sse", Effect.REPEATABLE, False, "gemini"),
        ("POST", "/any/x", Effect.AT_MOST_ONCE, True, None),
        ("PUT", "/any/x", Effect.IDEMPOTENT, False, None),
    ],
)
@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 40123), ("sandbox", 80)])
def test_rules_for_the_sandbox(
    rules: Rules, host: str, port: int, method: str, target: str, effect: Effect, key: bool, dialect: str | None
) -> None:
    rule = rules.match(Request(method, "http", host, port, target, (), b""))
    assert (rule.effect, rule.key is not None, rule.dialect) == (effect, key, dialect)
    if "payments" in target and method == "POST":
        assert rule.key is not None
        assert (rule.key.retention, rule.in_flight) == (86400, frozenset({409}))
