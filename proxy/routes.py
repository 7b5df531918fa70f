"""``[[route]]`` tables as they stand in a file, checked. Pure.

An unknown name or value is an error that names file, route and field: a rule with a typing mistake would
silently leave its host without protection.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from proxy import fields
from runtime.errors import UsageError

Dialect = Literal["openai_chat", "openai_responses", "anthropic", "gemini"]
Protocol = Literal["mcp"]
SdkKey = Literal["none", "caller", "random_per_call", "random_per_attempt"]
Kind = Literal["", "money", "message", "record", "infra", "llm"]
EffectName = Literal["read", "repeatable", "idempotent", "at_most_once", "passthrough", "tunnel", "deny"]

#: All that a route of a blind tunnel may say.
_OF_TUNNEL = frozenset({"name", "host", "kind", "effect"})
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
#: Headers that mean something else already: a key there would break the request.
_TAKEN = frozenset(
    {"accept", "authorization", "connection", "content-encoding", "content-length", "content-type", "cookie", "expect"}
    | {"host", "te", "trailer", "transfer-encoding", "upgrade", "via"}
)


class _Table(BaseModel):
    # strict: "true" is no truth value, 1 no text
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class KeyTable(_Table):
    """``key = {in, name, retention, sdk}``: where the upstream takes an idempotency key."""

    where: Literal["header"] = Field("header", alias="in")
    name: str = "Idempotency-Key"
    retention: float | None = Field(None, gt=0, allow_inf_nan=False)
    sdk: SdkKey = "none"

    @field_validator("name")
    @classmethod
    def _is_free(cls, value: str) -> str:
        if not _TOKEN.fullmatch(value) or value.lower() in _TAKEN or value.lower().startswith(("proxy-", "twiceshy-")):
            raise ValueError(f"{value!r} cannot be the header of a key")
        return value


class PredicateTable(_Table):
    """``{path, in, not_in, names_not_in, absent}``: what a body must hold (``match_body``) or must not hold
    (``repeatable_except``)."""

    path: str
    one_of: list[str | bool | int | float] | None = Field(None, alias="in")
    none_of: list[str | bool | int | float] | None = Field(None, alias="not_in")
    names: list[str] | None = Field(None, alias="names_not_in")
    absent: bool = False

    @field_validator("path")
    @classmethod
    def _is_path(cls, value: str) -> str:
        fields.parse_path(value)
        return value

    @model_validator(mode="after")
    def _is_one_question(self) -> PredicateTable:
        if sum(each is not None for each in (self.one_of, self.none_of, self.names, self.absent or None)) > 1:
            raise ValueError("'in', 'not_in', 'names_not_in' and 'absent' exclude each other")
        return self

    def compiled(self) -> fields.Predicate:
        """The predicate as it is asked of a body."""
        return fields.Predicate(
            fields.parse_path(self.path),
            None if self.one_of is None else tuple(self.one_of),
            None if self.none_of is None else tuple(self.none_of),
            None if self.names is None else tuple(self.names),
            self.absent,
        )


class AssumedTable(_Table):
    """``assumed_response = {status, headers, body}``: what ``assume_done`` answers when nobody says otherwise."""

    status: int = Field(200, ge=200, le=599)
    headers: dict[str, str] = {}
    body: str = "{}"

    @field_validator("headers")
    @classmethod
    def _are_headers(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _TOKEN.fullmatch(name) or not text.isprintable() or not text.isascii():
                raise ValueError(f"{name}: {text!r} is no header")
        return value


class Route(_Table):
    """One ``[[route]]``: to which requests it applies, and what holds for them."""

    name: str = ""
    host: list[str]
    methods: list[str] | None = None
    path: list[str] = ["**"]
    match_headers: list[str] = []
    match_body: list[PredicateTable] = []
    effect: EffectName
    repeatable_except: list[PredicateTable] = []
    kind: Kind = ""
    key: KeyTable | None = None
    ignore: list[str] = []
    dialect: Dialect | None = None
    protocol: Protocol | None = None
    stores_errors: bool = False
    in_flight: list[int] = []
    not_processed: list[int] = []
    secret_query: list[str] = []
    assumed_response: AssumedTable | None = None

    @field_validator("host", "path", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("host", "path", "methods")
    @classmethod
    def _at_least_one(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not value:
            raise ValueError("an empty list matches nothing")
        return value

    @field_validator("host")
    @classmethod
    def _is_host(cls, value: list[str]) -> list[str]:
        for text in value:
            host_pattern(text)
        return value

    @field_validator("path")
    @classmethod
    def _is_path(cls, value: list[str]) -> list[str]:
        for text in value:
            if not text.startswith(("/", "*")) or "?" in text or "#" in text:
                raise ValueError(f"{text!r} is no path: it starts with '/' and has no query")
        return value

    @field_validator("methods")
    @classmethod
    def _are_methods(cls, value: list[str] | None) -> list[str] | None:
        for text in value or ():
            if not _TOKEN.fullmatch(text) or text != text.upper():
                raise ValueError(f"{text!r} is no method: write {text.upper()!r}")
        return value

    @field_validator("match_headers")
    @classmethod
    def _are_names(cls, value: list[str]) -> list[str]:
        for text in value:
            if not _TOKEN.fullmatch(text) or "*" in text.removesuffix("*") or text == "*":
                raise ValueError(f"{text!r} is no header's name: write mcp-session-id, or mcp-* for all that begin so")
        return value

    @field_validator("ignore")
    @classmethod
    def _are_fields(cls, value: list[str]) -> list[str]:
        fields.compile_ignore(tuple(value))
        return value

    @field_validator("in_flight", "not_processed")
    @classmethod
    def _are_errors(cls, value: list[int]) -> list[int]:
        for status in value:
            if not 400 <= status <= 599:
                raise ValueError(f"{status} is no status of an error (400 to 599)")
        return value

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Route:
        if self.effect == "tunnel" and (unseen := sorted(self.model_fields_set - _OF_TUNNEL)):
            raise ValueError(
                f"field {unseen[0]!r} is of no use to effect = 'tunnel': a blind tunnel shows its host, and no method, "
                "path or body"
            )
        if self.key is not None and self.effect not in {"idempotent", "at_most_once"}:
            raise ValueError(f"a key is of no use to effect = {self.effect!r}: write 'idempotent'")
        if self.protocol is not None and self.dialect is not None:
            raise ValueError("'protocol' and 'dialect' exclude each other")
        if self.repeatable_except and self.effect != "repeatable":
            raise ValueError(f"'repeatable_except' is of no use to effect = {self.effect!r}")
        return self


class HeadersTable(_Table):
    """``[headers]`` of the built-in file, see there."""

    compared: list[str]
    noise: list[str]
    retry_count: list[str]
    retry_id: list[str]


def read_route(table: Any, number: int, origin: str) -> Route:
    """Check one table. UsageError names *origin*, the route's *number* and the field."""
    try:
        return Route.model_validate(table)
    except ValidationError as error:
        raise UsageError(f"{origin}: route {number}{_hint(table)}: {_words(error)}") from None


def _hint(table: Any) -> str:
    name = (table.get("name") or table.get("host")) if isinstance(table, dict) else None
    return f" ({name})" if isinstance(name, str) else ""


def _words(error: ValidationError) -> str:
    first = error.errors()[0]
    place = first["loc"]
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".")
    if first["type"] == "extra_forbidden":
        known = _known(place)
        near = difflib.get_close_matches(str(place[-1]), known, 1)
        return f"unknown field {where!r}; " + (f"is {near[0]!r} meant?" if near else f"there are {', '.join(known)}")
    if first["type"] == "missing":
        return f"field {where!r} is missing"
    if first["type"] == "value_error":
        return (f"field {where!r}: " if where else "") + str(first["ctx"]["error"])
    if first["type"] == "literal_error":
        return f"field {where!r}: {first['input']!r} is unknown, there are {first['ctx']['expected']}"
    return f"field {where!r}: {first['msg']} (got {first['input']!r})"


def _known(place: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Route
    for step in place[:-1]:
        if isinstance(step, str) and step in model.model_fields:
            within = [model.model_fields[step].annotation]
            while within:
                kind = within.pop()
                within += get_args(kind)
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    model = kind
    return [field.alias or name for name, field in model.model_fields.items()]


def host_pattern(text: str) -> tuple[re.Pattern[str], int | None]:
    """``name``, ``name:port``, ``[::1]:port``; ``*`` in the name stands for any characters. ValueError in words."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]/:@?#\s]+))(?::([0-9]{1,5}|\*))?", text)
    if match is None and re.fullmatch(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*", text):
        match = re.fullmatch(r"(.+)()()", text)
    if match is None:
        raise ValueError(f"{text!r} is no host: write a name, or name:port, without scheme and path")
    name = (match[1] or match[2]).lower().rstrip(".") or "."
    port = None if match[3] in {None, "", "*"} else int(match[3])
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"{text!r}: there is no port {port}")
    return re.compile(".*".join(re.escape(piece) for piece in name.split("*"))), port


def path_pattern(text: str) -> re.Pattern[str]:
    """``*`` stands for one segment or a part of one, ``**`` for anything, ``/**/`` also for ``/``."""
    pattern = ""
    for token in _GLOB.finditer(text):
        pattern += _GLOB_MEANS.get(token.lastgroup or "") or re.escape(token[0])
    return re.compile(pattern, re.DOTALL)


_GLOB = re.compile(r"(?P<between>/\*\*(?=/))|(?P<anything>\*\*)|(?P<segment>(?<=/)\*(?=/|$))|(?P<piece>\*)|/|[^*/]+")
_GLOB_MEANS = {"between": "(?:/.*)?", "anything": ".*", "segment": "[^/]+", "piece": "[^/]*"}
