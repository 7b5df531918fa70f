"""The canonical form is injective up to spacing, order of names, escapes and what a rule ignores."""

import gzip
import json
import os
import random
import re
import subprocess
import sys
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy import body as bodies
from proxy.canonical import canonical, fingerprint, secondary
from proxy.message import Request
from proxy.profiles import HeaderNames, KeyPlace, Rule, Rules
from runtime.step import Effect

PLAIN = Rule("plain", Effect.AT_MOST_ONCE)
JSON = ((b"Content-Type", b"application/json"),)
FORM = ((b"Content-Type", b"application/x-www-form-urlencoded"),)


def post(body: bytes = b"", headers: Any = (), target: str = "/v1/things", **other: Any) -> Request:
    fields = {"method": "POST", "scheme": "http", "host": "upstream.test", "port": 80, **other}
    return Request(target=target, headers=tuple(headers), body=body, **fields)


def same(one: Request, two: Request, rule: Rule = PLAIN) -> bool:
    return canonical(one, rule) == canonical(two, rule)


# ---- forms, queries, multipart


def pieces_meaning(text: str, fold: bool) -> list[tuple[str, str | None]]:
    """Independent of the code under test: sorted by name, or by what stands before [] in it."""
    from urllib.parse import unquote_to_bytes

    def plain(piece: str) -> str:
        return unquote_to_bytes(piece.replace("+", " ")).decode("latin-1")

    pairs = []
    for piece in text.split("&"):
        name, equals, value = piece.partition("=")
        shown = (plain(name), plain(value) if equals else None) if fold else (piece, None)
        pairs.append((plain(name).split("[]")[0], shown))
    return [shown for _, shown in sorted(pairs, key=lambda pair: pair[0])]


PIECES = st.lists(
    st.sampled_from(["a=1", "a=2", "b=1", "%61=1", "a=%31", "a", "a=", "=", "", "a=1+2", "a=1%202", "a=1%2B2", "b=",
                     "a[]=1", "a[]=2", "a[][x]=1", "a[][y]=1", "%61%5B%5D=2", "A=1", "a=1=2", "a=%00", "a=%FF"]),
    max_size=4,
).map("&".join)  # fmt: skip


@given(PIECES, PIECES)
@example("a=1&b=2", "b=2&a=1")
@example("a=1&a=2", "a=2&a=1")
@example("a[][x]=1&a[][y]=1&a[][x]=2", "a[][x]=1&a[][x]=2&a[][y]=1")
def test_forms_are_equal_exactly_when_names_and_values_are(one: str, two: str) -> None:
    equal = (one == two) if not one or not two else pieces_meaning(one, True) == pieces_meaning(two, True)
    assert same(post(one.encode(), FORM), post(two.encode(), FORM)) == equal


@pytest.mark.parametrize("broken", [b"a=%zz", b"a=%", b"%4=1", b"a=%4"])
def test_a_form_with_a_broken_escape_stays_bytes(broken: bytes) -> None:
    assert not same(post(broken, FORM), post(broken.replace(b"%", b"%25"), FORM))


@given(PIECES, PIECES)
@example("", "a=1")
@example("a=%31", "a=1")
def test_query_pairs_are_sorted_and_stay_as_they_are_written(one: str, two: str) -> None:
    equal = pieces_meaning(one, False) == pieces_meaning(two, False)
    assert same(post(target=f"/p?{one}"), post(target=f"/p?{two}")) == equal
    assert not same(post(target=f"/p?{one}"), post(target="/p"))


PATHS = ["/a/b", "/a%2Fb", "/a%2fb", "/a//b", "/a/b/", "/~a", "/%7Ea", "/%7ea", "/a/../b", "/b", "/a/./b", "/a;b", "/é"]


@given(st.sampled_from(PATHS), st.sampled_from(PATHS))
def test_the_path_is_compared_raw(one: str, two: str) -> None:
    assert same(post(target=one), post(target=two)) == (one == two)


def multipart(boundary: str, parts: list[tuple[str, bytes]], extra: bytes = b"") -> Request:
    data = b"".join(
        b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary.encode(), head.encode(), content) for head, content in parts
    )
    kind = f"multipart/form-data; boundary={boundary}".encode()
    return post(data + f"--{boundary}--\r\n".encode() + extra, [(b"content-type", kind)])


HEADS = [
    'Content-Disposition: form-data; name="a"',
    'content-disposition:form-data; name="a"',
    'Content-Disposition: form-data; name="b"',
    'Content-Disposition: form-data; name="a"; filename="f"',
    'Content-Disposition: form-data; name="a"\r\nContent-Type: text/plain',
]
PARTS = st.lists(
    st.tuples(
        st.sampled_from(HEADS), st.sampled_from([b"", b"x", b"y", b"\r\n", b"--B", b"\r\n--C\r\n", b"x\r\n\r\ny"])
    ),
    min_size=1,
    max_size=3,
)


@given(PARTS, PARTS, st.booleans())
def test_multipart_is_its_parts_whatever_the_boundary(
    one: list[tuple[str, bytes]], two: list[tuple[str, bytes]], swap: bool
) -> None:
    def plain(parts: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        return [(re.sub(r":\s*", ": ", head.lower().replace(";", "; ")), content) for head, content in parts]

    left, right = multipart("Bound-1", one), multipart("bound2", one if swap else two)
    assert same(left, right) == (plain(one) == plain(one if swap else two))
    assert isinstance(bodies.read(left), bodies.Multipart)


@pytest.mark.parametrize(
    "data",
    [
        b"preamble\r\n--B\r\n\r\nx\r\n--B--",
        b"--B\r\n\r\nx\r\n--B--\r\nepilogue",
        b"--B\n\nx\n--B--\n",
        b"--B\r\n\r\nx",
        b"--B\r\n\r\nx\r\n--Bc\r\n\r\ny\r\n--B--",
        b"--B\r\nno colon\r\n\r\nx\r\n--B--",
        b"--B",
        b"--B\r\n--B--",
    ],
)
def test_multipart_in_any_doubtful_form_stays_bytes(data: bytes) -> None:
    assert isinstance(bodies.read(post(data, [(b"content-type", b"multipart/mixed; boundary=B")])), bodies.Raw)


# ---- content encodings


def test_content_encoding_is_undone() -> None:
    text = b'{"a": 1, "b": 2}'
    bare = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    encoded = {
        b"gzip": gzip.compress(text, mtime=1),
        b"GZIP": gzip.compress(text[:5], mtime=2) + gzip.compress(text[5:], mtime=3),
        b"deflate": zlib.compress(text),
        b" deflate": bare.compress(text) + bare.flush(),
        b"identity": text,
        b"aws-chunked": b"5;chunk-signature=ab\r\n" + text[:5] + b"\r\nb\r\n" + text[5:] + b"\r\n0\r\nx-crc: 1\r\n\r\n",
    }
    for coding, data in encoded.items():
        assert same(post(b'{"b":2,"a":1}', JSON), post(data, [*JSON, (b"Content-Encoding", coding)])), coding


@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"br", b"gzip, gzip", b"aws-chunked"])
def test_what_cannot_be_undone_stays_bytes_under_its_encoding(coding: bytes) -> None:
    text = b'{"a": 1}'
    request = post(text, [*JSON, (b"Content-Encoding", coding)])
    assert not same(request, post(text, JSON))
    assert not same(request, post(b'{"a":1}', [*JSON, (b"Content-Encoding", coding)]))


@pytest.mark.parametrize(
    "cut", [gzip.compress(b"a" * 99, mtime=0)[:-3], zlib.compress(b"a" * 99)[:-3], gzip.compress(b"a", mtime=0) + b"x"]
)
def test_cut_or_followed_by_rubbish_stays_bytes(cut: bytes) -> None:
    for coding in (b"gzip", b"deflate"):
        assert bodies.undo(coding, cut) is None


@pytest.mark.parametrize(
    ("size", "rubbish", "fits"),
    [
        (1 << 20, 0, True),
        ((1 << 20) + 1, 0, False),  # a thousand times its size
        (2 << 20, 30_000, True),  # as compressible as a text is
    ],
)
def test_a_bomb_stays_bytes(size: int, rubbish: int, fits: bool) -> None:
    content = random.Random(1).randbytes(rubbish) + b"0" * (size - rubbish)
    for coding, data in ((b"gzip", gzip.compress(content)), (b"deflate", zlib.compress(content))):
        assert (bodies.undo(coding, data) == content) == fits
    members = gzip.compress(content[: size // 2]) + gzip.compress(content[size // 2 :])
    assert (bodies.undo(b"gzip", members) == content) == fits


def test_nothing_is_decoded_beyond_what_a_request_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "DECODED_MAX", 1000)
    assert bodies.undo(b"gzip", gzip.compress(b"0" * 1000)) is not None
    bomb = gzip.compress(b"0" * 1001)
    assert bodies.undo(b"gzip", bomb) is None
    assert isinstance(bodies.read(post(bomb, [*JSON, (b"Content-Encoding", b"gzip")])), bodies.Raw)


# ---- the envelope

BODIES = st.sampled_from([b"", b"{}", b"a=1", b"1:1", b'{"a":1}', b"\x00"])
KINDS = st.sampled_from([(), JSON, FORM, ((b"content-type", b"text/plain"),)])


@st.composite
def requests(draw: st.DrawFn) -> Request:
    return Request(
        draw(st.sampled_from(["GET", "POST", "post", ""])),
        draw(st.sampled_from(["http", "https"])),
        draw(st.sampled_from(["a", "a:1", "::1"])),
        draw(st.sampled_from([1, 11, 80, 443])),
        draw(st.sampled_from(["/", "/?", "/?a", "/?a=", "/1:a", "/?a&a"])),
        (*draw(KINDS), *draw(st.sampled_from([(), ((b"Range", b"1"),), ((b"IF-MATCH", b"1"),), ((b"Cookie", b"1"),)]))),
        draw(BODIES),
    )


@given(requests(), requests())
def test_forms_are_equal_exactly_when_all_that_takes_part_is(one: Request, two: Request) -> None:
    def parts(request: Request) -> Any:
        headers = sorted((name.lower(), value) for name, value in request.headers if name != b"Cookie")
        kind = request.header("content-type")
        body = json.loads(request.body) if kind == JSON[0][1] and request.body[:1] == b"{" else request.body
        return (request.method, request.scheme, request.host, request.port, request.target, headers, body)

    assert same(one, two) == (parts(one) == parts(two))


def test_headers_take_part_by_the_list() -> None:
    rules = Rules.load([])
    rule = rules.match(post())
    plain = post(b"{}", JSON)
    for name, value in [
        ("user-agent", "x"),
        ("x-request-id", "1"),
        ("authorization", "Bearer x"),
        ("x-stainless-retry-count", "1"),
        ("accept", "application/json"),
        ("idempotency-key", "0b1e4ec5-7dbb-4b7c-9b1c-0a3f55e0bb10"),
        ("idempotency-key", ""),
        ("traceparent", "00-1-2-3"),
    ]:
        assert same(plain, replace(plain, headers=(*JSON, (name.encode(), value.encode()))), rule), name
    for name, value in [
        ("Anthropic-Version", "2023-06-01"),
        ("openai-organization", "o"),
        ("stripe-account", "acct_1"),
        ("x-amz-target", "Do.It"),
        ("range", "bytes=0-1"),
        ("if-none-match", "x"),
        ("prefer", "wait=1"),
        ("upload-offset", "5"),
        ("x-http-method-override", "PUT"),
        ("accept", "text/event-stream"),
        ("idempotency-key", "order-4711"),
    ]:
        assert not same(plain, replace(plain, headers=(*JSON, (name.encode(), value.encode()))), rule), name


def test_a_key_of_another_name_takes_part_where_the_rule_names_it() -> None:
    request = post(headers=[(b"X-My-Key", b"order-1")])
    keyed = Rule("keyed", Effect.IDEMPOTENT, key=KeyPlace("x-my-key"))
    assert same(request, post())
    assert not same(request, post(), keyed)
    assert same(post(headers=[(b"X-My-Key", b"0b1e4ec5-7dbb-4b7c-9b1c-0a3f55e0bb10")]), post(), keyed)


def test_accept_takes_part_sorted_and_only_for_events() -> None:
    def accepting(value: bytes) -> Request:
        return post(headers=[(b"Accept", value)])

    assert same(accepting(b"text/event-stream, application/json"), accepting(b"Application/JSON,text/event-stream"))
    assert not same(accepting(b"text/event-stream"), accepting(b"text/event-stream, application/json"))


@pytest.mark.parametrize(
    ("one", "two", "equal"),
    [
        (b"text/plain", b"Text/Plain; charset=UTF-8", True),
        (b"text/plain", b"text/plain; charset=latin-1", False),
        (b"text/plain; a=1; b=2", b"text/plain;b=2;a=1", True),
        (b"text/plain; a=1", b'text/plain; a="1"', True),
        (b'text/plain; b="c;d=e"', b"text/plain; b=c; d=e", False),
        (b"text/plain; a=1", b"text/plain; a=2", False),
        (b"text/plain; boundary=x", b"text/plain; boundary=y", False),
        (b"text/plain; nonsense", b"text/plain", False),
        (b"text/plain;", b"text/plain", True),
    ],
)
def test_content_types(one: bytes, two: bytes, equal: bool) -> None:
    assert same(post(b"x", [(b"content-type", one)]), post(b"x", [(b"content-type", two)])) == equal


def test_signatures_in_a_query_are_left_out_only_where_there_is_one() -> None:
    signed = "/o?X-Amz-Signature={0}&X-Amz-Date={0}&X-Amz-Credential=c&X-Amz-Expires={0}&part=1"
    assert same(post(target=signed.format(1)), post(target=signed.format(2)))
    assert not same(post(target=signed.format(1)), post(target=signed.format(1).replace("part=1", "part=2")))
    assert not same(post(target="/o?X-Amz-Date=1"), post(target="/o?X-Amz-Date=2"))


# ---- what a rule ignores


@pytest.mark.parametrize(
    ("ignore", "one", "two", "equal"),
    [
        ("$.key", '{"a":1,"key":"x"}', '{"a":1}', True),
        ("$.key", '{"a":1,"key":"x"}', '{"a":2}', False),
        ("$.key", '{"a":{"key":1}}', '{"a":{"key":2}}', False),
        ("$..key", '{"a":[{"key":1}],"key":3}', '{"a":[{"key":2}]}', True),
        ("body.a[*].id", '{"a":[{"id":1},{"id":2}]}', '{"a":[{"id":3},{}]}', True),
        ("body.a[*].id", '{"a":[{"id":1},{"id":2}]}', '{"a":[{"id":3}]}', False),
        ("$.a[0]", '{"a":[1,2]}', '{"a":[3,2]}', True),
        ("$.a[0]", '{"a":[1,2]}', '{"a":[1,3]}', False),
        ("$.a[*]", '{"a":[1,2]}', '{"a":[3,4]}', True),
        ("$.a[*]", '{"a":[1,2]}', '{"a":[1]}', False),
        ("$.a.*", '{"a":{"x":1}}', '{"a":{}}', True),
        ("$['a.b']", '{"a.b":1}', "{}", True),
        ("$.key", '{"key":1,"key":2,"b":3}', '{"b":3}', True),
        ("$.b", '{"a":1,"a":2,"b":3}', '{"a":1,"a":2}', True),
        ("$.a.x", '{"a":{"x":1},"a":{"x":2}}', '{"a":{},"a":{}}', True),
        ("$", '{"a":1}', "[2]", True),
        ("$.a", "[1]", "[2]", False),
        ("$.a", "1", "1", True),
    ],
)
def test_ignored_fields_of_json(ignore: str, one: str, two: str, equal: bool) -> None:
    rule = Rule("r", Effect.REPEATABLE, ignore=(ignore,))
    assert same(post(one.encode(), JSON), post(two.encode(), JSON), rule) == equal


@pytest.mark.parametrize(
    ("ignore", "one", "two", "equal"),
    [
        ("$.a", "a=1&b=2", "b=2", True),
        ("$.a", "a[x]=1&a[]=3&b=2", "b=2", True),
        ("$.a.x", "a[x]=1&a[y]=2", "a[y]=2", True),
        ("$.a.x", "a[x]=1&a[y]=2", "a[x]=1&a[y]=3", False),
        ("$['a[x]']", "a[x]=1&a[y]=2", "a[y]=2", True),
        ("$..x", "a[b][x]=1&x=2&c=3", "c=3", True),
        ("$.a[*].x", "a[0][x]=1&a[1][x]=1", "a[0][x]=2", True),
    ],
)
def test_ignored_fields_of_forms(ignore: str, one: str, two: str, equal: bool) -> None:
    rule = Rule("r", Effect.REPEATABLE, ignore=(ignore,))
    # A form of which nothing is left still is a form.
    assert same(post(f"{one}&z=1".encode(), FORM), post(f"{two}&z=1".encode(), FORM), rule) == equal


def test_ignored_parameters_headers_and_parts() -> None:
    rule = Rule("r", Effect.REPEATABLE, ignore=("query.ts", "header.if-match", "$.a"), secret_query=frozenset({"key"}))
    assert same(post(target="/p?a=1&ts=5&key=x"), post(target="/p?ts=6&a=1&key=y&%74s=7"), rule)
    assert not same(post(target="/p?ts=5"), post(target="/p"), rule)
    assert same(post(headers=[(b"If-Match", b"1")]), post(), rule)
    assert same(multipart("x", [(HEADS[0], b"1"), (HEADS[2], b"2")]), multipart("y", [(HEADS[2], b"2")]), rule)


# ---- prints

PRINTED = """
from proxy.canonical import fingerprint, secondary
from proxy.message import Request
from proxy.profiles import Rules
route = {"host": "api.x.test", "effect": "idempotent", "key": {"name": "X-Key"}, "ignore": ["$.t", "query.t"]}
rules = Rules.load([route])
request = Request("POST", "https", "api.x.test", 443, "/p?b=1&a=2&t=3",
    ((b"Content-Type", b"application/json"), (b"Authorization", b"Bearer 1"), (b"X-B", b"1"), (b"X-A", b"2"),
     (b"Stripe-Version", b"1"), (b"Anthropic-Version", b"2"), (b"User-Agent", b"u")),
    b'{"z": {"b": 1.50, "a": [1, 2]}, "t": 9, "a": "\\\\u00e9", "a": null}')
rule = rules.match(request)
print(fingerprint(request, rule).hex(), secondary(request, rule, b"s" * 32).hex(), rules.hash.hex())
"""


def test_prints_are_the_same_in_every_process() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", PRINTED],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(printed) == 1
    # The form is kept in journals: when it changes on purpose, canonical.VERSION changes, and these with it.
    assert printed.pop().split()[:2] == [
        "c5cb8248b688e9e8cd68f0fc7a9405eab42099a442dc2bb070b56490e8e0d5d5",
        "79de31f3a335b75dd233da0c1d586d2f",
    ]


def test_the_fingerprint_is_a_hash_of_the_form() -> None:
    assert len(fingerprint(post(), PLAIN)) == 32
    assert fingerprint(post(), PLAIN) != fingerprint(post(target="/other"), PLAIN)


SECRET = b"k" * 32
AUTHORIZED = [(b"Authorization", b"Bearer 1"), (b"Cookie", b"a"), (b"X-Tenant", b"1")]


def test_the_secondary_print_tells_apart_who_asks() -> None:
    rule = Rules.load([]).match(post())

    def printed(*headers: tuple[bytes, bytes]) -> bytes:
        return secondary(post(headers=headers), rule, SECRET)

    whole = printed(*AUTHORIZED)
    assert len(whole) == 16
    assert whole == printed(*reversed(AUTHORIZED), (b"User-Agent", b"x"), (b"X-Stainless-Lang", b"py"))
    assert whole == printed(
        *AUTHORIZED, (b"content-type", b"x"), (b"Idempotency-Key", b"0b1e4ec5-7dbb-4b7c-9b1c-0a3f55e0bb10")
    )
    for n in range(len(AUTHORIZED)):
        assert whole != printed(*AUTHORIZED[:n], *AUTHORIZED[n + 1 :])
    assert whole != secondary(post(headers=AUTHORIZED), rule, b"other")
    assert printed((b"Authorization", b"AWS4-HMAC-SHA256 x")) == printed((b"Authorization", b"AWS4-HMAC-SHA256 y"))
    assert printed((b"a", b"bc")) != printed((b"ab", b"c"))


def test_noise_by_its_beginning() -> None:
    rule = Rule("r", Effect.READ, headers=HeaderNames(noise=frozenset({"x-noise-*", "date"})))
    plain = secondary(post(), rule, SECRET)
    assert plain == secondary(post(headers=[(b"X-Noise-A", b"1"), (b"Date", b"1")]), rule, SECRET)
    assert plain != secondary(post(headers=[(b"X-Noises", b"1")]), rule, SECRET)
    assert plain != secondary(post(headers=[(b"Dates", b"1")]), rule, SECRET)
