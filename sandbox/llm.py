"""LLM endpoints: OpenAI's chat completions and Anthropic's messages, plain and streamed.

The answer's bytes are a function of the request's body (``sandbox.model``), the id included: two equal
requests get equal bytes, unless they ask for a temperature. Every request that is understood is one paid
model call, from its first token on.
"""

import hashlib
import json
from typing import Any

from sandbox import model
from sandbox.answer import Answer, of_json
from sandbox.service import Service
from sandbox.wire import Asked

_CREATED = 1_767_225_600  # a fixed moment: answers hold no clock

EVENTS = "text/event-stream; charset=utf-8"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _text(content: Any) -> str:
    """A message's text: a string, or a list of parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


class Llm(Service):
    """``POST /v1/chat/completions`` and ``POST /v1/messages``."""

    name = "llm"

    def act(self, asked: Asked, number: int) -> Answer:
        openai = asked.path == "/v1/chat/completions"
        if asked.method != "POST" or not (openai or asked.path == "/v1/messages"):
            return self._refuse(openai, 404, f"no such thing: {asked.method} {asked.path}")
        try:
            question = json.loads(asked.body)
            messages = [(each["role"], _text(each.get("content"))) for each in question["messages"]]
            name = str(question["model"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return self._refuse(openai, 400, f"not understood: {error!r}")
        system = "\n".join([_text(question.get("system")), *(text for role, text in messages if role == "system")])
        said = "\n".join(f"{role}: {text}" for role, text in messages if role != "system")
        digest = hashlib.sha256(asked.body).hexdigest()
        draw = self._draws(digest) if question.get("temperature") else 0
        text = model.reply(system, said, draw)
        usage = model.tokens(system) + model.tokens(said), model.tokens(text)
        ident = hashlib.sha256(f"{digest} {draw}".encode()).hexdigest()[:24]
        self.ledger.effect(self.name, "completion", number, made=ident, model=name, tokens=sum(usage))
        if not question.get("stream"):
            return of_json(200, _openai(ident, name, text, usage) if openai else _anthropic(ident, name, text, usage))
        if openai:
            with_usage = bool((question.get("stream_options") or {}).get("include_usage"))
            events = _openai_events(ident, name, text, usage, with_usage)
        else:
            events = _anthropic_events(ident, name, text, usage)
        return Answer(200, events, (("Cache-Control", "no-cache"),), EVENTS, "chunked", stream=True)

    def _draws(self, digest: str) -> int:
        return sum(made["sha256"] == digest for made in self.ledger.made(self.name))

    def _refuse(self, openai: bool, status: int, message: str) -> Answer:
        error = {"type": "invalid_request_error", "message": message}
        return of_json(status, {"error": error} if openai else {"type": "error", "error": error})


Usage = tuple[int, int]


def _openai_usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}


def _openai(ident: str, name: str, text: str, usage: Usage) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        "id": f"chatcmpl-{ident}",
        "object": "chat.completion",
        "created": _CREATED,
        "model": name,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": _openai_usage(usage),
    }


def _openai_events(ident: str, name: str, text: str, usage: Usage, with_usage: bool) -> tuple[bytes, ...]:
    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {
            "id": f"chatcmpl-{ident}",
            "object": "chat.completion.chunk",
            "created": _CREATED,
            "model": name,
            "choices": choices,
            **more,
        }
        return f"data: {_compact(chunk)}\n\n".encode()

    def choice(delta: dict[str, str], finish: str | None = None) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]

    return (
        event(choice({"role": "assistant", "content": ""})),
        *(event(choice({"content": chunk})) for chunk in model.chunks(text)),
        event(choice({}, "stop")),
        *((event([], usage=_openai_usage(usage)),) if with_usage else ()),
        b"data: [DONE]\n\n",
    )


def _anthropic(ident: str, name: str, text: str, usage: Usage) -> dict[str, Any]:
    return {
        "id": f"msg_{ident}",
        "type": "message",
        "role": "assistant",
        "model": name,
        "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": usage[0], "output_tokens": usage[1]},
    }


def _anthropic_events(ident: str, name: str, text: str, usage: Usage) -> tuple[bytes, ...]:
    def event(kind: str, **more: Any) -> bytes:
        return f"event: {kind}\ndata: {_compact({'type': kind, **more})}\n\n".encode()

    deltas = [{"type": "text_delta", "text": chunk} for chunk in model.chunks(text)]
    message = _anthropic(ident, name, "", (usage[0], 1)) | {"content": [], "stop_reason": None}
    return (
        event("message_start", message=message),
        event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        event("ping"),
        *(event("content_block_delta", index=0, delta=delta) for delta in deltas),
        event("content_block_stop", index=0),
        event(
            "message_delta",
            delta={"stop_reason": "end_turn", "stop_sequence": None},
            usage={"output_tokens": usage[1]},
        ),
        event("message_stop"),
    )
