"""Headers come back as they were, or are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import Unwritable
from runtime.rows import decode_headers, encode_headers

HEADERS = st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=40))).map(tuple)


@given(HEADERS)
def test_headers_come_back_or_are_refused(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    try:
        stored = encode_headers(headers)
    except Unwritable:
        assert any(
            not name or b":" in name or set(b"\r\n") & set(name) or set(b"\r\n") & set(value) for name, value in headers
        )
    else:
        assert decode_headers(stored) == headers


@given(st.binary(max_size=200))
def test_what_is_stored_is_understood_in_one_way(stored: bytes) -> None:
    try:
        headers = decode_headers(stored)
    except ValueError:
        return
    assert encode_headers(headers) == stored


@pytest.mark.parametrize("stored", [b"A", b"A:b", b"A\r\n", b":b\r\n", b"A:b\r\n\r\n", b"A:b\nC:d\r\n", b"A:\rb\r\n"])
def test_damage_is_seen(stored: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        decode_headers(stored)
