"""Which rule a request falls under: its effect class, where its key goes, what to ignore. Pure.

Rules are data: the user's ``[[route]]`` tables first, then ``profiles.toml`` beside this file, then what
holds for a host that nobody described. The first that matches wins. The data file is the only place that
knows a provider.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from proxy import fields
from proxy.body import Body, is_json, media_type, read
from proxy.message import Headers, Request
from proxy.routes import (
    AssumedTable,
    Dialect,
    HeadersTable,
    Protocol,
    Route,
    SdkKey,
    host_pattern,
    path_pattern,
    read_route,
)
from runtime.step import Effect

#: How long the same bytes may be sent again where the upstream's memory of a key is not known (DESIGN §3.4).
RETENTION_UNKNOWN = 24 * 3600.0
#: PUT and DELETE without a key are idempotent by their meaning, but only while nobody else writes there.
RETENTION_KEYLESS = 300.0

BUILT_IN = Path(__file__).with_name("profiles.toml")


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """Where the idempotency key stands on the wire, and what is known of it."""

    name: str  # of the header
    retention: float | None = None  # seconds, None: not known
    sdk: SdkKey = "none"
    where: Literal["header"] = "header"

    @property
    def kept_over_retries(self) -> bool:
        """The SDK makes a key per call and keeps it over its own retries: another random key, another call."""
        return self.sdk == "random_per_call"


@dataclass(frozen=True, slots=True)
class Assumed:
    """What a person who says ``assume_done`` most likely means by it."""

    status: int
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class HeaderNames:
    """What headers mean, all names in lower case; a name in ``noise`` may end in ``*``."""

    compared: frozenset[str] = frozenset()  # take part in the fingerprint, beside those that HTTP itself defines
    noise: frozenset[str] = frozenset()  # differ between two equal requests: in no print at all
    retry_count: frozenset[str] = frozenset()  # "2": the second repetition; "attempt=2; max=3": the first
    retry_id: frozenset[str] = frozenset()  # equal in all tries of one call


NO_NAMES = HeaderNames()


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds for a request."""

    name: str
    effect: Effect
    key: KeyPlace | None = None
    ignore: tuple[str, ...] = ()
    dialect: Dialect | None = None
    protocol: Protocol | None = None
    stores_errors: bool = False
    in_flight: frozenset[int] = frozenset()
    not_processed: frozenset[int] = frozenset()
    secret_query: frozenset[str] = frozenset()
    assumed: Assumed | None = None
    kind: str = ""
    denied: bool = False  # nothing is sent
    headers: HeaderNames = field(default=NO_NAMES, repr=False)

    @property
    def ending(self) -> str | None:
        """By what name ``proxy.streams`` knows how a stream of these answers ends; None: by its framing alone."""
        return self.dialect or self.protocol

    def retention(self, method: str) -> float:
        """How long after the first sending the same bytes may be sent again, in seconds (DESIGN §3.4)."""
        if self.key is None:
            return RETENTION_KEYLESS if method in {"PUT", "DELETE"} else RETENTION_UNKNOWN
        return RETENTION_UNKNOWN if self.key.retention is None else self.key.retention


class Rules:
    """All rules in their order. ``hash`` names them: a step remembers under which ones it was printed."""

    def __init__(self, routes: list[_Compiled], names: HeaderNames, assigned_key: str | None, digest: bytes) -> None:
        self.hash = digest
        self._routes = routes
        self._by_authority: dict[tuple[str, int], list[_Compiled]] = {}
        undescribed = Rule("host without a rule", Effect.AT_MOST_ONCE, headers=names)
        self._other = undescribed
        self._read = replace(undescribed, effect=Effect.READ)
        self._idempotent = replace(undescribed, effect=Effect.IDEMPOTENT)
        self._keyed = undescribed
        if assigned_key is not None:
            # On a host that may ignore it: the class stays at_most_once.
            self._keyed = replace(undescribed, key=KeyPlace(assigned_key))

    @classmethod
    def load(
        cls,
        routes: list[dict[str, Any]],
        *,
        origin: str = "twiceshy.toml",
        assigned_key: str | None = "Idempotency-Key",
    ) -> Rules:
        """Compile *routes* (the user's, from the file *origin*) before the built-in ones.

        *assigned_key*: the header that POST and PATCH to undescribed hosts get, None for none.
        UsageError names file, route and field.
        """
        text = BUILT_IN.read_bytes()
        built_in = tomllib.loads(text.decode("utf-8"))
        table = HeadersTable.model_validate(built_in["headers"])
        names = HeaderNames(
            frozenset(table.compared), frozenset(table.noise), frozenset(table.retry_count), frozenset(table.retry_id)
        )
        compiled = [_Compiled(read_route(route, n, origin), f"route {n}", names) for n, route in enumerate(routes, 1)]
        for n, route in enumerate(built_in["route"], 1):
            compiled.append(_Compiled(read_route(route, n, BUILT_IN.name), f"built-in route {n}", names))
        digest = hashlib.sha256(text)
        digest.update(json.dumps([routes, assigned_key], sort_keys=True, default=str).encode())
        return cls(compiled, names, assigned_key, digest.digest())

    def match(self, request: Request) -> Rule:
        """The first rule that *request* falls under; there is always one."""
        method = _effective_method(request)
        path = plain_path(request.path)
        body = _Asked(request)
        for route in self._for(request.host, request.port):
            if route.covers(method, path, body):
                return self._speaking(route.rule_for(body), request, method, path, body)
        if method in READ_METHODS:
            return self._read
        if method in {"PUT", "DELETE"}:
            return self._idempotent
        return self._keyed if method in {"POST", "PATCH"} else self._other

    def _speaking(self, rule: Rule, request: Request, method: str, path: str, body: _Asked) -> Rule:
        """*rule*, told of the protocol that *request* speaks: a rule about a tool need not know of ids and sessions."""
        if rule.ending is not None or rule.effect is Effect.PASSTHROUGH:
            return rule
        for route in self._for(request.host, request.port):
            if route.protocol is not None and route.covers(method, path, body):
                known = route.rule_for(body)
                return replace(
                    rule,
                    protocol=known.protocol,
                    ignore=(*rule.ignore, *known.ignore),
                    not_processed=rule.not_processed | known.not_processed,
                    assumed=rule.assumed or known.assumed,
                )
        return rule

    def is_blind(self, host: str, port: int) -> bool:
        """Whether a tunnel to *host* is passed through without being opened: the first rule for it says so."""
        first = next(iter(self._for(host, port)), None)
        return first is not None and first.blind

    def _for(self, host: str, port: int) -> list[_Compiled]:
        known = self._by_authority.get((host, port))
        if known is None:
            if len(self._by_authority) >= 4096:
                self._by_authority.clear()
            known = [route for route in self._routes if route.at(host.rstrip("."), port)]
            self._by_authority[host, port] = known
        return known


READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_OVERRIDES = ("x-http-method-override", "x-http-method", "x-method-override")


def _effective_method(request: Request) -> str:
    # A GET that says it is a DELETE is one. The other way round the upstream may not listen: POST stays POST.
    if request.method in READ_METHODS:
        for name in _OVERRIDES:
            value = request.header(name)
            if value is not None and value.strip().upper().decode("latin-1") not in READ_METHODS:
                return value.strip().upper().decode("latin-1")
    return request.method


_ESCAPED_PLAIN = re.compile(r"%(?:2[DdEe]|3[0-9]|4[1-9A-Fa-f]|5[0-9AaFf]|6[1-9A-Fa-f]|7[0-9AaEe])")


def plain_path(path: str) -> str:
    """*path* as an upstream most likely takes it, for matching only: ``%63`` is ``c``, ``/a/../b`` is ``/b``."""
    if "%" in path:
        path = _ESCAPED_PLAIN.sub(lambda match: unquote(match[0]), path)
    if "/." not in path:
        return path
    kept: list[str] = []
    segments = path.split("/")[1:]
    for segment in segments:
        if segment == "..":
            kept = kept[:-1]
        elif segment != ".":
            kept.append(segment)
    if segments[-1] in {".", ".."}:
        kept.append("")
    return "/" + "/".join(kept)


class _Asked:
    """A request as predicates ask it: its body is read when the first one needs it, and once."""

    __slots__ = ("_body", "_escaped", "_request")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._body: Body | None = None
        self._escaped: bool | None = None

    def has_header(self, name: bytes) -> bool:
        """*name*: in lower case; may end in ``*``."""
        if not name.endswith(b"*"):
            return self._request.header(name.decode("ascii")) is not None
        return any(each.lower().startswith(name[:-1]) for each, _ in self._request.headers)

    def body(self) -> Body:
        if self._body is None:
            self._body = read(self._request)
        return self._body

    def holds(self, predicate: fields.Predicate) -> bool:
        mark = predicate.mark
        if mark is not None and mark not in self._request.body and not self._may_be_escaped():
            return False
        return predicate.holds(self.body())

    def _may_be_escaped(self) -> bool:
        """Names in the body may be written with escapes, or not be there to see at all."""
        if self._escaped is None:
            kind, _ = media_type(self._request.header("content-type"))
            escapes = _JSON_ESCAPE if is_json(kind) else _FORM_ESCAPE
            self._escaped = (
                escapes.search(self._request.body) is not None or self._request.header("content-encoding") is not None
            )
        return self._escaped


_JSON_ESCAPE = re.compile(rb"\\u00[2-7]")
_FORM_ESCAPE = re.compile(rb"%[2-7]")


def _assumed(table: AssumedTable) -> Assumed:
    headers = tuple((name.encode("ascii"), value.encode("ascii")) for name, value in table.headers.items())
    return Assumed(table.status, headers, table.body.encode("utf-8"))


class _Compiled:
    """A route ready to be asked."""

    def __init__(self, route: Route, name: str, names: HeaderNames) -> None:
        self._hosts = [host_pattern(text) for text in route.host]
        self._methods = None if route.methods is None else frozenset(route.methods)
        self._paths = [path_pattern(text) for text in route.path]
        self._headers = [name.lower().encode("ascii") for name in route.match_headers]
        self._asks = [predicate.compiled() for predicate in route.match_body]
        self._excepts = [predicate.compiled() for predicate in route.repeatable_except]
        self.blind = route.effect == "tunnel"
        self.protocol = route.protocol
        # What of such a host can be seen after all (plain http, the gateway address) is passed on like the rest of it.
        unjournalled = self.blind or route.effect == "deny"
        self._rule = Rule(
            name=route.name or name,
            effect=Effect.PASSTHROUGH if unjournalled else Effect(route.effect),
            denied=route.effect == "deny",
            key=None if route.key is None else KeyPlace(route.key.name, route.key.retention, route.key.sdk),
            ignore=tuple(route.ignore),
            dialect=route.dialect,
            protocol=route.protocol,
            stores_errors=route.stores_errors,
            in_flight=frozenset(route.in_flight),
            not_processed=frozenset(route.not_processed),
            secret_query=frozenset(route.secret_query),
            assumed=None if route.assumed_response is None else _assumed(route.assumed_response),
            kind=route.kind,
            headers=names,
        )
        self._excepted = replace(self._rule, effect=Effect.AT_MOST_ONCE)

    def at(self, host: str, port: int) -> bool:
        return any(name.fullmatch(host) and wanted in {None, port} for name, wanted in self._hosts)

    def covers(self, method: str, path: str, body: _Asked) -> bool:
        return (
            (self._methods is None or method in self._methods)
            and any(pattern.fullmatch(path) for pattern in self._paths)
            and all(map(body.has_header, self._headers))
            and all(body.holds(predicate) for predicate in self._asks)
        )

    def rule_for(self, body: _Asked) -> Rule:
        """The rule; where the body asks for effects or cannot be read, it is no longer repeatable."""
        if self._excepts and (any(map(body.holds, self._excepts)) or fields.unreadable(body.body())):
            return self._excepted
        return self._rule
