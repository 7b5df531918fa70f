"""What a model's answer must fit: a pydantic model, its TypeAdapter, or JSON Schema. Pure: nothing is imported.

Of JSON Schema is checked what models get wrong: type, enum, const, properties, required, additionalProperties, items,
minItems, maxItems, minimum, maximum, minLength, maxLength, pattern, anyOf, oneOf, allOf, $ref within the schema. Other
keywords are passed to the model and not checked: give ``llm`` a ``check`` of your own.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and value.is_integer())),
}  # fmt: skip


def of(shape: Any) -> dict[str, Any]:
    """The JSON Schema of *shape*."""
    if isinstance(shape, Mapping):
        return dict(shape)
    for method in ("model_json_schema", "json_schema"):
        if callable(made := getattr(shape, method, None)):
            return dict(made())
    raise TypeError(f"{shape!r} is neither JSON Schema nor a pydantic model nor a TypeAdapter")


def read(shape: Any, text: str) -> Any:
    """*text* as what *shape* says. Raises ValueError (pydantic's ValidationError is one) that says what is wrong."""
    text = bare(text)
    for method in ("model_validate_json", "validate_json"):
        if callable(made := getattr(shape, method, None)):
            return made(text)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if (problem := problem_of(value, shape, shape)) is not None:
        raise ValueError(problem)
    return value


def bare(text: str) -> str:
    """*text* without the fence that models like to put around JSON."""
    fenced = re.fullmatch(r"\s*```\w*\n(.*)\n\s*```\s*", text, re.DOTALL)
    return fenced[1] if fenced else text


def problem_of(value: Any, schema: Any, root: Any, place: str = "$") -> str | None:
    """What keeps *value*, which stands at *place*, from fitting *schema*; None: nothing."""
    if isinstance(schema, bool):
        return None if schema else f"{place}: nothing may stand here"
    if "$ref" in schema:
        return problem_of(value, _referred(schema["$ref"], root), root, place)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_TYPES[kind](value) for kind in kinds if kind in _TYPES):
        return f"{place}: {_shown(value)} is no {' or '.join(kinds)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{place}: {_shown(value)} is none of {_shown(schema['enum'])}"
    if "const" in schema and value != schema["const"]:
        return f"{place}: {_shown(value)} is not {_shown(schema['const'])}"
    return _measured(value, schema, place) or _inside(value, schema, root, place) or _composed(
        value, schema, root, place)  # fmt: skip


def _measured(value: Any, schema: Mapping[str, Any], place: str) -> str | None:
    if isinstance(value, str):
        size, small, large = len(value), "minLength", "maxLength"
        if "pattern" in schema and re.search(schema["pattern"], value) is None:
            return f"{place}: {_shown(value)} does not match {schema['pattern']}"
    elif isinstance(value, list):
        size, small, large = len(value), "minItems", "maxItems"
    elif _TYPES["number"](value):
        size, small, large = value, "minimum", "maximum"
    else:
        return None
    if size < schema.get(small, size):
        return f"{place}: {_shown(value)} is below {small} {schema[small]}"
    return f"{place}: {_shown(value)} is above {large} {schema[large]}" if size > schema.get(large, size) else None


def _inside(value: Any, schema: Mapping[str, Any], root: Any, place: str) -> str | None:
    problems: list[str | None] = []
    if isinstance(value, dict):
        known = schema.get("properties", {})
        problems += [f"{place}: {name!r} is missing" for name in schema.get("required", ()) if name not in value]
        more = schema.get("additionalProperties", True)
        for name, each in value.items():
            if name not in known and more is False:
                problems.append(f"{place}: {name!r} is unknown; there is {', '.join(known)}")
            else:
                problems.append(problem_of(each, known.get(name, more), root, f"{place}.{name}"))
    elif isinstance(value, list):
        within = schema.get("items", True)
        problems += [problem_of(each, within, root, f"{place}[{n}]") for n, each in enumerate(value)]
    return next((problem for problem in problems if problem is not None), None)


def _composed(value: Any, schema: Mapping[str, Any], root: Any, place: str) -> str | None:
    for each in schema.get("allOf", ()):
        if (problem := problem_of(value, each, root, place)) is not None:
            return problem
    for several in ("anyOf", "oneOf"):
        problems = [problem_of(value, each, root, place) for each in schema.get(several, ())]
        if problems and None not in problems:
            return " or ".join(str(problem) for problem in problems)
        if several == "oneOf" and problems.count(None) > 1:
            return f"{place}: {_shown(value)} fits more than one of oneOf"
    return None


def _referred(name: str, root: Any) -> Any:
    found = root
    for part in name.removeprefix("#").strip("/").split("/"):
        found = found[part.replace("~1", "/").replace("~0", "~")] if part else found
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
