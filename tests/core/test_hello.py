"""What a ClientHello says, as real clients write it, in any pieces."""

import ssl
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.hello import NOTHING, Hello, read_hello


def hello(name: str | None, protocols: Sequence[str] = ()) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    if protocols:
        context.set_alpn_protocols(list(protocols))
    out = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


@pytest.mark.parametrize("name", ["api.openai.com", "a.b", "x" * 63 + ".example"])
def test_the_name_is_read(name: str) -> None:
    whole = hello(name)
    assert read_hello(whole) == Hello(name)
    assert read_hello(whole + b"more") == Hello(name)
    assert read_hello(hello(name.upper())) == Hello(name)
    assert {read_hello(whole[:at]) for at in range(len(whole))} == {None}


def test_a_hello_may_have_no_name() -> None:
    assert read_hello(hello(None)) == NOTHING
    assert read_hello(hello("127.0.0.1")) == NOTHING  # addresses are no names: clients leave them out


@pytest.mark.parametrize(
    ("offered", "only"),
    [([], False), (["http/1.1"], False), (["h2", "http/1.1"], False), (["h2"], True), (["grpc-exp", "h2"], True)],
)
def test_the_protocols_are_read(offered: list[str], only: bool) -> None:
    whole = hello("api.openai.com", offered)
    found = read_hello(whole)
    assert found == Hello("api.openai.com", tuple(offered))
    assert found.http2_only == only
    assert {read_hello(whole[:at]) for at in range(len(whole))} == {None}


def test_a_hello_may_be_cut_into_records() -> None:
    whole = hello("api.openai.com")
    body = whole[5:]
    for size in (1, 3, 100, 500):
        cut = b"".join(
            whole[:3] + len(piece).to_bytes(2, "big") + piece
            for piece in (body[at : at + size] for at in range(0, len(body), size))
        )
        assert read_hello(cut) == Hello("api.openai.com")
        assert {read_hello(cut[:at]) for at in range(len(cut))} == {None}


def test_what_is_none_is_left_to_openssl() -> None:
    assert read_hello(b"\x16\x03\x01\x00\x04\x02\x00\x00\x00") == NOTHING
    assert read_hello(b"\x15\x03\x01\x00\x02\x01\x00") == NOTHING
    assert read_hello(b"\x16\x03\x01\xff\xff\x01\xff\xff\xff" + bytes(1 << 17)) == NOTHING
    assert read_hello(b"\x16\x03\x01\x00\x00" * 20000) == NOTHING


@given(st.binary(max_size=200))
def test_noise_does_no_harm(noise: bytes) -> None:
    for data in (noise, b"\x16" + noise, hello("a.b")[:9] + noise, b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4" + noise):
        assert read_hello(data) is None or isinstance(read_hello(data), Hello)
