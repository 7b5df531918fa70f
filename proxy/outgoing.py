"""A request as it goes upstream, and as the journal keeps it. Pure.

What goes again is what went first, byte for byte, with the new attempt's credentials: so the journal keeps
the head with every credential and secret replaced by a mark, and the marks are filled from the new request.
"""

import hashlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass

from proxy.canonical import query_name
from proxy.message import Headers, Request
from runtime.errors import Unreadable

#: Names that end so are those of credentials: what is taken for one is not stored, and comes from the new request.
_CREDENTIAL = re.compile(
    rb"(?:auth|authorization|cookie2?|credential|jwt|key|password|secret|session(?:-?id)?|token)s?\Z", re.IGNORECASE
)


def is_credential(name: bytes) -> bool:
    """True if the header *name* (any casing) carries a credential."""
    return _CREDENTIAL.search(name) is not None and b"idempotency" not in name.lower()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What is sent: *request* after key injection.

    *secret_query*: names of query parameters that are secrets; *key_name*: of the header with the idempotency
    key, which is stored whatever it is called.
    """

    request: Request
    secret_query: frozenset[str] = frozenset()
    key_name: str | None = None

    @property
    def shown_url(self) -> str:
        """The URL for people and the journal: secrets out."""
        request = self.request
        base = f"{request.scheme}://{request.authority}{request.path}"
        return f"{base}?{_mask(request.query, self.secret_query)}" if request.query else base

    def journal_head(self) -> bytes:
        """The head as JSON, without credentials."""
        request = self.request
        query = _mask(request.query, self.secret_query)
        kept = b"" if self.key_name is None else self.key_name.lower().encode("latin-1")
        return json.dumps(
            {
                "method": request.method,
                "scheme": request.scheme,
                "host": request.host,
                "port": request.port,
                "target": f"{request.path}?{query}" if "?" in request.target else request.target,
                "headers": [
                    [name.decode("latin-1"), value.decode("latin-1")]
                    if name.lower() == kept or not is_credential(name)
                    else [name.decode("latin-1"), None]
                    for name, value in request.headers
                ],
            },
            separators=(",", ":"),
        ).encode("ascii")


def recall(head: bytes, body: bytes, fresh: Request, secret_query: frozenset[str] = frozenset()) -> Request:
    """The request that went first, with the credentials of *fresh*.

    Raises Unreadable when *head* is not what ``journal_head`` wrote.
    """
    try:
        first = json.loads(head)
        method, scheme, host, port, target = (first[name] for name in ("method", "scheme", "host", "port", "target"))
        stored = [(name.encode("latin-1"), value) for name, value in first["headers"]]
        headers = [(name, value if value is None else value.encode("latin-1")) for name, value in stored]
        path, mark, query = target.partition("?")
        if not isinstance(port, int) or not all(isinstance(text, str) for text in (method, scheme, host)):
            raise TypeError("method, scheme, host or port")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"the stored request head cannot be read: {error!r}") from error
    if secret_query:
        query = _fill(query, fresh.query, secret_query)
        target = path + (mark or ("?" if query else "")) + query
    return Request(method, scheme, host, port, target, _filled(headers, fresh.headers), body)


def _filled(first: list[tuple[bytes, bytes | None]], fresh: Headers) -> Headers:
    """*first* with the credentials of *fresh* where its own stood; those that have no place come last."""
    plain = {name.lower() for name, value in first if value is not None}
    now: defaultdict[bytes, list[tuple[bytes, bytes]]] = defaultdict(list)
    for pair in fresh:
        if is_credential(pair[0]) and pair[0].lower() not in plain:
            now[pair[0].lower()].append(pair)
    headers: list[tuple[bytes, bytes]] = []
    for name, value in first:
        if value is not None:
            headers.append((name, value))
        elif now[name.lower()]:
            headers.append((name, now[name.lower()].pop(0)[1]))
    return (*headers, *(pair for left in now.values() for pair in left))


def _mask(query: str, secret: frozenset[str]) -> str:
    return "&".join(
        f"{pair.partition('=')[0]}={_hash(pair)}" if query_name(pair) in secret else pair for pair in query.split("&")
    )


def _fill(query: str, fresh: str, secret: frozenset[str]) -> str:
    """*query* with the secrets of *fresh* where its own stood; those that have no place come last."""
    now: defaultdict[str, list[str]] = defaultdict(list)
    for pair in fresh.split("&") if fresh else ():
        if query_name(pair) in secret:
            now[query_name(pair)].append(pair)
    pairs: list[str] = []
    for pair in query.split("&") if query else ():
        name = query_name(pair)
        if name not in secret:
            pairs.append(pair)
        elif now[name]:
            pairs.append(now[name].pop(0))
    return "&".join([*pairs, *(pair for left in now.values() for pair in left)])


def _hash(text: str) -> str:
    return "sha256-" + hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
