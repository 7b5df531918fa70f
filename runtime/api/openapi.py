"""The OpenAPI 3.1 document, made from the declared routes and nothing else."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from runtime.api import problems
from runtime.api.answers import ProblemBody
from runtime.api.models import AtMost
from runtime.api.routes import Route
from runtime.settings import Settings

Schemas = dict[Any, Any]

REF = "#/components/schemas/{model}"
#: What any operation may answer; the others say theirs.
ALWAYS = (400, 403, 500, 503)

INTRODUCTION = """\
Runs of agents: started once under a key, steered, and shown.

Every request but those for this document, its page and `/healthz` needs `Authorization: Bearer KEY`; `twiceshy api
--show` prints the key and the address. What is no success is answered as `application/problem+json`.
"""


def document(routes: Sequence[Route], settings: Settings, version: str) -> dict[str, Any]:
    """The whole of it."""
    answered: set[type[BaseModel]] = {
        model for route in routes for model in route.answers.values() if not isinstance(model, str)
    }
    asked = {model for route in routes if (model := route.model("body")) is not None}
    wanted: list[tuple[Any, Any]] = [(model, "validation") for model in sorted(asked, key=_name)]
    wanted += [(model, "serialization") for model in sorted(answered | {ProblemBody}, key=_name)]
    named, schemas = models_json_schema(wanted, ref_template=REF)
    schema_of: Schemas = {model: schema for (model, _), schema in named.items()}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of, settings, routes)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "twiceshy",
            "version": version,
            "description": INTRODUCTION,
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}),
            "responses": {
                str(status): {
                    "description": meaning,
                    "content": {problems.MEDIA_TYPE: {"schema": schema_of[ProblemBody]}},
                }
                for status, meaning in problems.MEANINGS.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes)],
    }


def _name(model: type[BaseModel]) -> str:
    return model.__name__


def _operation(route: Route, schema_of: Schemas, settings: Settings, routes: Sequence[Route]) -> dict[str, Any]:
    summary, rest = route.words
    found: dict[str, Any] = {"operationId": route.name, "summary": summary, "tags": [route.tag]}
    if rest:
        found["description"] = rest
    if route.keyless:
        found["security"] = []
    parameters = [
        *_parameters(route.model("path"), "path", settings),
        *_parameters(route.model("query"), "query", settings),
        *_parameters(route.model("headers"), "header", settings),
    ]
    if parameters:
        found["parameters"] = parameters
    body = route.model("body")
    if body is not None:
        needed = any(info.is_required() for info in body.model_fields.values())
        found["requestBody"] = {"required": needed, "content": {"application/json": {"schema": schema_of[body]}}}
    found["responses"] = {
        str(status): _response(status, model, schema_of) | _links(route, routes)
        for status, model in sorted(route.answers.items())
    } | {
        str(status): {"$ref": f"#/components/responses/{status}"}
        for status in sorted({*ALWAYS, *route.problems, *_more(route)})
    }
    return found


def _links(route: Route, routes: Sequence[Route]) -> dict[str, Any]:
    """To the operations whose paths take what *route* answers."""
    found = {
        each.name: {
            "operationId": each.name,
            "parameters": {name: f"$response.body#{route.gives[name]}" for name in names},
        }
        for each in routes
        if (names := set(re.findall(r"\{(\w+)\}", each.path))) and names <= route.gives.keys()
    }
    return {"links": found} if found else {}


def _more(route: Route) -> list[int]:
    found = [] if route.keyless else [401, 422]
    return found + ([408, 413, 415] if route.method == "POST" else [])


def _response(status: int, model: type[BaseModel] | str, schema_of: Schemas) -> dict[str, Any]:
    if isinstance(model, str):
        return {"description": "as it is", "content": {model: {"schema": {}}}}
    meaning = " ".join((model.__doc__ or "").split())
    words = {201: "new: ", 202: "not yet: ", 409: "it was said before: "}.get(status, "")
    return {"description": words + meaning, "content": {"application/json": {"schema": schema_of[model]}}}


def _parameters(model: type[BaseModel] | None, where: str, settings: Settings) -> list[dict[str, Any]]:
    if model is None:
        return []
    schema = model.model_json_schema(ref_template=REF, mode="validation")
    found = []
    for (name, info), shown in zip(model.model_fields.items(), schema["properties"].values(), strict=True):
        inner = _plain(dict(shown), schema.get("$defs", {}))
        for limit in info.metadata:
            if isinstance(limit, AtMost):
                inner["maximum"] = getattr(settings, limit.setting)
        parameter = {"name": info.alias or name, "in": where, "required": info.is_required(), "schema": inner}
        if text := inner.pop("description", info.description):
            parameter["description"] = text
        found.append(parameter)
    return found


def _plain(schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """A parameter's schema: an absent one is no null, and what it refers to stands in it."""
    schema.pop("title", None)
    options = [option for option in schema.pop("anyOf", ()) if option != {"type": "null"}]
    if schema.get("default", ...) is None:
        del schema["default"]
    for option in options[:1]:
        schema = {**option, **schema}
    if ref := schema.pop("$ref", None):
        schema = {**defs[re.sub(r".*/", "", ref)], **schema}
        schema.pop("title", None)
    return schema
