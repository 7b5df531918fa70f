"""Names of fields: what is written is read back, and finds what it names."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.body import Form, Json, Raw, read_form, read_json
from proxy.fields import ANY, DEEP, Predicate, compile_ignore, parse_path, unreadable, values, write_path


@given(st.lists(st.one_of(st.integers(0, 99), st.text(max_size=5)), max_size=5).map(tuple))
def test_a_path_that_is_written_is_read_back(steps: tuple[str | int, ...]) -> None:
    assert parse_path(write_path("body", steps)) == steps
    assert parse_path(write_path("$", steps)) == steps


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("$", ()),
        ("body", ()),
        ("$.a.b-c", ("a", "b-c")),
        ("body.messages[2].content", ("messages", 2, "content")),
        ("$[0]", (0,)),
        ("$.a.[0]", ("a", 0)),
        ("$..id", (DEEP, "id")),
        ("$.a..id[*]", ("a", DEEP, "id", ANY)),
        ("$..[0]", (DEEP, 0)),
        ("$.*", (ANY,)),
        ("$..*", (DEEP, ANY)),
        ("""$['a.b']["c]"]['d\\'e']""", ("a.b", "c]", "d'e")),
    ],
)
def test_paths(text: str, steps: tuple[Any, ...]) -> None:
    assert parse_path(text) == steps


@pytest.mark.parametrize(
    "text",
    ["", "a", "$.", "$..", "$a", "$...a", "$.a..", "$[x]", "$['a", "$[-1]", "$.a b", "bodyx", "$[?(@.a)]", "$.a."],
)
def test_what_is_no_path_says_so(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|starts|name"):
        parse_path(text)


def test_an_ignore_entry_names_an_area() -> None:
    found = compile_ignore(("$.a", "body.b", "query.Ts", "header.If-Match"))
    assert found.body == (("a",), ("b",))
    assert found.query == {"Ts"}
    assert found.headers == {"if-match"}
    with pytest.raises(ValueError, match=r"'\$\.prompt_cache_key', 'query\.prompt_cache_key' or 'header"):
        compile_ignore(("prompt_cache_key",))
    for nothing in ("query", "query.", "header.", "form.a"):
        with pytest.raises(ValueError, match="names no field"):
            compile_ignore((nothing,))


def json_of(text: str) -> Json:
    read = read_json(text.encode())
    assert read is not None
    return read


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("$.a", '{"a": 1, "a": 2}', [b"1", b"2"]),  # an upstream may take either
        ("$.a[*].b", '{"a": [{"b": "x"}, {}, {"b": null}]}', ["x", None]),
        ("$..b", '{"b": [true], "a": {"b": false}}', [[True], False]),
        ("$", "[]", [[]]),
        ("$.a", "[]", []),
        ("$[1]", '["x", "y"]', ["y"]),
        ("$[1]", '{"1": "y"}', []),
    ],
)
def test_values_of_json(path: str, text: str, found: list[Any]) -> None:
    assert list(values(json_of(text), parse_path(path))) == found


def test_values_of_a_form() -> None:
    form = read_form(b"a[b]=1&a[b]=2&c=%C3%A9&d")
    assert isinstance(form, Form)
    assert list(values(form, ("a", "b"))) == ["1", "2"]
    assert list(values(form, ("c",))) == ["é"]
    assert list(values(form, ("d",))) == [""]
    assert list(values(Raw(b"a=1"), ("a",))) == []


@pytest.mark.parametrize(
    ("predicate", "text", "holds"),
    [
        (Predicate(("a",)), '{"a": 1}', True),
        (Predicate(("a",)), '{"a": 0}', True),
        (Predicate(("a",)), '{"a": "no"}', True),
        (Predicate(("a",)), '{"a": false}', False),
        (Predicate(("a",)), '{"a": null}', False),
        (Predicate(("a",)), '{"a": []}', False),
        (Predicate(("a",)), '{"a": {}}', False),
        (Predicate(("a",)), '{"a": ""}', False),
        (Predicate(("a",)), '{"a": false, "a": true}', True),
        (Predicate(("a",)), "{}", False),
        (Predicate(("a",), one_of=("x", "web_*")), '{"a": "web_search"}', True),
        (Predicate(("a",), one_of=("x", "web_*")), '{"a": "my_web_search"}', False),
        (Predicate(("a",), one_of=("a.c",)), '{"a": "abc"}', False),
        (Predicate(("a",), one_of=(True,)), '{"a": true}', True),
        (Predicate(("a",), one_of=(True,)), '{"a": 1}', False),
        (Predicate(("a",), one_of=(1,)), '{"a": 1}', True),
        (Predicate(("a",), one_of=(1,)), '{"a": true}', False),
        (Predicate(("a",), one_of=(1,)), '{"a": "1"}', False),
        (Predicate(("a",), none_of=("x",)), '{"a": "y"}', True),
        (Predicate(("a",), none_of=("x",)), '{"a": "x"}', False),
        (Predicate(("a",), none_of=("x",)), '{"a": {"x": 1}}', True),
        (Predicate(("a",), none_of=("x",)), "{}", False),
        (Predicate(("a", ANY, "t"), none_of=("x",)), '{"a": [{"t": "x"}, {"t": "y"}]}', True),
        (Predicate(("a", ANY), names=("x", "y")), '{"a": [{"x": {}}, {"y": 1}, {}]}', False),
        (Predicate(("a", ANY), names=("x", "y")), '{"a": [{"x": {}}, {"z": {}}]}', True),
        (Predicate(("a", ANY), names=("x",)), '{"a": [{"": {}}]}', True),
        (Predicate(("a", ANY), names=("x",)), '{"a": [{"z": null, "Z": false}]}', False),
        (Predicate(("a", ANY), names=("x",)), '{"a": [{"x": 1, "x": 2, "z": 3}]}', True),
        (Predicate(("a",), names=("x",)), '{"a": [{"z": 1}]}', False),
        (Predicate(("a",), names=("x",)), '{"a": "z"}', False),
    ],
)
def test_predicates(predicate: Predicate, text: str, holds: bool) -> None:
    assert predicate.holds(json_of(text)) is holds


def test_only_bytes_are_unreadable() -> None:
    assert unreadable(Raw(b"{"))
    assert not unreadable(Raw(b""))
    assert not unreadable(json_of("{}"))
