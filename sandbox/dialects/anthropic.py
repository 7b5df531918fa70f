"""Anthropic's messages. Pure."""

import json
from typing import Any

from sandbox.answer import event
from sandbox.dialects import schema_of, text_of
from sandbox.model import Question, Said, Tool, chunks


def read(body: dict[str, Any], path: str) -> Question:  # noqa: ARG001
    """The question in *body*. Raises KeyError, TypeError, AttributeError for what is none."""
    messages = body["messages"]
    blocks = [block for each in messages if isinstance(each["content"], list) for block in each["content"]]
    # A tool without a type runs at the client, as a custom one does.
    tools = [each for each in body.get("tools") or () if each.get("type", "custom") == "custom"]
    return Question(
        model=str(body["model"]),
        system=text_of(body.get("system")),
        turns=tuple((str(each["role"]), text_of(each["content"])) for each in messages),
        tools=() if (body.get("tool_choice") or {}).get("type") == "none" else tuple(map(_tool, tools)),
        called=sum(block.get("type") == "tool_result" for block in blocks),
        warm=bool(body.get("temperature")),
        stream=bool(body.get("stream")),
    )


def _tool(tool: dict[str, Any]) -> Tool:
    return Tool(str(tool["name"]), schema_of(tool.get("input_schema")))


def plain(said: Said) -> dict[str, Any]:
    """The answer in one piece."""
    usage = {"input_tokens": said.asked, "output_tokens": said.told}
    return _message(said, [_block(said)], _reason(said), usage)


def events(said: Said, question: Question) -> tuple[bytes, ...]:  # noqa: ARG001
    """The answer as a stream."""

    def named(kind: str, **more: Any) -> bytes:
        return event({"type": kind, **more}, kind)

    if said.call is None:
        opened: dict[str, Any] = {"type": "text", "text": ""}
        deltas = [{"type": "text_delta", "text": piece} for piece in chunks(said.text)]
    else:
        opened = _block(said) | {"input": {}}
        pieces = chunks(said.call.arguments)
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
    return (
        named("message_start", message=_message(said, [], None, {"input_tokens": said.asked, "output_tokens": 1})),
        named("content_block_start", index=0, content_block=opened),
        named("ping"),
        *(named("content_block_delta", index=0, delta=delta) for delta in deltas),
        named("content_block_stop", index=0),
        named(
            "message_delta",
            delta={"stop_reason": _reason(said), "stop_sequence": None},
            usage={"output_tokens": said.told},
        ),
        named("message_stop"),
    )


def refusal(status: int, message: str) -> dict[str, Any]:  # noqa: ARG001
    """An error's body."""
    return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


def _message(said: Said, content: list[dict[str, Any]], reason: str | None, usage: dict[str, int]) -> dict[str, Any]:
    return {
        "id": f"msg_{said.ident}",
        "type": "message",
        "role": "assistant",
        "model": said.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": usage,
    }


def _block(said: Said) -> dict[str, Any]:
    if said.call is None:
        return {"type": "text", "text": said.text}
    arguments = json.loads(said.call.arguments)
    return {"type": "tool_use", "id": f"toolu_{said.ident}", "name": said.call.name, "input": arguments}


def _reason(said: Said) -> str:
    return "end_turn" if said.call is None else "tool_use"
