"""A request as it goes upstream, and as the journal keeps it. Pure.

What goes again is what went first, byte for byte, with the new attempt's credentials: so the journal keeps
the head with every credential and secret replaced by a mark, and the marks are filled from the new request.
"""

import hashlib
import json
import re
from dataclasses import dataclass

from proxy.message import Request
from runtime.errors import Unreadable

#: Headers that are credentials: never stored. Names that end so are credentials too.
_CREDENTIALS = frozenset(
    {b"authorization", b"cookie", b"x-api-key", b"api-key", b"x-goog-api-key", b"x-auth-token", b"x-amz-security-token"}
)
_CREDENTIAL_NAME = re.compile(rb"(?:token|secret|api[-_]?key|password|credential)s?\Z")


def is_credential(name: bytes) -> bool:
    """True if the header *name* (any casing) carries a credential."""
    lower = name.lower()
    return lower in _CREDENTIALS or _CREDENTIAL_NAME.search(lower) is not None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What is sent: *request* after key injection; *secret_query*: names of query parameters that are secrets."""

    request: Request
    secret_query: frozenset[str] = frozenset()

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
        return json.dumps(
            {
                "method": request.method,
                "scheme": request.scheme,
                "host": request.host,
                "port": request.port,
                "target": f"{request.path}?{query}" if "?" in request.target else request.target,
                "headers": [
                    [name.decode("latin-1"), None if is_credential(name) else value.decode("latin-1")]
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
        headers: list[tuple[bytes, bytes]] = []
        filled: set[bytes] = set()
        for name_text, value in first["headers"]:
            name = name_text.encode("latin-1")
            if value is not None:
                headers.append((name, value.encode("latin-1")))
            elif name.lower() not in filled:
                filled.add(name.lower())
                headers += [(key, now) for key, now in fresh.headers if key.lower() == name.lower()]
        target = first["target"]
        if secret_query and "?" in target:
            target = f"{target.partition('?')[0]}?{_fill(target.partition('?')[2], fresh.query, secret_query)}"
        return Request(first["method"], first["scheme"], first["host"], first["port"], target, tuple(headers), body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"the stored request head cannot be read: {error!r}") from error


def _mask(query: str, secret: frozenset[str]) -> str:
    if not secret:
        return query
    return "&".join(
        f"{pair.partition('=')[0]}={_hash(pair)}" if pair.partition("=")[0] in secret else pair
        for pair in query.split("&")
    )


def _fill(query: str, fresh: str, secret: frozenset[str]) -> str:
    now = {pair.partition("=")[0]: pair for pair in fresh.split("&")}
    return "&".join(now.get(pair.partition("=")[0], pair) if pair.partition("=")[0] in secret else pair
                    for pair in query.split("&"))  # fmt: skip


def _hash(text: str) -> str:
    return "sha256-" + hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
