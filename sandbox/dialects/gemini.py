"""Gemini's contents. Pure. The model's name stands in the path; a stream has no event of its own at the end."""

import json
from typing import Any

from sandbox.answer import event
from sandbox.dialects import schema_of, text_of
from sandbox.model import Question, Said, Tool, chunks


def read(body: dict[str, Any], path: str) -> Question:
    """The question in *body*. Raises KeyError, TypeError, AttributeError for what is none."""
    contents = body["contents"]
    parts = [part for each in contents for part in each["parts"]]
    tools = [tool for each in body.get("tools") or () for tool in each.get("functionDeclarations") or ()]
    calling = (body.get("toolConfig") or {}).get("functionCallingConfig") or {}
    shape = body.get("generationConfig") or {}
    schema = shape.get("responseJsonSchema") or shape.get("responseSchema")
    model, _, verb = path.rpartition("/")[2].partition(":")
    return Question(
        model=model,
        system=text_of((body.get("systemInstruction") or {}).get("parts")),
        turns=tuple((str(each.get("role", "user")), text_of(each["parts"])) for each in contents),
        tools=() if calling.get("mode") == "NONE" else tuple(map(_tool, tools)),
        called=sum("functionResponse" in part for part in parts),
        schema=schema_of(schema) if schema else None,
        warm=bool(shape.get("temperature")),
        stream=verb == "streamGenerateContent",
    )


def _tool(tool: dict[str, Any]) -> Tool:
    return Tool(str(tool["name"]), schema_of(tool.get("parametersJsonSchema") or tool.get("parameters")))


def plain(said: Said) -> dict[str, Any]:
    """The answer in one piece."""
    return _response(said, said.text, "STOP")


def events(said: Said, question: Question) -> tuple[bytes, ...]:  # noqa: ARG001
    """The answer as a stream: its last event has a finish reason."""
    pieces = chunks(said.text)
    reasons = [None] * (len(pieces) - 1) + ["STOP"]
    whole = [_response(said, piece, reason) for piece, reason in zip(pieces, reasons, strict=True)]
    return tuple(event(each, end="\r\n") for each in whole)


def refusal(status: int, message: str) -> dict[str, Any]:
    """An error's body."""
    return {"error": {"code": status, "message": message, "status": "INVALID_ARGUMENT"}}


def _response(said: Said, text: str, reason: str | None) -> dict[str, Any]:
    part: dict[str, Any] = {"text": text}
    if said.call is not None:
        part = {"functionCall": {"name": said.call.name, "args": json.loads(said.call.arguments)}}
    candidate = {"content": {"parts": [part], "role": "model"}, "index": 0}
    return {
        "candidates": [candidate if reason is None else {**candidate, "finishReason": reason}],
        "usageMetadata": {
            "promptTokenCount": said.asked,
            "candidatesTokenCount": said.told,
            "totalTokenCount": said.asked + said.told,
        },
        "modelVersion": said.model,
        "responseId": said.ident,
    }
