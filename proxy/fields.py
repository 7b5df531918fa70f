"""Names of fields inside a request, as rules use them. Pure.

``$.messages[*].id``   in the body: a small part of JSONPath (``.name``, ``['name']``, ``[2]``, ``[*]``, ``.*``,
                       ``..name`` at any depth). ``body.messages[*].id`` is the same, as differences show it.
                       In a form ``$.metadata.order`` is the field ``metadata[order]``; of a multipart body, a part.
``query.NAME``         a query parameter.
``header.NAME``        a header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, Final

from proxy.body import IGNORED, Body, Form, Json, Multipart, Pairs, Raw


class Wild(Enum):
    """Steps that are no single name."""

    ANY = "*"
    DEEP = ".."


ANY: Final = Wild.ANY
DEEP: Final = Wild.DEEP

Step = str | int | Wild
Steps = tuple[Step, ...]

_STEP = re.compile(
    r"""(?P<deep>\.\.(?=[^.]))          # ..name, ..[…]
      | \.?\[(?:(?P<index>\d{1,9})|(?P<all>\*)|'(?P<single>(?:[^'\\]|\\.)*)'|"(?P<double>(?:[^"\\]|\\.)*)")\]
      | \.(?P<any>\*)
      | \.(?P<name>[^.\[\]\s*'"]+)""",
    re.VERBOSE | re.DOTALL,
)
_PLAIN = re.compile(r"[^.\[\]\s*'\"\\]+")


def parse_path(text: str) -> Steps:
    """The steps of ``$…`` or ``body…``. Raises ValueError with words."""
    root = next((start for start in ("$", "body") if text.startswith(start)), None)
    if root is None:
        raise ValueError(f"{text!r} is no path: it starts with '$'")
    steps: list[Step] = []
    position = len(root)
    while position < len(text):
        # After "..", a name stands without a dot of its own.
        deep = bool(steps) and steps[-1] is DEEP
        dot = "." if deep and text[position] != "[" else ""
        match = _STEP.match(dot + text[position:])
        if match is None or (deep and match["deep"]):
            raise ValueError(f"{text!r}, from {text[position:]!r} on: write .name, ['name'], [2], [*] or ..name")
        position += match.end() - len(dot)
        quoted = match["single"] if match["single"] is not None else match["double"]
        if match["deep"]:
            steps.append(DEEP)
        elif match["index"]:
            steps.append(int(match["index"]))
        elif match["all"] or match["any"]:
            steps.append(ANY)
        elif quoted is not None:
            steps.append(re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL))
        else:
            steps.append(match["name"])
    if steps and steps[-1] is DEEP:
        raise ValueError(f"{text!r} ends in '..': name what it looks for")
    return tuple(steps)


def write_path(root: str, steps: tuple[str | int, ...]) -> str:
    """The text that ``parse_path`` reads back, under *root* (``body`` or ``$``)."""
    text = root
    for step in steps:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN.fullmatch(step):
            text += f".{step}"
        else:
            text += "['" + step.replace("\\", "\\\\").replace("'", "\\'") + "']"
    return text


# ---- what a rule leaves out


@dataclass(frozen=True, slots=True)
class Ignore:
    """A rule's ``ignore``, compiled."""

    body: tuple[Steps, ...]
    query: frozenset[str]
    headers: frozenset[str]  # lower case


@lru_cache(maxsize=1024)
def compile_ignore(entries: tuple[str, ...]) -> Ignore:
    """Read the entries of an ``ignore``. Raises ValueError with words."""
    body: list[Steps] = []
    query: set[str] = set()
    headers: set[str] = set()
    for entry in entries:
        area, dot, name = entry.partition(".")
        if area == "query" and dot and name:
            query.add(name)
        elif area == "header" and dot and name:
            headers.add(name.lower())
        elif entry.startswith("$") or re.match(r"body(?=$|[.\[])", entry):
            body.append(parse_path(entry))
        else:
            raise ValueError(f"{entry!r} names no field: write '$.{entry}', 'query.{entry}' or 'header.{entry}'")
    return Ignore(tuple(body), frozenset(query), frozenset(headers))


def leave_out(body: Body, paths: tuple[Steps, ...]) -> Body:
    """*body* without the fields that *paths* name. Changes its tree in place."""
    for steps in paths:
        if not steps:
            return Json(IGNORED)
        if isinstance(body, Json):
            body = Json(_drop(body.tree, steps))
        elif isinstance(body, Form):
            body = Form(tuple(pair for pair in body.pairs if not field_named(pair[0], steps)))
        elif isinstance(body, Multipart):
            body = Multipart(tuple(part for part in body.parts if not field_named(part.name, steps)))
    return body


def _drop(node: Any, steps: Steps) -> Any:
    kind = type(node)
    if kind is not dict and kind is not list and kind is not Pairs:
        return node
    step, rest = steps[0], steps[1:]
    if step is DEEP:
        node = _drop(node, rest)
        return _each(node, steps)
    if not rest:
        return _without(node, step)
    if step is ANY:
        return _each(node, rest)
    if kind is dict:
        if step in node:
            node[step] = _drop(node[step], rest)
    elif kind is Pairs:
        node.pairs = [(name, _drop(value, rest) if name == step else value) for name, value in node.pairs]
    elif isinstance(step, int) and step < len(node):
        node[step] = _drop(node[step], rest)
    return node


def _each(node: Any, steps: Steps) -> Any:
    if isinstance(node, dict):
        for name, value in node.items():
            node[name] = _drop(value, steps)
    elif isinstance(node, list):
        node[:] = [_drop(value, steps) for value in node]
    elif isinstance(node, Pairs):
        node.pairs = [(name, _drop(value, steps)) for name, value in node.pairs]
    return node


def _without(node: Any, step: Step) -> Any:
    if isinstance(node, dict):
        if step is ANY:
            node.clear()
        else:
            node.pop(step, None)
    elif isinstance(node, Pairs):
        left = [pair for pair in node.pairs if step is not ANY and pair[0] != step]
        whole = dict(left)
        return whole if len(whole) == len(left) else Pairs(left)
    elif step is ANY:
        node[:] = [IGNORED] * len(node)  # how many there are stays to be seen
    elif isinstance(step, int) and step < len(node):
        node[step] = IGNORED
    return node


def field_named(name: bytes, steps: Steps) -> bool:
    """True for a form field at or under *steps*: ``metadata``, ``metadata[order]``, ``metadata[order][0]``."""
    text = name.decode("utf-8", "surrogateescape")
    if steps == (text,):
        return True
    first, *others = text.split("[")
    return _under([first, *(other.removesuffix("]") for other in others)], steps)


def _under(names: list[str], steps: Steps) -> bool:
    if not steps:
        return True
    if steps[0] is DEEP:
        return any(_under(names[n:], steps[1:]) for n in range(len(names)))
    return bool(names) and (steps[0] is ANY or str(steps[0]) == names[0]) and _under(names[1:], steps[1:])


# ---- what a rule asks of a body


@dataclass(frozen=True, slots=True)
class Predicate:
    """Holds for a body that has a value at ``steps`` which is given (not null, false or empty), or, with
    ``one_of`` / ``none_of``, a value that is (not) among them, or, with ``names``, an object that has a field of
    another name, or, with ``absent``, nothing there. ``*`` in a text stands for any characters."""

    steps: Steps
    one_of: tuple[str | bool | float, ...] | None = None
    none_of: tuple[str | bool | float, ...] | None = None
    names: tuple[str, ...] | None = None
    absent: bool = False
    #: What a body must contain for this to hold, unless it is written with escapes; None: cannot be said.
    mark: bytes | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        names = [step for step in self.steps if isinstance(step, str)]
        marked = names and names[-1].isascii() and not self.absent
        object.__setattr__(self, "mark", names[-1].encode() if marked else None)

    def holds(self, body: Body) -> bool:
        if self.absent:
            return not isinstance(body, Raw) and not any(True for _ in values(body, self.steps))
        return any(self._fits(value) for value in values(body, self.steps))

    def _fits(self, value: Any) -> bool:
        if self.one_of is not None:
            return any(_equal(value, wanted) for wanted in self.one_of)
        if self.none_of is not None:
            return not any(_equal(value, wanted) for wanted in self.none_of)
        if self.names is not None:
            pairs = value.items() if isinstance(value, dict) else value.pairs if isinstance(value, Pairs) else ()
            # An empty object is something here: {"codeExecution": {}} asks for it.
            others = (name for name, each in pairs if each is not None and each is not False and name not in self.names)
            return next(others, None) is not None
        return value is not None and value is not False and value != "" and value != [] and value != {}


def values(body: Body, steps: Steps) -> Iterator[Any]:
    """Every value of *body* at *steps*; a form's are texts."""
    if isinstance(body, Json):
        yield from _find(body.tree, steps)
    elif isinstance(body, Form):
        for name, value in body.pairs:
            if steps and field_named(name, steps):
                yield (value or b"").decode("utf-8", "replace")


def _find(node: Any, steps: Steps) -> Iterator[Any]:
    if not steps:
        yield node
        return
    step, rest = steps[0], steps[1:]
    children: list[tuple[str | int, Any]] = []
    if isinstance(node, dict):
        children = list(node.items())
    elif isinstance(node, Pairs):
        children = list(node.pairs)
    elif isinstance(node, list):
        children = list(enumerate(node))
    if step is DEEP:
        yield from _find(node, rest)
        for _, child in children:
            yield from _find(child, steps)
        return
    for name, child in children:
        if step is ANY or name == step:
            yield from _find(child, rest)


def _equal(value: Any, wanted: str | bool | float) -> bool:
    if isinstance(wanted, bool):
        return value is wanted
    if isinstance(wanted, str):
        return isinstance(value, str) and _glob(wanted).fullmatch(value) is not None
    return bool(value == str(wanted).encode())


@lru_cache(maxsize=1024)
def _glob(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(piece) for piece in text.split("*")), re.DOTALL)


def unreadable(body: Body) -> bool:
    """Nothing can be said of what is in *body*."""
    return isinstance(body, Raw) and bool(body.data)
