"""A request as bytes, and an answer made of them; where they go. Pure.

Each request has a connection of its own, which its answer ends: who gives up closes it, and the sidecar sees at once
that nobody waits there any more. So there is nothing to keep between two calls, threads or event loops.
"""

import base64
import http.client
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from twiceshy.errors import NotUnderTwiceshy

INTERNAL = "http://twiceshy.internal"
#: Sent with a request that is asked again because its answer got lost: it asks for the same step.
AGAIN = "X-Stainless-Retry-Count"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to *url*, by the run's proxy; *direct*: without it."""

    method: str
    url: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    direct: bool = False
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """Its answer, whole."""

    status: int
    headers: Mapping[str, str]  # names in small letters
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def refusal(self) -> str | None:
        """The code of what twiceshy itself said no to."""
        return self.headers.get("twiceshy-error")

    @property
    def message(self) -> str:
        """What a problem says, in words."""
        try:
            said = self.json()
            return str(said.get("detail") or said.get("message") or said["error"]["message"])
        except (ValueError, AttributeError, KeyError, TypeError):
            return self.body[:500].decode("utf-8", "replace")


class Cut(Exception):
    """The connection ended before the answer did."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """The sidecar, and what tells it for whom it is asked."""

    host: str
    port: int
    authorization: str


@dataclass(frozen=True, slots=True)
class Route:
    """Where the bytes of a request go: to *host*, *port*; after *connect*, if any, and TLS with *tls*, if named."""

    host: str
    port: int
    connect: bytes | None
    tls: str | None
    data: bytes


def proxy(environment: Mapping[str, str] | None = None) -> Proxy:
    """The run's proxy, as the environment names it. Raises NotUnderTwiceshy."""
    given = os.environ if environment is None else environment
    text = given.get("http_proxy") or given.get("HTTP_PROXY") or ""
    parts = urlsplit(text)
    if not parts.hostname or not parts.port or not parts.username or not parts.password:
        found = "HTTP_PROXY names no run" if text else "HTTP_PROXY is not set"
        raise NotUnderTwiceshy(
            f"this program was not started by twiceshy ({found}). Start it with `twiceshy run -- python agent.py`, "
            'let a `twiceshy worker` do so, or first say eval "$(twiceshy env)"'
        )
    pair = f"{unquote(parts.username)}:{unquote(parts.password)}".encode("latin-1")
    return Proxy(parts.hostname, parts.port, "Basic " + base64.b64encode(pair).decode("ascii"))


def route(ask: Ask, through: Proxy | None, again: int = 0) -> Route:
    """How *ask* goes out. *again*: the how-manieth repetition it is."""
    parts = urlsplit(ask.url)
    secure = parts.scheme == "https"
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{ask.url!r} is no address of HTTP")
    port = parts.port or (443 if secure else 80)
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host = name if parts.port is None else f"{name}:{port}"
    headers = {"Host": host, "Connection": "close", "Accept": "application/json"}
    if ask.body is not None:
        headers["Content-Type"] = "application/json"
    if ask.body is not None or ask.method != "GET":
        headers["Content-Length"] = str(len(ask.body or b""))
    headers.update(ask.headers)
    if again:
        headers[AGAIN] = str(again)
    if through is None:
        return Route(parts.hostname, port, None, name if secure else None, _bytes(ask, path, headers))
    if secure:
        credentials = f"Proxy-Authorization: {through.authorization}\r\n"
        connect = f"CONNECT {name}:{port} HTTP/1.1\r\nHost: {name}:{port}\r\n{credentials}\r\n".encode("ascii")
        return Route(through.host, through.port, connect, parts.hostname, _bytes(ask, path, headers))
    headers["Proxy-Authorization"] = through.authorization
    return Route(through.host, through.port, None, None, _bytes(ask, f"http://{host}{path}", headers))


def _bytes(ask: Ask, target: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{ask.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError(f"{ask.method} {ask.url!r}: a header or the address has a line break")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (ask.body or b"")


class _Came(io.BytesIO):
    """Bytes in a socket's place."""

    def makefile(self, *_: Any, **__: Any) -> io.BytesIO:
        return self


def reply(data: bytes) -> Reply:
    """The answer that *data* is. Raises Cut where it is not whole."""
    if b"\r\n\r\n" not in data:  # http.client would take the end of what came for the end of the head
        raise Cut(f"the connection ended after {len(data)} bytes of an answer")
    answer = http.client.HTTPResponse(_Came(data))  # type: ignore[arg-type] # all it does is makefile()
    try:
        answer.begin()
        body = answer.read()
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise Cut(f"the answer was cut: {error!r}") from error
    return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)


def connected(data: bytes) -> bool:
    """Whether *data*, the answer to CONNECT, is whole. Raises Cut where it is a refusal."""
    head, end, _ = data.partition(b"\r\n\r\n")
    if end and head.split(b" ", 2)[1:2] != [b"200"]:
        raise Cut(f"the proxy opens no tunnel: {head[:200]!r}")
    return bool(end)


def quoted(name: str) -> str:
    """*name* as one part of a path."""
    return quote(name, safe="")
