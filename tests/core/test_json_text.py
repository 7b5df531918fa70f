"""JSON that passes through as it was written."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.api.json_text import Raw, encode, members, stored
from runtime.errors import UsageError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
SPACES = st.sampled_from(["", " ", "\n", "\t \r\n"])


@given(st.dictionaries(st.text(), VALUES, max_size=5), st.booleans(), SPACES, SPACES)
def test_each_member_is_read_as_it_is_written(value: dict[str, Any], ascii_: bool, before: str, after: str) -> None:
    texts = {name: json.dumps(inner, ensure_ascii=ascii_) for name, inner in value.items()}
    if any("\ud800" <= each <= "\udfff" for text in [*texts, *texts.values()] for each in text):
        return
    pairs = [f"{before}{json.dumps(name)}{after}:{before}{text}{after}" for name, text in texts.items()]
    body = f"{before}{{{','.join(pairs) or after}}}{after}".encode()
    found, raw = members(body, 1 << 20, "it")
    assert found == json.loads(body)
    assert raw == {name: text.encode() for name, text in texts.items()}


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        members(b'{"a": 1, "\\u0061": 2}', 100, "it")
    assert members(b"[1]", 100, "it") == ([1], {})


@given(VALUES)
def test_what_is_written_can_be_read(value: Any) -> None:
    assert json.loads(encode(value)) == json.loads(json.dumps(value))
    assert json.loads(encode({"a": [Raw(json.dumps(value).encode())]})) == {"a": [value]}


def test_what_is_no_json_after_all_is_shown_as_a_string() -> None:
    assert stored(b"1.10") == b"1.10"
    assert stored(b"NaN") == b'"NaN"'
    assert json.loads(stored(b"\xff{") or b"") == "\ufffd{"
    assert stored(None) is None
