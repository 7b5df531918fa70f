"""The language models: what they say is a function of what they are asked, in whatever dialect, streamed or not."""

import base64
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

from sandbox import model
from sandbox.client import Sandbox
from tests.sandbox.conftest import Client


def chat(stream: bool, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": stream, **more}


def test_openai_answers_are_a_function_of_the_body(sandbox: Sandbox, ask: Client) -> None:
    first, second = (ask("POST", "/v1/chat/completions", body=chat(False)) for _ in range(2))
    other = ask("POST", "/v1/chat/completions", body=chat(False, user="x"))
    assert first.body == second.body
    assert first.json["choices"] == other.json["choices"]
    assert first.json["usage"]["total_tokens"] == 26  # "user: hello" and two dozen words
    assert sandbox.counts() == {"llm": 3}


def test_a_temperature_makes_each_answer_another(ask: Client) -> None:
    bodies = {ask("POST", "/v1/chat/completions", body=chat(False, temperature=1)).body for _ in range(3)}
    assert len(bodies) == 3


def test_openai_stream_says_the_same(ask: Client) -> None:
    plain = ask("POST", "/v1/chat/completions", body=chat(False)).json["choices"][0]["message"]["content"]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        got = ask("POST", "/v1/chat/completions", body=chat(True, **options))
        assert got.headers["Content-Type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in got.body.decode().split("\n\n")[:-1]]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        words = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
        assert "".join(words) == plain
        assert len([word for word in words if word]) > 5
        assert ("usage" in chunks[-1]) == bool(options)


def test_anthropic_stream_says_the_same(ask: Client) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    plain = ask("POST", "/v1/messages", body=body).json
    got = ask("POST", "/v1/messages", body={**body, "stream": True})
    events = [event.split("\n") for event in got.body.decode().split("\n\n")[:-1]]
    kinds = [kind.removeprefix("event: ") for kind, _ in events]
    datas = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert kinds == [data["type"] for data in datas]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    words = [data["delta"]["text"] for data in datas if data["type"] == "content_block_delta"]
    assert "".join(words) == plain["content"][0]["text"]
    assert datas[-2]["usage"]["output_tokens"] == plain["usage"]["output_tokens"]
    assert datas[0]["message"]["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


def test_the_model_refuses_what_it_does_not_understand(sandbox: Sandbox, ask: Client) -> None:
    for body in (b"{", b"[]", b'{"model": "m"}', b'{"model": "m", "messages": [1]}'):
        assert ask("POST", "/v1/chat/completions", body=body).status == 400
    assert ask("POST", "/v1/messages", body=b"{").json["type"] == "error"
    assert sandbox.counts() == {}


def test_chunks_make_the_text_again() -> None:
    text = "one two  three four"
    assert "".join(model.chunks(text, 1)) == "".join(model.chunks(text, 3)) == text


# ---- every dialect

HELLO = "hello"
SCHEMA = {"type": "object", "properties": {"charge": {"type": "string"}, "amount": {"type": "integer"}}}
#: The same conversation in each dialect: the user's words, then a tool's result if there is one.
Asking = Callable[[str, bool, str | None], tuple[str, dict[str, Any]]]


def openai_chat(words: str, stream: bool, result: str | None) -> tuple[str, dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": words}]
    if result is not None:
        called = {"id": "c", "type": "function", "function": {"name": "refund", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [called]})
        messages.append({"role": "tool", "tool_call_id": "c", "content": result})
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("note", "refund")]
    more = {"tools": tools} if "refund" in words else {}
    return "/v1/chat/completions", {"model": "m", "messages": messages, "stream": stream, **more}


def openai_responses(words: str, stream: bool, result: str | None) -> tuple[str, dict[str, Any]]:
    given: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": words}]}]
    if result is not None:
        given.append({"type": "function_call", "call_id": "c", "name": "refund", "arguments": "{}"})
        given.append({"type": "function_call_output", "call_id": "c", "output": result})
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("note", "refund")]
    more = {"tools": tools} if "refund" in words else {}
    return "/v1/responses", {"model": "m", "input": given, "stream": stream, **more}


def anthropic(words: str, stream: bool, result: str | None) -> tuple[str, dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": words}]
    if result is not None:
        used = {"type": "tool_use", "id": "t", "name": "refund", "input": {}}
        messages.append({"role": "assistant", "content": [used]})
        messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": result}]})
    tools = [{"name": name, "input_schema": SCHEMA} for name in ("note", "refund")]
    more = {"tools": tools} if "refund" in words else {}
    return "/v1/messages", {"model": "m", "max_tokens": 9, "messages": messages, "stream": stream, **more}


def gemini(words: str, stream: bool, result: str | None) -> tuple[str, dict[str, Any]]:
    contents: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": words}]}]
    if result is not None:
        contents.append({"role": "model", "parts": [{"functionCall": {"name": "refund", "args": {}}}]})
        contents.append({"parts": [{"functionResponse": {"name": "refund", "response": {"result": result}}}]})
    tools = {"functionDeclarations": [{"name": name, "parametersJsonSchema": SCHEMA} for name in ("note", "refund")]}
    more = {"tools": [tools]} if "refund" in words else {}
    verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
    return f"/v1beta/models/m:{verb}", {"contents": contents, **more}


def datas(body: bytes) -> list[Any]:
    """The events' data of a stream."""
    lines = [line for line in body.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def said(asking: Asking, body: bytes, stream: bool) -> Any:
    """Text, or name and arguments of a call."""
    texts: list[str] = []
    name = ""
    events = datas(body) if stream else [json.loads(body)]
    for event in events:
        if asking is openai_chat:
            for choice in event["choices"]:
                message = choice["delta" if stream else "message"]
                texts.append(message.get("content") or "")
                for call in message.get("tool_calls", ()):
                    name = call["function"].get("name") or name
                    texts.append(call["function"]["arguments"])
        elif asking is openai_responses:
            if event.get("type", "").endswith(".delta"):
                texts.append(event["delta"])
            for item in event.get("output", ()) if not stream else [event["item"]] if "item" in event else ():
                name = item.get("name") or name
                if not stream:
                    texts += [item.get("arguments", ""), *(part["text"] for part in item.get("content", ()))]
        elif asking is anthropic:
            for block in event.get("content", ()) if not stream else [event.get("content_block") or {}]:
                name = block.get("name") or name
                texts.append(block.get("text", ""))
                if not stream and "input" in block:
                    texts.append(json.dumps(block["input"]))
            delta = event.get("delta") or {}
            texts.append(delta.get("text") or delta.get("partial_json") or "")
        else:
            for part in event["candidates"][0]["content"]["parts"]:
                texts.append(part.get("text", ""))
                if "functionCall" in part:
                    name = part["functionCall"]["name"]
                    texts.append(json.dumps(part["functionCall"]["args"]))
    text = "".join(texts)
    return (name, json.loads(text)) if name else text


DIALECTS: list[Asking] = [openai_chat, openai_responses, anthropic, gemini]


@pytest.mark.parametrize("asking", DIALECTS)
def test_every_dialect_says_the_same(sandbox: Sandbox, ask: Client, asking: Asking) -> None:
    got = []
    for stream in (False, True, True):
        path, body = asking(HELLO, stream, None)
        answer = ask("POST", path, body=body)
        assert answer.headers["Content-Type"].startswith("text/event-stream" if stream else "application/json")
        got.append((answer.body, said(asking, answer.body, stream)))
    assert got[0][1] == got[1][1] == model.reply("", "user: hello")
    assert got[1] == got[2]
    assert sandbox.counts() == {"llm": 3}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asking", DIALECTS)
def test_a_tool_that_is_named_is_called_until_it_was(ask: Client, asking: Asking, stream: bool) -> None:
    words = 'refund it: {"charge": "ch_7"}'
    path, body = asking(words, stream, None)
    called = said(asking, ask("POST", path, body=body).body, stream)
    assert called == ("refund", {"charge": "ch_7", "amount": 1})
    path, body = asking(words, stream, "re_1")
    assert isinstance(said(asking, ask("POST", path, body=body).body, stream), str)


@pytest.mark.parametrize("asking", DIALECTS)
def test_what_is_no_question_is_refused(sandbox: Sandbox, ask: Client, asking: Asking) -> None:
    path, _ = asking(HELLO, False, None)
    for body in (b"{", b"[]", b"{}", b'{"model": "m", "input": [1], "messages": [1], "contents": [1]}'):
        refused = ask("POST", path, body=body)
        assert (refused.status, "error" in refused.json) == (400, True)
    assert ask("GET", path).status == 404
    assert sandbox.counts() == {}


def test_responses_come_as_openai_sends_them(ask: Client) -> None:
    path, body = openai_responses(HELLO, True, None)
    whole = ask("POST", path, body=body).body
    events = datas(whole)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    names = [line.removeprefix("event: ") for line in whole.decode().splitlines() if line.startswith("event: ")]
    assert names == kinds
    plain = ask("POST", path, body={**body, "stream": False}).json
    assert events[-1]["response"]["output"][0]["content"] == plain["output"][0]["content"]
    assert plain["usage"]["total_tokens"] == 26


def test_geminis_last_event_alone_has_a_reason(ask: Client) -> None:
    path, body = gemini(HELLO, True, None)
    events = datas(ask("POST", path, body=body).body)
    assert ["finishReason" in event["candidates"][0] for event in events] == [False] * (len(events) - 1) + [True]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("/v1/models/m:generateContent", {"generationConfig": {"responseJsonSchema": SCHEMA}}),
    ],
)
def test_an_answer_fits_its_schema(ask: Client, path: str, more: dict[str, Any]) -> None:
    contents = [{"parts": [{"text": HELLO}]}]
    messages = [{"role": "user", "content": HELLO}]
    question = {"model": "m", "messages": messages, "input": HELLO, "contents": contents, **more}
    assert '\\"charge\\": \\"lantern\\", \\"amount\\": 1' in ask("POST", path, body=question).body.decode()


def test_embeddings(sandbox: Sandbox, ask: Client) -> None:
    plain = ask("POST", "/v1/embeddings", body={"model": "m", "input": ["a b", "c"]}).json
    packed = ask("POST", "/v1/embeddings", body={"model": "m", "input": "a b", "encoding_format": "base64"}).json
    vectors = [each["embedding"] for each in plain["data"]]
    assert vectors[0] != vectors[1]
    data = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack(f"<{len(data) // 4}f", data) == pytest.approx(vectors[0])
    assert (plain["usage"]["total_tokens"], sandbox.counts()) == (3, {"llm": 2})
