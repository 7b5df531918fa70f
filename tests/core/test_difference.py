"""What differs is told by field, and only what takes part."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.canonical import canonical
from proxy.difference import FIELDS_MAX, Difference, difference
from proxy.message import Request
from proxy.profiles import Rule
from runtime.step import Effect

PLAIN = Rule("plain", Effect.AT_MOST_ONCE)
JSON = ((b"Content-Type", b"application/json"),)
FORM = ((b"Content-Type", b"application/x-www-form-urlencoded"),)


def post(body: bytes = b"", headers: Any = JSON, target: str = "/p") -> Request:
    return Request("POST", "https", "api.example.test", 443, target, tuple(headers), body)


def told(old: Any, new: Any, rule: Rule = PLAIN) -> list[str]:
    sides = [json.dumps(side, ensure_ascii=False).encode("utf-8") for side in (old, new)]
    return [str(one) for one in difference(post(sides[0]), post(sides[1]), rule)]


def test_the_field_and_the_place_in_it() -> None:
    old = {"model": "m", "messages": [{"role": "user", "content": "The time is now " + "." * 90 + " 12:01"}]}
    new = {"messages": [{"content": "The time is now " + "." * 90 + " 12:05", "role": "user"}], "model": "m"}
    dots = "." * 19
    assert told(old, new) == [f'body.messages[0].content: …{dots} 12:01" → …{dots} 12:05"']


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ({"a": 1}, {"a": 1.0}, ["body.a: 1 → 1.0"]),
        ({"a": 1}, {"a": "1"}, ['body.a: 1 → "1"']),
        ({"a": None}, {}, ["body.a: null → absent"]),
        ({}, {"a b": {"c": [True]}}, ["body['a b']: absent → {\"c\": [true]}"]),
        ([1, 2, 3], [1, 3], ["body[1]: 2 → absent"]),
        ([1, 3], [0, 1, 3], ["body[0]: absent → 0"]),
        ([1, 2], [2, 1], ["body[0]: 1 → 2", "body[1]: 2 → 1"]),
        ({"a": {"b": [{"c": 1}]}}, {"a": {"b": [{"c": 2}]}}, ["body.a.b[0].c: 1 → 2"]),
        ({"a": []}, {"a": {}}, ["body.a: [] → {}"]),
        ({"a": "\x00"}, {"a": "\u202e"}, ['body.a: "\\u0000" → "\\u202e"']),
    ],
)
def test_json(old: Any, new: Any, words: list[str]) -> None:
    assert told(old, new) == words


def test_equal_names_and_numbers_as_written() -> None:
    found = difference(post(b'{"a":1e400,"a":2}'), post(b'{"a":2e400,"a":2}'), PLAIN)
    assert [str(one) for one in found] == ['body: {"a": 1e400, "a": 2} → {"a": 2e400, "a": 2}']


def test_other_parts_of_a_request() -> None:
    old = post(b"x", [(b"If-Match", b"1")], "/p?a=1&b=2")
    new = replace(
        old, method="PUT", host="other", port=80, target="/q?b=2&a=1&a=3", headers=((b"Range", b"2"),), body=b"y"
    )
    assert [str(one) for one in difference(old, new, PLAIN)] == [
        "method: POST → PUT",
        "host: api.example.test → other",
        "port: 443 → 80",
        "path: /p → /q",
        "query.a: a=1 → a=1&a=3",
        "header.if-match: 1 → absent",
        "header.range: absent → 2",
        "body: 1 bytes: x → 1 bytes: y",
    ]


def test_what_is_ignored_or_secret_is_not_told() -> None:
    rule = Rule("r", Effect.READ, ignore=("$.t", "query.t", "header.range"), secret_query=frozenset({"key"}))
    old = post(b'{"t": 1, "a": 1}', [*JSON, (b"Authorization", b"Bearer old"), (b"Range", b"1")], "/p?t=1&key=old")
    new = post(b'{"t": 2, "a": 2}', [*JSON, (b"Authorization", b"Bearer new"), (b"Range", b"2")], "/p?t=2&key=new")
    assert difference(old, new, rule) == [Difference("body.a", "1", "2")]


def test_forms_and_parts() -> None:
    found = difference(post(b"a=1&m[x]=2&c", FORM), post(b"a=3&m[x]=4", FORM), PLAIN)
    assert [str(one) for one in found] == [
        'body.a: "1" → "3"',
        "body.c: (no value) → absent",
        'body[\'m[x]\']: "2" → "4"',
    ]

    def multipart(content: bytes) -> Request:
        data = b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + content + b"\r\n--B--"
        return post(data, [(b"content-type", b"multipart/form-data; boundary=B")])

    (found_part,) = difference(multipart(b"1"), multipart(b"23"), PLAIN)
    assert found_part.path == "body.file"
    assert str(found_part.old).startswith("1 bytes, sha256 ")


def test_order_is_told_where_it_has_a_meaning() -> None:
    (found,) = difference(post(b"a[][x]=1&a[][y]=2", FORM), post(b"a[][y]=2&a[][x]=1", FORM), PLAIN)
    assert found.path == "body"
    (found,) = difference(post(target="/?a[]=1&a[][x]=2"), post(target="/?a[][x]=2&a[]=1"), PLAIN)
    assert found.path == "query"


def test_no_more_than_a_person_reads() -> None:
    old, new = (
        dict.fromkeys(map(str, range(1000)), "x" * 10**4),
        dict.fromkeys(map(str, range(1000)), "x" * 10**4 + "y"),
    )
    found = told(old, new)
    assert len(found) == FIELDS_MAX
    assert all(len(words) < 400 for words in found)


SCALARS = st.sampled_from([None, True, False, 0, 1, 1.0, "", "a", "1", "é", "\ud800"])
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "", "é.["]), inner)
)
BODIES = st.one_of(
    TREES.map(lambda tree: (json.dumps(tree).encode(), JSON)),
    st.sampled_from(
        [(b"{", JSON), (b'{"a":1,"a":2}', JSON), (b'{"a":2,"a":1}', JSON), (b"a=1&b=2", FORM), (b"", FORM)]
    ),
    st.sampled_from([(b"b=2&a=1", FORM), (b"a[]=1&a[]=2", FORM), (b"a%zz", FORM), (b"\xff", ()), (b"a=1", ())]),
)
RULES = st.sampled_from([PLAIN, replace(PLAIN, ignore=("$.a",)), replace(PLAIN, ignore=("$..b", "query.a")),
                         replace(PLAIN, ignore=("$",)), replace(PLAIN, ignore=("$[*]",))])  # fmt: skip
TARGETS = st.sampled_from(["/p", "/p?", "/p?a", "/p?a=", "/p?a=1&b=2", "/p?b=2&a=1", "/p?a[]&a[][]", "/p?a[][]&a[]"])


@given(BODIES, BODIES, TARGETS, TARGETS, RULES, st.booleans())
@example((b'{"a":1,"a":2}', JSON), (b'{"a":2,"a":1}', JSON), "/p", "/p", PLAIN, False)
def test_there_is_a_difference_exactly_when_the_forms_differ(
    old: Any, new: Any, one: str, two: str, rule: Rule, equal: bool
) -> None:
    later = old if equal else new
    before, after = post(old[0], old[1], one), post(later[0], later[1], two)
    found = difference(before, after, rule)
    assert bool(found) == (canonical(before, rule) != canonical(after, rule))
    for each in found:
        assert each.old != each.new or "…" in (each.old or "")
        (str(each).encode("utf-8"), re.fullmatch(r"[^\n]*", str(each)))


@given(TREES, TREES)
def test_what_is_told_can_be_ignored(old: Any, new: Any) -> None:
    """Until nothing differs, or what differs cannot be named apart: the end of a list that became shorter."""
    before, after = post(json.dumps(old).encode()), post(json.dumps(new).encode())
    rule = PLAIN
    for _ in range(20):
        found = difference(before, after, rule)
        if not found:
            break
        paths = tuple(each.path for each in found if "\\ud" not in each.path)
        lengths = any(None in (each.old, each.new) and each.path.endswith("]") for each in found)
        if lengths or not paths:
            break
        assert not set(paths) & set(rule.ignore)
        rule = replace(rule, ignore=(*rule.ignore, *paths))
    else:
        pytest.fail(f"still {found}")
