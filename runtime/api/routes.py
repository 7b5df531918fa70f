"""What the API has, declared once: method and path, what is asked for, what is answered.

A handler is a coroutine function ``(call, path=…, query=…, headers=…, body=…)``: which of these four it takes, and of
which model, its annotations say. From these come the checks here and the document in ``openapi``.
"""

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from runtime.api.models import AtMost
from runtime.api.problems import Problem, misfits
from runtime.settings import Settings

#: Where a handler's argument comes from.
PLACES = ("path", "query", "headers", "body")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a handler returns: a model, or what ``json_text.encode`` takes."""

    content: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


#: An answer, or a response that was sent already (a stream, a page).
Handler = Callable[..., Awaitable[Answer | web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. *answers*: by status, the model of the body, or its media type. *problems*: statuses besides.

    *gives*: where in the answer is what other operations take in their paths, by the name that it has there.
    """

    method: str
    path: str
    handler: Handler
    answers: Mapping[int, type[BaseModel] | str]
    problems: Sequence[int] = ()
    tag: str = "runs"
    keyless: bool = False
    gives: Mapping[str, str] = field(default_factory=dict)

    def model(self, place: str) -> type[BaseModel] | None:
        """Of what comes in *place*; None: nothing does."""
        return _hints(self.handler).get(place)

    @property
    def name(self) -> str:
        """Of the operation, for clients that are made from the document."""
        return getattr(self.handler, "__name__", "")

    @property
    def words(self) -> tuple[str, str]:
        """Its summary, and all that is to be said."""
        text = inspect.getdoc(self.handler) or ""
        summary, _, rest = text.partition("\n\n")
        return " ".join(summary.split()), rest

    def arguments(self, place_values: Mapping[str, Any], settings: Settings) -> dict[str, BaseModel]:
        """The handler's arguments out of what came. Raises Problem."""
        found = {}
        for place in PLACES:
            model = self.model(place)
            if model is None:
                continue
            try:
                found[place] = model.model_validate(place_values[place])
            except ValidationError as error:
                raise misfits(place, error.errors(include_url=False, include_context=False)) from None
            _check_limits(place, found[place], settings)
        return found


@functools.cache
def _hints(handler: Handler) -> dict[str, Any]:
    return typing.get_type_hints(handler)


def _check_limits(place: str, given: BaseModel, settings: Settings) -> None:
    for name, info in type(given).model_fields.items():
        for limit in info.metadata:
            if isinstance(limit, AtMost) and getattr(given, name) > (most := getattr(settings, limit.setting)):
                raise Problem(422, f"{place}.{name}: {getattr(given, name)} is more than {limit.setting} ({most})")


def query_values(model: type[BaseModel] | None, query: Any) -> dict[str, Any]:
    """What an address says behind its question mark. Raises Problem where a name comes twice that stands for one."""
    fields = {} if model is None else model.model_fields
    values: dict[str, Any] = {}
    for name in dict.fromkeys(query):
        all_ = query.getall(name)
        if name in fields and typing.get_origin(fields[name].annotation) is list:
            values[name] = all_
        elif len(all_) > 1:
            raise Problem(422, f"query.{name[:100]}: it is given {len(all_)} times")
        else:
            values[name] = all_[0]
    if model is None and values:
        raise Problem(422, f"query: {', '.join(values)[:200]}: nothing is asked for here")
    return values


def header_values(model: type[BaseModel] | None, headers: Any) -> dict[str, Any]:
    """The headers that *model* names."""
    names = [] if model is None else [str(info.alias) for info in model.model_fields.values()]
    return {name: headers[name] for name in names if name in headers}


class Routes:
    """The operations of one module."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.all: list[Route] = []

    def add(
        self,
        method: str,
        path: str,
        answers: Mapping[int, type[BaseModel] | str],
        *,
        problems: Sequence[int] = (),
        keyless: bool = False,
        gives: Mapping[str, str] | None = None,
    ) -> Callable[[Handler], Handler]:
        """Declare the operation that a handler does."""

        def declare(handler: Handler) -> Handler:
            self.all.append(Route(method, path, handler, answers, problems, self.tag, keyless, gives or {}))
            return handler

        return declare
