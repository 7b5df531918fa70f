"""What people are shown of an answer carries no credential."""

import pytest

from runtime import redact


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ('{"access_token": "abc", "id": 7}', '{"access_token": "…", "id": 7}'),
        ('{"client_secret":"a\\"b","n":1}', '{"client_secret":"…","n":1}'),
        ('{"a": {"Password": "x"}, "api-key": "y"}', '{"a": {"Password": "…"}, "api-key": "…"}'),
        ('{"total_tokens": 7, "max_tokens": 5}', '{"total_tokens": 7, "max_tokens": 5}'),
        ('{"token": "cut in the mid', '{"token": "…'),
        ("grant=x&refresh_token=abc&id=7", "grant=x&refresh_token=…&id=7"),
        ("said: Authorization is Bearer abcdefgh12345", "said: Authorization is Bearer …"),
        ("a plain text of tokens and secrets", "a plain text of tokens and secrets"),
    ],
)
def test_of_a_body(given: str, shown: str) -> None:
    assert redact.body(given.encode(), ()) == shown


def test_of_bodies_that_are_no_text() -> None:
    assert redact.body(b"\xff\x00\x12" * 5, ()) is None
    assert redact.body(b"plain", ((b"Content-Encoding", b"gzip"),)) is None
    assert redact.body("ä".encode()[:1], ()) == ""
    assert redact.body(None, ()) is None
    assert redact.body(b"x" * 5000, ()) == "x" * redact.SHOWN


def test_of_headers() -> None:
    names = [
        b"Set-Cookie",
        b"X-Auth-Token",
        b"WWW-Authenticate",
        b"x-api-key",
        b"X-Signature",
        b"Content-Type",
        b"Date",
    ]
    shown = redact.headers(tuple((name, b"value") for name in names))
    assert [value for _, value in shown] == ["…"] * 5 + ["value"] * 2
