"""What is kept of a request, and that it comes back as it was: without secrets there, with the new ones here."""

import json
import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.message import Request
from proxy.outgoing import Outgoing, is_credential, recall
from runtime.errors import Unreadable

SECRET = frozenset({"api_key", "sig"})
CREDENTIALS = [
    "Authorization", "Cookie", "X-Api-Key", "Api-Key", "X-Goog-Api-Key", "X-Auth-Token", "X-Amz-Security-Token",
    "X-Vault-Token", "Private-Token", "X-Auth-Key", "Ocp-Apim-Subscription-Key", "DD-APPLICATION-KEY",
    "x-functions-key", "PLAID-SECRET", "X-Client-Secret", "X-Password", "X-Forwarded-Authorization", "X-Custom-Auth",
    "X-Credentials", "Mcp-Session-Id", "X-Session-Token", "apikey", "X-RapidAPI-Key", "Cookie2", "X-Access-Tokens",
    "X-JWT",
]  # fmt: skip
OTHERS = [
    "Content-Type", "Accept", "Idempotency-Key", "X-Idempotency-Key", "Cko-Idempotency-Key", "PayPal-Request-Id",
    "User-Agent", "Anthropic-Version", "X-Payout-Idempotency", "X-Amz-Target", "Stripe-Account", "X-Author", "Keyword",
]  # fmt: skip


@pytest.mark.parametrize("name", CREDENTIALS)
def test_it_is_a_credential(name: str) -> None:
    for form in (name, name.lower(), name.upper()):
        assert is_credential(form.encode())


@pytest.mark.parametrize("name", OTHERS)
def test_it_is_no_credential(name: str) -> None:
    for form in (name, name.lower(), name.upper()):
        assert not is_credential(form.encode())


# ---- requests


def pairs(names: list[str], values: st.SearchStrategy[bytes]) -> st.SearchStrategy[tuple[bytes, bytes]]:
    cased = [form(name.encode()) for name in names for form in (bytes, bytes.lower, bytes.upper)]
    return st.tuples(st.sampled_from(cased), values)


secret_text = st.text(string.ascii_letters + string.digits, min_size=8, max_size=12).map(lambda text: f"!{text}!")
plain_value = st.binary(max_size=12).map(lambda value: value.translate(None, b"\r\n\0!"))
header = pairs(CREDENTIALS, secret_text.map(str.encode)) | pairs(OTHERS, plain_value)
query_part = st.one_of(
    st.text(string.ascii_letters + "=%._~-+", max_size=10).filter(lambda text: not text.startswith(("api_key", "sig"))),
    st.tuples(st.sampled_from(["api_key=", "sig=", "%61pi_key=", "api%5Fkey="]), secret_text).map("".join),
)
target = st.tuples(
    st.sampled_from(["/", "/v1/x", "/a%2Fb/../c"]),
    st.none() | st.lists(query_part, max_size=5).map("&".join),
).map(lambda parts: parts[0] if parts[1] is None else f"{parts[0]}?{parts[1]}")
request = st.builds(
    Request, st.sampled_from(["GET", "POST"]), st.sampled_from(["http", "https"]), st.sampled_from(["api.test", "::1"]),
    st.sampled_from([80, 443, 8080]), target, st.lists(header, max_size=8).map(tuple), st.binary(max_size=20),
)  # fmt: skip


def made(target: str, *headers: tuple[bytes, bytes]) -> Request:
    return Request("POST", "https", "api.test", 443, target, headers, b"body")


# ---- properties


@given(request)
def test_nothing_that_is_kept_or_shown_holds_a_secret(sent: Request) -> None:
    """Stored request headers never hold credentials; secret_query: stored hashed."""
    out = Outgoing(sent, SECRET)
    assert b"!" not in out.journal_head()
    assert "!" not in out.shown_url


@given(request)
def test_with_the_same_credentials_it_is_the_same_byte_for_byte(sent: Request) -> None:
    assert recall(Outgoing(sent, SECRET).journal_head(), sent.body, sent, SECRET) == sent


@given(request, st.lists(header, max_size=8).map(tuple))
def test_with_other_credentials_all_else_is_the_same(sent: Request, now: tuple[tuple[bytes, bytes], ...]) -> None:
    fresh = replace(sent, headers=now, body=b"in other words", method="PUT")
    again = recall(Outgoing(sent, SECRET).journal_head(), sent.body, fresh, SECRET)
    assert replace(again, headers=()) == replace(sent, headers=())
    plain = [pair for pair in sent.headers if not is_credential(pair[0])]
    assert [pair for pair in again.headers if not is_credential(pair[0])] == plain
    secrets = sorted((name.lower(), value) for name, value in now if is_credential(name))
    assert sorted((name.lower(), value) for name, value in again.headers if is_credential(name)) == secrets


# ---- cases


def test_a_credential_stands_where_it_stood() -> None:
    sent = made("/", (b"A", b"1"), (b"Cookie", b"old"), (b"B", b"2"), (b"authorization", b"old"), (b"cookie", b"old"))
    now = made("/", (b"Authorization", b"new"), (b"COOKIE", b"new 1"), (b"Cookie", b"new 2"), (b"Cookie", b"new 3"))
    assert recall(Outgoing(sent).journal_head(), b"body", now).headers == (
        (b"A", b"1"), (b"Cookie", b"new 1"), (b"B", b"2"), (b"authorization", b"new"), (b"cookie", b"new 2"),
        (b"Cookie", b"new 3"),
    )  # fmt: skip


def test_a_credential_that_is_gone_is_left_out_and_a_new_one_is_put_in() -> None:
    sent, now = made("/", (b"Authorization", b"old"), (b"A", b"1")), made("/", (b"X-Api-Key", b"new"))
    assert recall(Outgoing(sent).journal_head(), b"body", now).headers == ((b"A", b"1"), (b"X-Api-Key", b"new"))


def test_the_idempotency_key_is_kept_whatever_its_header_is_called() -> None:
    """Another key would be another effect."""
    sent = made("/", (b"Client-Token", b"first"), (b"Authorization", b"old"))
    now = made("/", (b"client-token", b"second"), (b"Authorization", b"new"))
    head = Outgoing(sent, key_name="client-token").journal_head()
    assert recall(head, b"body", now).headers == ((b"Client-Token", b"first"), (b"Authorization", b"new"))


@pytest.mark.parametrize(
    ("sent", "now", "again"),
    [
        ("/x?a=1&sig=old&b=2", "/x?sig=new", "/x?a=1&sig=new&b=2"),
        ("/x?sig=1&sig=2&a", "/x?sig=3&b&sig=4", "/x?sig=3&sig=4&a"),
        ("/x?%73ig=old", "/x?sig=new", "/x?sig=new"),  # escaped, it is the same name
        ("/x?sig", "/x?sig=", "/x?sig="),
        ("/x?a&sig=old", "/x?a", "/x?a"),  # never a mark in place of a secret
        ("/x?a", "/x?a&sig=new", "/x?a&sig=new"),
        ("/x?sig=old", "/x", "/x?"),
        ("/x?", "/x?", "/x?"),
        ("/x", "/x", "/x"),
        ("/x", "/x?sig=new", "/x?sig=new"),
        ("/sig=old", "/sig=new", "/sig=old"),
    ],
)
def test_secret_parameters_are_filled_from_the_new_request(sent: str, now: str, again: str) -> None:
    head = Outgoing(made(sent), SECRET).journal_head()
    assert recall(head, b"body", made(now), SECRET).target == again


def test_what_is_shown_has_no_secret_and_reads_as_an_address() -> None:
    shown = Outgoing(made("/x?a=1&sig=hush"), SECRET).shown_url
    assert shown.startswith("https://api.test/x?a=1&sig=sha256-")
    assert Outgoing(made("/x")).shown_url == "https://api.test/x"


@pytest.mark.parametrize(
    "head",
    [
        b"", b"{", b"[]", b"null", b"{}", b'{"headers":[]}', b"\xff",
        b'{"method":"GET","scheme":"http","host":"h","port":80,"target":"/","headers":[["A"]]}',
        b'{"method":"GET","scheme":"http","host":"h","port":80,"target":"/","headers":[[1,"x"]]}',
        b'{"method":"GET","scheme":"http","host":"h","port":80,"target":"/","headers":[["A",1]]}',
        b'{"method":"GET","scheme":"http","host":"h","port":80,"target":"/","headers":[["A","\\u20ac"]]}',
        b'{"method":"GET","scheme":"http","host":"h","port":80,"target":7,"headers":[]}',
        b'{"method":null,"scheme":"http","host":"h","port":80,"target":"/","headers":[]}',
        b'{"method":"GET","scheme":"http","host":"h","port":"80","target":"/","headers":[]}',
    ],
)  # fmt: skip
def test_a_head_that_is_not_understood_fails_closed(head: bytes) -> None:
    with pytest.raises(Unreadable):
        recall(head, b"", made("/"), SECRET)


def test_a_head_is_plain_json() -> None:
    assert json.loads(Outgoing(made("/x?sig=hush", (b"A", b"\xe4"), (b"Cookie", b"c"))).journal_head()) == {
        "method": "POST", "scheme": "https", "host": "api.test", "port": 443, "target": "/x?sig=hush",
        "headers": [["A", "ä"], ["Cookie", None]],
    }  # fmt: skip
