"""JSON bodies have one form exactly when their texts mean the same, by a reader written from the RFC."""

import json
import re
from typing import Any, ClassVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy import body as bodies
from proxy.canonical import canonical
from proxy.message import Request
from proxy.profiles import Rule
from runtime.step import Effect

PLAIN = Rule("plain", Effect.AT_MOST_ONCE)


def post(body: bytes) -> Request:
    headers = ((b"Content-Type", b"application/json"),)
    return Request("POST", "http", "upstream.test", 80, "/v1/things", headers, body)


def same(one: bytes, two: bytes, rule: Rule = PLAIN) -> bool:
    return canonical(post(one), rule) == canonical(post(two), rule)


# ---- JSON: a second, slow reader written from the RFC says what is equal


class Broken(Exception):
    pass


class Reader:
    """Numbers as they stand, strings as code units, objects as pairs sorted by name."""

    NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
    SHORT: ClassVar = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def whole(self) -> Any:
        value = self.value()
        self.space()
        if self.at != len(self.text):
            raise Broken
        return value

    def space(self) -> None:
        while self.text[self.at : self.at + 1] in (" ", "\t", "\n", "\r"):
            self.at += 1

    def take(self, wanted: str) -> bool:
        if self.text.startswith(wanted, self.at):
            self.at += len(wanted)
            return True
        return False

    def value(self) -> Any:
        self.space()
        for literal in ("null", "true", "false"):
            if self.take(literal):
                return (literal,)
        if self.take('"'):
            return ("string", self.string())
        if self.take("["):
            items: list[Any] = []
            self.space()
            while not self.take("]"):
                if items and not self.take(","):
                    raise Broken
                items.append(self.value())
                self.space()
            return ("list", items)
        if self.take("{"):
            pairs: list[tuple[Any, Any]] = []
            self.space()
            while not self.take("}"):
                if pairs and not self.take(","):
                    raise Broken
                self.space()
                if not self.take('"'):
                    raise Broken
                name = self.string()
                self.space()
                if not self.take(":"):
                    raise Broken
                pairs.append((name, self.value()))
                self.space()
            return ("object", sorted(pairs, key=lambda pair: pair[0]))
        number = self.NUMBER.match(self.text, self.at)
        if number is None:
            raise Broken
        self.at = number.end()
        return ("number", number[0])

    def string(self) -> list[int]:
        units: list[int] = []
        while not self.take('"'):
            char = self.text[self.at : self.at + 1]
            self.at += 1
            if not char or char < " ":
                raise Broken
            if char != "\\":
                data = char.encode("utf-16-be", "surrogatepass")
                units += [int.from_bytes(data[n : n + 2]) for n in range(0, len(data), 2)]
                continue
            kind = self.text[self.at : self.at + 1]
            self.at += 1
            if kind == "u":
                digits = self.text[self.at : self.at + 4]
                if not re.fullmatch("[0-9A-Fa-f]{4}", digits):
                    raise Broken
                units.append(int(digits, 16))
                self.at += 4
            elif kind in self.SHORT:
                units.append(ord(self.SHORT[kind]))
            else:
                raise Broken
        return units


def meaning(data: bytes) -> Any:
    try:
        return Reader(data.decode("utf-8")).whole()
    except (Broken, ValueError):
        return ("raw", data)


NUMBERS = ["1", "1.0", "1e400", "2e400", "-0", "0", "0.1", "0.10", "1E2", "1e2", "100", "1.",
           "9007199254740993", "9007199254740992", "1e-400", "0.0", "-1", "01", ".5", "+1",
           "NaN", "-Infinity", "1" * 5000]  # fmt: skip
STRINGS = ['"a"', '"\\u0061"', '"b"', '""', '"\\u0000"', '"\\ud800"', '"\\uD800"', '"\\ud83d\\ude00"', '"😀"',
           '"\\ude00\\ud83d"', '"\\/"', '"/"', '"1"', '"null"', '"\\n"', '"é"', '"e\\u0301"', '"NaN"', '"\\x"',
           '"\x01"', '"\\ud8"', '"\\"', "'a'"]  # fmt: skip
SPACES = st.sampled_from(["", "", " ", "\n", "\r\n\t", "\u00a0", "\ufeff"])
SCALARS = st.sampled_from([*NUMBERS, *STRINGS, "null", "true", "false", "nul", "True", ""])


def _nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    spaced = st.tuples(SPACES, inner, SPACES).map("".join)
    pair = st.tuples(SPACES, st.sampled_from(STRINGS[:5]), SPACES, spaced).map(lambda p: f"{p[0]}{p[1]}{p[2]}:{p[3]}")
    return st.one_of(
        st.lists(spaced, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.lists(pair, max_size=3).map(lambda pairs: f"{{{','.join(pairs)}}}"),
    )


TEXTS = st.recursive(SCALARS, _nested, max_leaves=6)
REPLACEMENTS = [*NUMBERS[:-1], *STRINGS, " ", "[", "]", "{", "}", ",", ":", "null"]


@st.composite
def near_texts(draw: st.DrawFn) -> tuple[str, str]:
    """A text and another that differs in a few tokens, their order, or spacing."""
    one = draw(TEXTS)
    tokens = re.findall(r'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\[\]{}:,"]+|"', one)
    for _ in range(draw(st.integers(0, 2))):
        if tokens:
            place = draw(st.integers(0, len(tokens) - 1))
            tokens[place] = draw(st.sampled_from(REPLACEMENTS))
    if draw(st.booleans()) and len(tokens) > 8:
        # {a:1,b:2} -> {b:2,a:1}
        tokens[1:4], tokens[5:8] = tokens[5:8], tokens[1:4]
    return one, "".join(token + draw(SPACES) for token in tokens)


@given(near_texts())
@example(('{"amount":1e400}', '{"amount":2e400}'))
@example(("1", "1.0"))
@example(('{"a":1,"a":2}', '{"a":2}'))
@example(('{"a":1,"a":2}', '{"a":2,"a":1}'))
@example(('{"a":1,"a":2,"b":3}', '{"b":3,"a":1,"a":2}'))
@example(('{"a":[1,[2]]}', '{"a":[[1],2]}'))
@example(("[1]", '["1"]'))
@example(('["\\ud83d\\ude00"]', '["😀"]'))
@example(('[[NaN,"1"]]', '[[1,"1"]]'))
def test_json_forms_are_equal_exactly_when_the_texts_mean_the_same(texts: tuple[str, str]) -> None:
    one, two = (text.encode("utf-8", "surrogatepass") for text in texts)
    assert same(one, two) == (meaning(one) == meaning(two))


@given(TEXTS)
def test_exactly_the_texts_of_the_rfc_are_json(text: str) -> None:
    data = text.encode()
    assert (bodies.read_json(data) is None) == (meaning(data)[0] == "raw")


def test_json_is_read_as_utf8_only() -> None:
    text = '{"a": 1}'
    for other in (text.encode("utf-16"), text.encode("utf-32"), b"\xef\xbb\xbf" + text.encode(), b'"\xed\xa0\x80"'):
        assert isinstance(bodies.read(post(other)), bodies.Raw)


@pytest.mark.parametrize("depth", [bodies.DEPTH_MAX, bodies.DEPTH_MAX + 1, 5_000, 1_000_000])
def test_json_too_deep_stays_bytes_wherever_it_is_read(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    request = post(deep)

    def read_below(frames: int) -> bool:
        return isinstance(bodies.read(request), bodies.Json) if frames == 0 else read_below(frames - 1)

    assert read_below(0) == read_below(300) == (depth <= bodies.DEPTH_MAX)
    assert same(deep, deep)
    objects = b'{"a":' * depth + b"1" + b"}" * depth
    assert isinstance(bodies.read(post(objects)), bodies.Json) == (depth <= bodies.DEPTH_MAX)


def test_equal_names_at_the_greatest_depth_are_written() -> None:
    deep = b'{"a":0,"a":' * bodies.DEPTH_MAX + b"1" + b"}" * bodies.DEPTH_MAX
    assert b"Infinity" in canonical(post(deep), PLAIN)


@given(near_texts())
def test_ignoring_never_makes_more_equal_than_the_field(texts: tuple[str, str]) -> None:
    """Under ``$.a`` two objects are equal exactly when they are equal without their pairs named a."""
    rule = Rule("r", Effect.REPEATABLE, ignore=("$.a",))

    def without(data: bytes) -> Any:
        found = meaning(data)
        if found[0] == "object":
            return ("object", [pair for pair in found[1] if pair[0] != [ord("a")]])
        return found

    one, two = (text.encode("utf-8", "surrogatepass") for text in texts)
    assert same(one, two, rule) == (without(one) == without(two))


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_every_python_value_survives_other_spacing_and_order(value: Any) -> None:
    def turned(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: turned(node[name]) for name in reversed(node)}
        return [turned(item) for item in node] if isinstance(node, list) else node

    one = json.dumps(value).encode()
    two = json.dumps(turned(value), indent=3, ensure_ascii=False).encode("utf-8", "surrogatepass")
    lone = re.search(r"[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)) is not None
    assert lone or same(one, two)
