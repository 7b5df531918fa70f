"""OpenAI's responses, without what they remember: no ``previous_response_id``, no ``conversation``. Pure."""

from typing import Any

from sandbox.answer import event
from sandbox.dialects import CREATED, schema_of, text_of
from sandbox.model import Question, Said, Tool, chunks


def read(body: dict[str, Any], path: str) -> Question:  # noqa: ARG001
    """The question in *body*. Raises KeyError, TypeError, AttributeError for what is none."""
    if body.get("previous_response_id") or body.get("conversation"):
        raise TypeError("nothing is remembered here: send the whole input")
    asked = body["input"]
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    turns = [_turn(each) for each in items]
    instructing = ("system", "developer")
    system = [text_of(body.get("instructions")), *(text for role, text in turns if role in instructing)]
    functions = [each for each in body.get("tools") or () if each["type"] == "function"]
    shape = (body.get("text") or {}).get("format") or {}
    return Question(
        model=str(body["model"]),
        system="\n".join(filter(None, system)),
        turns=tuple((role, text) for role, text in turns if role not in instructing),
        tools=() if body.get("tool_choice") == "none" else tuple(map(_tool, functions)),
        called=sum(role == "tool" for role, _ in turns),
        schema=schema_of(shape.get("schema")) if shape.get("type") == "json_schema" else None,
        warm=bool(body.get("temperature")),
        stream=bool(body.get("stream")),
    )


def _turn(item: dict[str, Any]) -> tuple[str, str]:
    if item.get("type") == "function_call_output":
        return "tool", text_of(item["output"])
    if item.get("type") == "function_call":
        return "assistant", ""
    return str(item["role"]), text_of(item.get("content"))


def _tool(function: dict[str, Any]) -> Tool:
    return Tool(str(function["name"]), schema_of(function.get("parameters")))


def plain(said: Said) -> dict[str, Any]:
    """The answer in one piece."""
    usage = {
        "input_tokens": said.asked,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": said.told,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": said.asked + said.told,
    }
    return _response(said, "completed", [_item(said)], usage)


def events(said: Said, question: Question) -> tuple[bytes, ...]:  # noqa: ARG001
    """The answer as a stream."""
    begun = _response(said, "in_progress", [], None)
    item = _item(said)
    opened: dict[str, Any]
    place: dict[str, Any] = {"item_id": item["id"], "output_index": 0}
    told: list[tuple[str, dict[str, Any]]]
    if said.call is None:
        part = {**place, "content_index": 0}
        opened = {**item, "status": "in_progress", "content": []}
        told = [("response.content_part.added", {**part, "part": _part("")})]
        told += [
            ("response.output_text.delta", {**part, "delta": piece, "logprobs": []}) for piece in chunks(said.text)
        ]
        told.append(("response.output_text.done", {**part, "text": said.text, "logprobs": []}))
        told.append(("response.content_part.done", {**part, "part": _part(said.text)}))
    else:
        kind = "response.function_call_arguments"
        opened = {**item, "status": "in_progress", "arguments": ""}
        told = [(f"{kind}.delta", {**place, "delta": piece}) for piece in chunks(said.call.arguments)]
        told.append((f"{kind}.done", {**place, "name": said.call.name, "arguments": said.call.arguments}))
    whole: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        ("response.output_item.added", {"output_index": 0, "item": opened}),
        *told,
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": plain(said)}),
    ]
    return tuple(event({"type": name, **data, "sequence_number": n}, name) for n, (name, data) in enumerate(whole))


def refusal(status: int, message: str) -> dict[str, Any]:  # noqa: ARG001
    """An error's body."""
    return {"error": {"type": "invalid_request_error", "message": message}}


def _response(said: Said, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": f"resp_{said.ident}",
        "object": "response",
        "created_at": CREATED,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": said.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": usage,
    }


def _item(said: Said) -> dict[str, Any]:
    if said.call is None:
        return {
            "id": f"msg_{said.ident}",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [_part(said.text)],
        }
    return {
        "id": f"fc_{said.ident}",
        "type": "function_call",
        "status": "completed",
        "call_id": f"call_{said.ident}",
        "name": said.call.name,
        "arguments": said.call.arguments,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
