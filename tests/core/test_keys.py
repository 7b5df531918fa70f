"""Whose key goes out, and that there is exactly one."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.keys import KeyChoice, choose, derive, is_random, place, retry_signal, signed
from proxy.message import Headers, Request
from proxy.profiles import KeyPlace, Rule, Rules
from runtime.step import Effect

KEYED = Rule("keyed", Effect.IDEMPOTENT, key=KeyPlace("Idempotency-Key"))
RANDOM = b"0b1e4ec5-7dbb-4b7c-9b1c-0a3f55e0bb10"
AGAIN = b"9c2f4ec5-7dbb-4b7c-9b1c-0a3f55e0bb10"


def post(*headers: tuple[bytes, bytes], target: str = "/v1/refunds") -> Request:
    return Request("POST", "https", "api.example.test", 443, target, headers, b"")


# ---- which keys are an SDK's


@given(st.uuids(), st.sampled_from([b"%s", b"stripe-node-retry-%s", b"stainless-node-retry-%s", b'"%s"', b" %s\t"]))
def test_any_uuid_is_random_alone_or_behind_a_prefix(value: uuid.UUID, shape: bytes) -> None:
    assert is_random(shape % str(value).encode())
    assert is_random(shape % str(value).upper().encode())


@pytest.mark.parametrize(
    "value",
    [
        b"order-4711",
        b"",
        b"order-" + RANDOM,
        RANDOM + b"-1",
        RANDOM[:-1],
        RANDOM.replace(b"-", b""),  # may be the program's own hash
        b'"' + RANDOM,
        b"stainless--retry-" + RANDOM,
        b"stripe-node-retry-4711",
        b"retry-" + RANDOM,
        b"\xff\xfe",
    ],
)
def test_anything_else_is_the_programs_own(value: bytes) -> None:
    assert not is_random(value)


# ---- our own


@given(st.binary(min_size=32, max_size=32), st.uuids(), st.text(st.characters(), max_size=20))
def test_a_derived_key_is_a_uuid_of_version_4_and_always_the_same(secret: bytes, run: uuid.UUID, step: str) -> None:
    key = derive(secret, run, step)
    read = uuid.UUID(key)
    assert str(read) == key
    assert read.version == 4
    assert read.variant == uuid.RFC_4122
    assert is_random(key.encode())
    assert key == derive(secret, run, step)
    assert key != derive(secret + b"x", run, step)
    assert key != derive(secret, run, step + "x")
    assert key != derive(secret, uuid.UUID(int=run.int ^ 1), step)


def test_derived_keys_stay_what_they_are() -> None:
    """They stand in journals and at upstreams: another derivation would charge twice."""
    assert derive(b"s" * 32, uuid.UUID(int=1), "POST /v1/refunds#1") == "115344b3-a974-4315-9db3-0841052acb2b"


# ---- the choice


@pytest.mark.parametrize(
    ("headers", "pinned", "value", "source"),
    [
        ([], None, "ours", "derived"),
        ([], "first", "first", "pinned"),
        ([(b"idempotency-key", b"")], None, "ours", "derived"),
        ([(b"idempotency-key", b"order-1")], None, "order-1", "chosen"),
        ([(b"idempotency-key", b"order-1")], "first", "order-1", "chosen"),
        ([(b"IDEMPOTENCY-KEY", RANDOM)], None, RANDOM.decode(), "random"),
        ([(b"Idempotency-Key", AGAIN)], RANDOM.decode(), RANDOM.decode(), "pinned"),
        ([(b"Idempotency-Key", RANDOM), (b"idempotency-key", b"order-1")], None, "order-1", "chosen"),
    ],
)
def test_which_key_goes_out(headers: list[tuple[bytes, bytes]], pinned: str | None, value: str, source: str) -> None:
    choice = choose(post(*headers), KEYED, pinned, "ours")
    assert (choice.name, choice.value, choice.source) == ("Idempotency-Key", value, source)


def test_where_the_rule_has_no_key_the_request_stays_as_it_is() -> None:
    request = post((b"Idempotency-Key", RANDOM))
    choice = choose(request, Rule("llm", Effect.REPEATABLE), None, "ours")
    assert choice == KeyChoice(None, None, "none")
    assert place(request.headers, choice) is request.headers


@pytest.mark.parametrize(
    ("headers", "target"),
    [
        ([(b"Authorization", b"AWS4-HMAC-SHA256 Credential=x")], "/"),
        ([(b"authorization", b"AWS4-ECDSA-P256-SHA256 x")], "/"),
        ([(b"Authorization", b"AWS key:signature")], "/"),
        ([(b"Authorization", b'OAuth oauth_signature="x"')], "/"),
        ([(b"Signature-Input", b"sig=()")], "/"),
        ([], "/o?a=1&X-Amz-Signature=x"),
        ([], "/o?X-Goog-Signature=x"),
    ],
)
def test_a_signed_request_is_never_rewritten(headers: list[tuple[bytes, bytes]], target: str) -> None:
    for key in ([], [(b"Idempotency-Key", RANDOM)]):
        request = post(*headers, *key, target=target)
        assert signed(request)
        assert choose(request, KEYED, "first", "ours").name is None


def test_ordinary_credentials_are_no_signature() -> None:
    for value in (b"Bearer sk_live_1", b"Basic QVdTNC0=", b"AWSomething"):
        assert not signed(post((b"Authorization", value), target="/o?signature=1"))


HEADERS = st.lists(
    st.tuples(st.sampled_from([b"Idempotency-Key", b"idempotency-key", b"Accept", b"X"]), st.sampled_from([b"1", b"2"]))
).map(tuple)


@given(HEADERS)
def test_exactly_one_header_is_placed_and_all_others_stay(headers: Headers) -> None:
    placed = place(headers, KeyChoice("Idempotency-Key", "value", "derived"))

    def others(among: Headers) -> list[tuple[bytes, bytes]]:
        return [header for header in among if header[0].lower() != b"idempotency-key"]

    assert [value for name, value in placed if name.lower() == b"idempotency-key"] == [b"value"]
    assert others(placed) == others(headers)
    assert place(placed, KeyChoice("Idempotency-Key", "value", "derived")) == placed
    names = [name for name, _ in headers if name.lower() == b"idempotency-key"]
    if names:  # in the casing and at the place that the program gave it
        assert placed[headers.index(next(h for h in headers if h[0] == names[0]))][0] == names[0]


# ---- retries


@pytest.mark.parametrize(
    ("headers", "again", "token"),
    [
        ([], False, None),
        ([(b"x-stainless-retry-count", b"0")], False, None),
        ([(b"x-stainless-retry-count", b"1")], True, None),
        ([(b"X-Stainless-Retry-Count", b" 02 ")], True, None),
        ([(b"x-stainless-retry-count", b"-1")], False, None),
        ([(b"x-stainless-retry-count", b"9" * 5000)], True, None),
        ([(b"x-stainless-retry-count", b"soon")], False, None),
        ([(b"amz-sdk-request", b"attempt=1; max=3")], False, None),
        ([(b"amz-sdk-request", b"attempt=2; max=3"), (b"amz-sdk-invocation-id", b"abc")], True, b"abc"),
        ([(b"amz-sdk-request", b"ttl=20; attempt=x")], False, None),
        ([(b"Idempotency-Key", RANDOM)], False, RANDOM),
        ([(b"Idempotency-Key", b"stripe-node-retry-" + RANDOM)], False, b"stripe-node-retry-" + RANDOM),
        ([(b"Idempotency-Key", b"order-1")], False, None),
        ([(b"Idempotency-Key", RANDOM), (b"amz-sdk-invocation-id", b"abc")], False, RANDOM),
    ],
)
def test_what_a_request_says_of_itself(headers: list[tuple[bytes, bytes]], again: bool, token: bytes | None) -> None:
    signal = retry_signal(post(*headers), Rules.load([]).match(post()))
    assert (signal.again, signal.token) == (again, token)


def test_a_key_of_another_name_is_a_token_too() -> None:
    rule = Rule("keyed", Effect.IDEMPOTENT, key=KeyPlace("X-Request-Key"))
    assert retry_signal(post((b"x-request-key", RANDOM)), rule).token == RANDOM
