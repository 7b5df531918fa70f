"""Where two requests differ, field by field, in words for a person. Pure.

Paths are those of ``proxy.fields``: what is shown can be put into a rule's ``ignore`` as it stands. Only
what takes part in the fingerprint is compared, so neither credentials nor secret parameters are shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

from proxy.body import IGNORED, Body, Form, Json, Multipart, Pairs, Part, Raw
from proxy.canonical import canonical, compared_headers, query_name, query_pieces, understood
from proxy.fields import write_path
from proxy.message import Request
from proxy.profiles import Rule

#: No more fields are told: who reads them has seen enough.
FIELDS_MAX = 100
#: How much of a long value is shown before and after the place where it begins to differ.
_BEFORE, _AFTER = 24, 72


@dataclass(frozen=True, slots=True)
class Difference:
    """One field. ``path`` can be put into a rule's ``ignore`` as it stands; None: the field is absent there."""

    path: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        return f"{self.path}: {'absent' if self.old is None else self.old} → " + (
            "absent" if self.new is None else self.new
        )


def difference(old: Request, new: Request, rule: Rule) -> list[Difference]:
    """Fields in which *old* and *new* differ under *rule*; empty if and only if their canonical forms are equal."""
    found = list(islice(_all(old, new, rule), FIELDS_MAX))
    if not found and canonical(old, rule) != canonical(new, rule):
        # Equal fields in another order, where the order has a meaning.
        found = [_told("query", old.query, new.query)] if old.target != new.target else []
        if not found:
            found = [_told("body", _shown_bytes(old.body), _shown_bytes(new.body))]
    return found


def _all(old: Request, new: Request, rule: Rule) -> Iterator[Difference]:
    for name in ("method", "scheme", "host", "port", "path"):
        if getattr(old, name) != getattr(new, name):
            yield _told(name, str(getattr(old, name)), str(getattr(new, name)))
    queries = [[(query_name(piece), piece) for piece in query_pieces(each, rule)] for each in (old, new)]
    for name, before, after in _by_name(*queries):
        yield _told(f"query.{name}", _joined("&", before), _joined("&", after))
    bodies = understood(old, rule), understood(new, rule)
    headers = [
        [(name.decode("latin-1"), value.decode("latin-1")) for name, value in compared_headers(each, rule, body)]
        for each, body in zip((old, new), bodies, strict=True)
    ]
    for name, before, after in _by_name(*headers):
        yield _told(f"header.{name}", _joined(", ", before), _joined(", ", after))
    yield from _bodies(*bodies)


def _by_name(
    old: list[tuple[str, str]], new: list[tuple[str, str]]
) -> Iterator[tuple[str, list[str] | None, list[str] | None]]:
    sides: list[dict[str, list[str]]] = [{}, {}]
    for side, pairs in zip(sides, (old, new), strict=True):
        for name, value in pairs:
            side.setdefault(name, []).append(value)
    for name in sorted(sides[0].keys() | sides[1].keys()):
        before, after = sides[0].get(name), sides[1].get(name)
        if before != after:
            yield name, before, after


def _joined(mark: str, values: list[str] | None) -> str | None:
    return None if values is None else mark.join(values)


# ---- bodies


def _bodies(old: Body, new: Body) -> Iterator[Difference]:
    if isinstance(old, Json) and isinstance(new, Json):
        yield from _trees((), old.tree, new.tree)
    elif isinstance(old, Form) and isinstance(new, Form):
        for name, before, after in _by_name(_fields(old), _fields(new)):
            yield _told(write_path("body", (name,)), _joined(", ", before), _joined(", ", after))
    elif isinstance(old, Multipart) and isinstance(new, Multipart):
        yield from _parts(old, new)
    elif old != new:
        yield _told("body", _whole(old), _whole(new))


def _fields(form: Form) -> list[tuple[str, str]]:
    return [
        (name.decode("utf-8", "surrogateescape"), "(no value)" if value is None else json.dumps(_text(value)))
        for name, value in form.pairs
    ]


def _parts(old: Multipart, new: Multipart) -> Iterator[Difference]:
    for n, (before, after) in enumerate(zip_longest(old.parts, new.parts)):
        if before != after:
            name = _text((before or after).name)
            yield _told(write_path("body", (name or n,)), _shown_part(before), _shown_part(after))


def _shown_part(part: Part | None) -> str | None:
    if part is None:
        return None
    head = ", ".join(f"{_text(name)}: {_text(value)}" for name, value in part.headers)
    return f"{part.size} bytes, sha256 {part.sha256.hex()[:12]}, {head}"


def _whole(body: Body) -> str:
    if isinstance(body, Raw):
        return _shown_bytes(body.data) if body.data else "(empty)"
    return "(ignored)" if isinstance(body, Json) and body.tree is IGNORED else f"({type(body).__name__.lower()})"


def _trees(path: tuple[str | int, ...], old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            if name not in old or name not in new:
                yield _told(write_path("body", (*path, name)), _at(old, name), _at(new, name))
            else:
                yield from _trees((*path, name), old[name], new[name])
    elif isinstance(old, list) and isinstance(new, list):
        yield from _lists(path, old, new)
    elif type(old) is not type(new) or old != new:
        yield _told(write_path("body", path), _shown(old), _shown(new))


def _lists(path: tuple[str | int, ...], old: list[Any], new: list[Any]) -> Iterator[Difference]:
    # Where one is longer, the end they share is left out: an element put in between is told as one.
    shared = 0
    if len(old) != len(new):
        while shared < min(len(old), len(new)) and old[-1 - shared] == new[-1 - shared]:
            shared += 1
    length = max(len(old), len(new)) - shared
    for n in range(length):
        before, after = n < len(old) - shared, n < len(new) - shared
        if before and after:
            yield from _trees((*path, n), old[n], new[n])
        else:
            yield _told(
                write_path("body", (*path, n)), _shown(old[n]) if before else None, _shown(new[n]) if after else None
            )


def _at(node: dict[str, Any], name: str) -> str | None:
    return _shown(node[name]) if name in node else None


# ---- words


def _shown(node: Any) -> str:
    """A value as JSON, numbers as they were written."""
    if isinstance(node, bytes):
        return node.decode("ascii")
    if isinstance(node, dict | Pairs):
        pairs = node.items() if isinstance(node, dict) else node.pairs
        return "{" + ", ".join(f"{_shown(name)}: {_shown(value)}" for name, value in pairs) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(_shown, node)) + "]"
    return "(ignored)" if node is IGNORED else json.dumps(node, ensure_ascii=False)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _shown_bytes(data: bytes) -> str:
    return f"{len(data)} bytes: {_text(data)}"


def _told(path: str, old: str | None, new: str | None) -> Difference:
    """The difference with long values cut around the place where they begin to differ."""
    place = 0
    if old is not None and new is not None:
        shorter = min(len(old), len(new))
        place = next((n for n in range(shorter) if old[n] != new[n]), shorter)
    return Difference(_printable(path), _cut(old, place), _cut(new, place))


def _cut(text: str | None, place: int) -> str | None:
    if text is None:
        return None
    start = 0 if place <= _BEFORE * 2 else place - _BEFORE
    end = len(text) if len(text) - place <= _AFTER else place + _AFTER
    return _printable(("…" if start else "") + text[start:end] + ("…" if end < len(text) else ""))


def _printable(text: str) -> str:
    """Without lone surrogates (they cannot be written) and control characters."""
    whole = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in whole)
