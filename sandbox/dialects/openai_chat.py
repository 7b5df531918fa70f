"""OpenAI's chat completions. Pure."""

from typing import Any

from sandbox.answer import event
from sandbox.dialects import CREATED, schema_of, text_of
from sandbox.model import Call, Question, Said, Tool, chunks


def read(body: dict[str, Any], path: str) -> Question:  # noqa: ARG001
    """The question in *body*. Raises KeyError, TypeError, AttributeError for what is none."""
    turns = [(str(each["role"]), text_of(each.get("content"))) for each in body["messages"]]
    instructing = ("system", "developer")
    shape = body.get("response_format") or {}
    return Question(
        model=str(body["model"]),
        system="\n".join(text for role, text in turns if role in instructing),
        turns=tuple((role, text) for role, text in turns if role not in instructing),
        tools=() if body.get("tool_choice") == "none" else tuple(map(_tool, _functions(body))),
        called=sum(role == "tool" for role, _ in turns),
        schema=schema_of(shape["json_schema"].get("schema")) if shape.get("type") == "json_schema" else None,
        warm=bool(body.get("temperature")),
        stream=bool(body.get("stream")),
        stream_usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def _functions(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [each["function"] for each in body.get("tools") or () if each["type"] == "function"]


def _tool(function: dict[str, Any]) -> Tool:
    return Tool(str(function["name"]), schema_of(function.get("parameters")))


def plain(said: Said) -> dict[str, Any]:
    """The answer in one piece."""
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.call is not None:
        message |= {"content": None, "tool_calls": [_call(said, said.call)]}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(said)}
    return {**_head(said, "chat.completion"), "choices": [choice], "usage": _usage(said)}


def events(said: Said, question: Question) -> tuple[bytes, ...]:
    """The answer as a stream."""

    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event({**_head(said, "chat.completion.chunk"), "choices": [choice]})

    deltas: list[dict[str, Any]]
    if said.call is None:
        deltas = [{"role": "assistant", "content": ""}, *({"content": piece} for piece in chunks(said.text))]
    else:
        opened = {"index": 0, **_call(said, Call(said.call.name, ""))}
        pieces = [{"index": 0, "function": {"arguments": piece}} for piece in chunks(said.call.arguments)]
        deltas = [{"role": "assistant", "content": None, "tool_calls": [opened]}]
        deltas += [{"tool_calls": [piece]} for piece in pieces]
    usage = event({**_head(said, "chat.completion.chunk"), "choices": [], "usage": _usage(said)})
    return (
        *(chunk(delta) for delta in deltas),
        chunk({}, _finish(said)),
        *((usage,) if question.stream_usage else ()),
        b"data: [DONE]\n\n",
    )


def refusal(status: int, message: str) -> dict[str, Any]:  # noqa: ARG001
    """An error's body."""
    return {"error": {"type": "invalid_request_error", "message": message}}


def _head(said: Said, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{said.ident}", "object": kind, "created": CREATED, "model": said.model}


def _call(said: Said, call: Call) -> dict[str, Any]:
    return {
        "id": f"call_{said.ident}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _finish(said: Said) -> str:
    return "stop" if said.call is None else "tool_calls"


def _usage(said: Said) -> dict[str, int]:
    return {"prompt_tokens": said.asked, "completion_tokens": said.told, "total_tokens": said.asked + said.told}
