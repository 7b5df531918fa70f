"""The built-in rules for models: whose calls may be made again, told by host, or by the shape of what is asked."""

import json
from typing import Any

import pytest

from proxy.message import Request
from proxy.profiles import Rule, Rules
from runtime.step import Effect

BUILT = Rules.load([])
REPEATABLE, ONCE = Effect.REPEATABLE, Effect.AT_MOST_ONCE

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
RESPONSES: dict[str, Any] = {"model": "m", "input": [{"role": "user", "content": "hi"}]}
MESSAGES: dict[str, Any] = {**CHAT, "max_tokens": 9}

VERTEX = "/v1/projects/p/locations/eu/publishers"
BEDROCK = "bedrock-runtime.eu-west-1.amazonaws.com"
AI_STUDIO = "generativelanguage.googleapis.com"


HEADERS = ((b"Content-Type", b"application/json"),)
VERSION = (b"anthropic-version", b"2023-06-01")


def rule(host: str, path: str, body: Any = None, method: str = "POST", versioned: bool = True) -> Rule:
    text = b"{}" if body is None else json.dumps(body).encode()
    return BUILT.match(Request(method, "https", host, 443, path, (*HEADERS, VERSION) if versioned else HEADERS, text))


# ---- by host


@pytest.mark.parametrize(
    ("host", "path", "dialect"),
    [
        (AI_STUDIO, "/v1beta/models/gemini-9-pro:generateContent", "gemini"),
        (AI_STUDIO, "/v1/models/gemini-9-pro:streamGenerateContent?alt=sse", "gemini"),
        (AI_STUDIO, "/v1beta/tunedModels/mine:generateContent", "gemini"),
        (AI_STUDIO, "/v1beta/models/e:embedContent", "gemini"),
        (AI_STUDIO, "/v1beta/models/e:batchEmbedContents", "gemini"),
        (AI_STUDIO, "/v1beta/models/e:countTokens", "gemini"),
        ("aiplatform.googleapis.com", f"{VERTEX}/google/models/gemini-9:streamGenerateContent", "gemini"),
        ("europe-west4-aiplatform.googleapis.com", f"{VERTEX}/google/models/e:predict", "gemini"),
        ("aiplatform.googleapis.com", "/v1/publishers/google/models/gemini-9:generateContent", "gemini"),
        ("us-east5-aiplatform.googleapis.com", f"{VERTEX}/anthropic/models/c:streamRawPredict", "anthropic"),
        ("mine.openai.azure.com", "/openai/deployments/d/chat/completions?api-version=1", "openai_chat"),
        ("mine.openai.azure.com", "/openai/deployments/d/embeddings?api-version=1", "openai_chat"),
        ("mine.openai.azure.com", "/openai/v1/responses", "openai_responses"),
        ("mine.cognitiveservices.azure.com", "/openai/responses?api-version=1", "openai_responses"),
        ("mine.services.ai.azure.com", "/models/chat/completions", "openai_chat"),
        ("api.mistral.ai", "/v1/chat/completions", "openai_chat"),
        ("api.mistral.ai", "/v1/fim/completions", "openai_chat"),
        ("api.mistral.ai", "/v1/embeddings", "openai_chat"),
        ("api.cohere.com", "/v2/chat", None),
        ("api.cohere.ai", "/v1/rerank", None),
        ("openrouter.ai", "/api/v1/chat/completions", "openai_chat"),
        ("openrouter.ai", "/api/v1/responses", "openai_responses"),
        ("bedrock-runtime.eu-west-1.amazonaws.com", "/model/eu.claude-9/converse-stream", None),
        ("bedrock-runtime.us-east-1.amazonaws.com", "/model/arn%3Aaws%3Abedrock%2Fx/invoke", None),
    ],
)
def test_a_models_call_may_be_made_again(host: str, path: str, dialect: str | None) -> None:
    found = rule(host, path)
    assert (found.effect, found.dialect, found.kind, found.key) == (REPEATABLE, dialect, "llm", None)


@pytest.mark.parametrize(
    ("host", "path"),
    [
        (AI_STUDIO, "/v1beta/cachedContents"),
        (AI_STUDIO, "/v1beta/models/veo-9:predictLongRunning"),
        (AI_STUDIO, "/v1beta/models/gemini-9:batchGenerateContent"),
        (AI_STUDIO, "/upload/v1beta/files"),
        ("aiplatform.googleapis.com", "/v1/projects/p/locations/eu/batchPredictionJobs"),
        ("aiplatform.googleapis.com", "/v1/projects/p/locations/eu/endpoints/1:predict"),
        ("aiplatform.googleapis.com", f"{VERTEX}/google/models/veo-9:predictLongRunning"),
        ("storage.googleapis.com", f"{VERTEX}/google/models/g:generateContent"),
        ("mine.openai.azure.com", "/openai/files"),
        ("mine.openai.azure.com", "/openai/v1/responses/r/cancel"),
        ("api.mistral.ai", "/v1/agents/completions"),
        ("api.mistral.ai", "/v1/conversations"),
        ("api.cohere.com", "/v1/connectors"),
        ("openrouter.ai", "/api/v1/private-endpoints"),
        ("bedrock-agent-runtime.eu-west-1.amazonaws.com", "/model/m/converse"),
        ("bedrock-runtime.eu-west-1.amazonaws.com", "/async-invoke"),
        ("bedrock-runtime.eu-west-1.amazonaws.com.evil.test", "/model/m/converse"),
    ],
)
def test_what_else_they_take_is_done_once(host: str, path: str) -> None:
    assert rule(host, path).effect is ONCE


@pytest.mark.parametrize("host", [AI_STUDIO, "mine.openai.azure.com", "api.mistral.ai", "api.cohere.com"])
def test_providers_get_no_key_that_they_do_not_know(host: str) -> None:
    assert rule(host, "/v1/whatever").key is None


def test_geminis_key_in_the_query_is_a_secret() -> None:
    assert rule(AI_STUDIO, "/v1beta/models/m:generateContent?key=AIza").secret_query == {"key"}


@pytest.mark.parametrize(
    ("host", "path", "body", "effect"),
    [
        (AI_STUDIO, "/v1/models/m:generateContent", {"tools": [{"functionDeclarations": []}]}, REPEATABLE),
        (AI_STUDIO, "/v1/models/m:generateContent", {"tools": [{"google_search": {}}]}, REPEATABLE),
        (AI_STUDIO, "/v1/models/m:generateContent", {"tools": [{"codeExecution": {}}, {"urlContext": {}}]}, REPEATABLE),
        (AI_STUDIO, "/v1/models/m:generateContent", {"tools": [{"mcpServers": [{"url": "x"}]}]}, ONCE),
        (AI_STUDIO, "/v1/models/m:generateContent", {"tools": [{"neverHeardOf": {}}]}, ONCE),
        (AI_STUDIO, "/v1/models/m:generateContent", {"tools": {"neverHeardOf": {}}}, ONCE),
        ("aiplatform.googleapis.com", f"{VERTEX}/google/models/m:generateContent", {"tools": [{"new": {}}]}, ONCE),
        ("aiplatform.googleapis.com", f"{VERTEX}/anthropic/models/m:rawPredict", {"mcp_servers": [{}]}, ONCE),
        ("x.openai.azure.com", "/openai/v1/responses", {"tools": [{"type": "mcp"}]}, ONCE),
        ("api.openai.com", "/v1/responses", {"prompt": {"id": "pmpt_1"}}, ONCE),
        ("api.mistral.ai", "/v1/chat/completions", {"tools": [{"type": "connector"}]}, ONCE),
        ("openrouter.ai", "/api/v1/chat/completions", {"tools": [{"type": "openrouter:thing"}]}, ONCE),
        ("api.cohere.com", "/v1/chat", {"connectors": [{"id": "web-search"}]}, ONCE),
        ("api.cohere.com", "/v1/chat", {"conversation_id": "c"}, ONCE),
        (BEDROCK, "/model/m/converse", {"toolConfig": {"tools": [{"toolSpec": {}}]}}, REPEATABLE),
        (BEDROCK, "/model/m/converse", {"toolConfig": {"tools": [{"systemTool": {}}]}}, ONCE),
        (BEDROCK, "/model/m/invoke", {"tools": [{"type": "code_execution_1"}]}, ONCE),
    ],
)  # fmt: skip
def test_a_model_that_may_act_is_asked_once(host: str, path: str, body: Any, effect: Effect) -> None:
    assert rule(host, path, body).effect is effect


# ---- by shape


@pytest.mark.parametrize(
    ("host", "path", "body", "name"),
    [
        ("localhost", "/v1/chat/completions", CHAT, "chat completions, by shape"),
        ("localhost", "/chat/completions", CHAT, "chat completions, by shape"),
        ("gateway.test", "/openai/deployments/d/chat/completions", CHAT, "chat completions, by shape"),
        (AI_STUDIO, "/v1beta/openai/chat/completions", CHAT, "chat completions, by shape"),
        ("localhost", "/v1/responses", RESPONSES, "responses, by shape"),
        ("localhost", "/v1/messages", MESSAGES, "messages, by shape"),
        ("gateway.test", "/anthropic/v1/messages", MESSAGES, "messages, by shape"),
        ("localhost", "/v1/embeddings", {"model": "m", "input": "hi"}, "embeddings, by shape"),
    ],
)
def test_a_model_is_known_by_the_shape_of_what_it_is_asked(host: str, path: str, body: Any, name: str) -> None:
    found = rule(host, path, body)
    assert (found.name, found.effect, found.kind) == (name, REPEATABLE, "llm")
    assert found.dialect is not None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", None),
        ("/v1/chat/completions", {"messages": CHAT["messages"]}),
        ("/v1/chat/completions", {"model": "m", "messages": []}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"to": "a@example.org", "text": "hi"}]}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "recipient"}]}),
        ("/v1/chat/completions/c1", CHAT),
        ("/v1/chat", CHAT),
        ("/api/chat", CHAT),
        ("/xchat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/v1/messages", {"to": "+4912345", "type": "text", "text": {"body": "hi"}}),
        ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": "hi"}),
        ("/v1/messages/batches", MESSAGES),
        ("/v1/responses", {"model": "m", "input": "hi"}),
        ("/v1/responses", {"form": "f", "input": [{"role": "user"}]}),
        ("/responses", RESPONSES),
        ("/v1/embeddings", {"id": "v1", "values": [1, 2]}),
    ],
)
def test_what_only_looks_like_it_is_done_once(path: str, body: Any) -> None:
    found = rule("example.test", path, body)
    assert (found.effect, found.dialect) == (ONCE, None)
    assert found.key is not None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}, {"type": "web_search"}]}),
        ("/v1/responses", {**RESPONSES, "tools": [{"type": "web_search"}]}),
        ("/v1/responses", {**RESPONSES, "background": True}),
        ("/v1/messages", {**MESSAGES, "tools": [{"type": "web_search_1"}]}),
        ("/v1/messages", {**MESSAGES, "mcp_servers": [{"url": "x"}]}),
    ],
)
def test_hosted_tools_of_strangers_are_not_trusted(path: str, body: Any) -> None:
    assert rule("example.test", path, body).effect is ONCE


def test_messages_without_the_header_of_that_api_are_somebody_elses() -> None:
    assert rule("localhost", "/v1/messages", MESSAGES, versioned=False).effect is ONCE
    assert rule("api.anthropic.com", "/v1/messages", MESSAGES, versioned=False).effect is REPEATABLE


def test_other_methods_are_not_meant() -> None:
    assert rule("localhost", "/v1/chat/completions", CHAT, method="GET").effect is Effect.READ
    assert rule("localhost", "/v1/chat/completions", CHAT, method="PUT").effect is Effect.IDEMPOTENT


def test_a_rule_of_ones_own_comes_first() -> None:
    own = {"host": "localhost:9000", "path": "/v1/chat/completions", "methods": ["POST"], "effect": "at_most_once"}
    request = Request("POST", "http", "localhost", 9000, "/v1/chat/completions", HEADERS, json.dumps(CHAT).encode())
    assert BUILT.match(request).effect is REPEATABLE
    assert Rules.load([own]).match(request).effect is ONCE
