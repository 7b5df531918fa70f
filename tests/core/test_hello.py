"""The name in a ClientHello, as real clients write it, in any pieces."""

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.hello import server_name


def hello(name: str | None) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    out = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


@pytest.mark.parametrize("name", ["api.openai.com", "a.b", "x" * 63 + ".example"])
def test_the_name_is_read(name: str) -> None:
    whole = hello(name)
    assert server_name(whole) == name
    assert server_name(whole + b"more") == name
    assert server_name(hello(name.upper())) == name
    assert {server_name(whole[:at]) for at in range(len(whole))} == {None}


def test_a_hello_may_have_no_name() -> None:
    assert server_name(hello(None)) == ""
    assert server_name(hello("127.0.0.1")) == ""  # addresses are no names: clients leave them out


def test_a_hello_may_be_cut_into_records() -> None:
    whole = hello("api.openai.com")
    body = whole[5:]
    for size in (1, 3, 100, 500):
        cut = b"".join(
            whole[:3] + len(piece).to_bytes(2, "big") + piece
            for piece in (body[at : at + size] for at in range(0, len(body), size))
        )
        assert server_name(cut) == "api.openai.com"
        assert {server_name(cut[:at]) for at in range(len(cut))} == {None}


def test_what_is_none_is_left_to_openssl() -> None:
    assert server_name(b"\x16\x03\x01\x00\x04\x02\x00\x00\x00") == ""
    assert server_name(b"\x15\x03\x01\x00\x02\x01\x00") == ""
    assert server_name(b"\x16\x03\x01\xff\xff\x01\xff\xff\xff" + bytes(1 << 17)) == ""
    assert server_name(b"\x16\x03\x01\x00\x00" * 20000) == ""


@given(st.binary(max_size=200))
def test_noise_does_no_harm(noise: bytes) -> None:
    for data in (noise, b"\x16" + noise, hello("a.b")[:9] + noise, b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4" + noise):
        assert server_name(data) is None or isinstance(server_name(data), str)
