"""Canonical form of a request, and the prints made from it. Pure.

Two requests of one form differ only in spacing, in the order of names, in escapes, or in what their rule
ignores (DESIGN §4). The form is a list of texts, each with its length before it: no text can run into the
next. It is made to be hashed and compared, never to be read back or sent.

Headers take part by an allow-list; all others are noise (SDKs send many that differ between two equal
calls) or say who asks rather than what: those make the *secondary* print, which only chooses among equals.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from urllib.parse import unquote_plus

from proxy import fields
from proxy.body import Body, Form, Json, Multipart, Raw, media_type, order, read, write_json
from proxy.keys import is_random, signed
from proxy.message import Request
from proxy.profiles import Rule

#: The form's own version: part of every form, so that two versions never agree by accident.
VERSION = b"1"

#: What HTTP itself defines and means by a request, beside the content type.
_COMPARED = frozenset(
    {b"range", b"prefer", b"upload-offset", b"x-http-method-override"}
    | {b"if-match", b"if-none-match", b"if-modified-since", b"if-unmodified-since", b"if-range"}
)
#: Signed URLs: these differ each time, and are taken for a signature's only where that one is there.
_SIGNATURES = {
    "x-amz-signature": re.compile(r"x-amz-(?:signature|date|credential|security-token|expires)"),
    "x-goog-signature": re.compile(r"x-goog-(?:signature|date|credential|expires)"),
}


def fingerprint(request: Request, rule: Rule) -> bytes:
    """32 bytes: sha256 of the canonical form."""
    return hashlib.sha256(canonical(request, rule)).digest()


def canonical(request: Request, rule: Rule) -> bytes:
    """The canonical form of *request*. CPU-bound (20 ms per MB of JSON): large bodies go to a thread."""
    body = understood(request, rule)
    out: list[bytes] = []
    _put(out, VERSION)
    for text in (request.method, request.scheme, request.host, str(request.port), request.path):
        _put(out, _bytes(text))
    _put_all(out, [_bytes(piece) for piece in query_pieces(request, rule)] if "?" in request.target else None)
    for name, value in compared_headers(request, rule, body):
        _put(out, name)
        _put(out, value)
    _put(out, b"")  # no header has an empty name: the body follows
    _put_body(out, body)
    return b"".join(out)


def understood(request: Request, rule: Rule) -> Body:
    """The body of *request* without what *rule* ignores."""
    body = read(request)
    paths = fields.compile_ignore(rule.ignore).body
    return fields.leave_out(body, paths) if paths else body


def query_pieces(request: Request, rule: Rule) -> list[str]:
    """``name=value`` as they stand, sorted; without signatures, secrets, and what the rule ignores."""
    if not request.query:
        return [""] if "?" in request.target else []
    named = [(query_name(piece), piece) for piece in request.query.split("&")]
    without = rule.secret_query | fields.compile_ignore(rule.ignore).query
    lower = {name.lower() for name, _ in named}
    signatures = [names for mark, names in _SIGNATURES.items() if mark in lower]
    kept = [
        (name, piece)
        for name, piece in named
        if name not in without and not any(names.fullmatch(name.lower()) for names in signatures)
    ]
    kept.sort(key=lambda pair: order(_bytes(pair[0])))
    return [piece for _, piece in kept]


def query_name(piece: str) -> str:
    """The name of a query parameter, unescaped."""
    return unquote_plus(piece.partition("=")[0], errors="surrogateescape")


def compared_headers(request: Request, rule: Rule, body: Body) -> list[tuple[bytes, bytes]]:
    """The headers that take part, names in lower case, sorted; equal names in the order they came."""
    ignored = fields.compile_ignore(rule.ignore).headers
    names = _compared_names(rule.headers.compared)
    key_names = _key_names(rule)
    found: list[tuple[bytes, bytes]] = []
    for name, value in request.headers:
        name = name.lower()
        value = value.strip(b" \t")
        if name.decode("latin-1") in ignored:
            continue
        if name == b"content-type":
            found.append((name, _content_type(value, body)))
        elif name == b"accept":
            if b"text/event-stream" in value.lower():
                found.append((name, b",".join(sorted(kind.strip().lower() for kind in value.split(b",")))))
        elif name in names or (name in key_names and value and not is_random(value)):
            found.append((name, value))
    found.sort(key=lambda header: header[0])
    return found


def secondary(request: Request, rule: Rule, secret: bytes) -> bytes:
    """16 bytes: keyed hash of the headers that are neither in the fingerprint nor noise.

    It tells apart who asks (authorization, cookie) among requests that ask the same.
    """
    compared = _compared_names(rule.headers.compared)
    key_names = _key_names(rule)
    is_noise = _noise(rule.headers.noise)
    found: list[tuple[bytes, bytes]] = []
    for name, value in request.headers:
        name = name.lower()
        if name in compared or name == b"content-type" or is_noise.fullmatch(name):
            continue
        if name in key_names and is_random(value):
            continue  # a new one in each process
        if name == b"authorization" and signed(request):
            continue  # a signature over the time
        found.append((name, value.strip(b" \t")))
    found.sort(key=lambda header: header[0])
    out: list[bytes] = []
    for name, value in found:
        _put(out, name)
        _put(out, value)
    return hashlib.blake2b(b"".join(out), digest_size=16, key=secret[:64]).digest()


@lru_cache(maxsize=64)
def _compared_names(names: frozenset[str]) -> frozenset[bytes]:
    return _COMPARED | {name.encode("latin-1") for name in names}


@lru_cache(maxsize=64)
def _noise(names: frozenset[str]) -> re.Pattern[bytes]:
    each = (re.escape(name.removesuffix("*")) + (".*" if name.endswith("*") else "") for name in sorted(names))
    return re.compile("|".join(each).encode("latin-1"), re.DOTALL)


def _key_names(rule: Rule) -> tuple[bytes, ...]:
    own = rule.key.name.lower().encode("latin-1") if rule.key is not None else b"idempotency-key"
    return (own,) if own == b"idempotency-key" else (own, b"idempotency-key")


def _content_type(value: bytes, body: Body) -> bytes:
    kind, parameters = media_type(value)
    out = kind
    for name, text in parameters:
        if not (name == b"boundary" and isinstance(body, Multipart)) and not (
            name == b"charset" and text.lower() == b"utf-8"
        ):
            out += b';%b="%b"' % (name, text.replace(b"\\", b"\\\\").replace(b'"', b'\\"'))
    return out


# ---- the encoding


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _put(out: list[bytes], text: bytes) -> None:
    out.append(b"%d:" % len(text))
    out.append(text)


def _put_all(out: list[bytes], texts: list[bytes] | None) -> None:
    out.append(b"-" if texts is None else b"%d;" % len(texts))
    for text in texts or ():
        _put(out, text)


def _put_body(out: list[bytes], body: Body) -> None:
    if isinstance(body, Json):
        _put(out, b"json")
        _put(out, write_json(body.tree))
    elif isinstance(body, Form):
        _put(out, b"form")
        for name, value in sorted(body.pairs, key=lambda pair: order(pair[0])):
            _put_all(out, [name] if value is None else [name, value])
    elif isinstance(body, Multipart):
        _put(out, b"multipart")
        for part in body.parts:
            _put_all(out, [text for header in part.headers for text in header])
            _put(out, b"%d" % part.size)
            _put(out, part.sha256)
    elif isinstance(body, Raw):
        _put(out, b"raw")
        _put(out, body.encoding)
        _put(out, body.data)
