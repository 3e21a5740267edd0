"""The OpenAPI document, made of the same table of routes that is served."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from dashboard.api_types import Problem
from dashboard.http import JSON, KEY_HEADER, Access, Route
from kakeya_zmq import __version__

TITLE: Final = "Kakeya Inference Network"
_KEY: Final = "apiKey"
_REF: Final = "#/components/schemas/{name}"
_PROBLEMS: Final = {
    400: "The request cannot be carried out",
    401: "The API key or a proof is missing or wrong",
    403: "No API key is configured, so nothing can be written",
    404: "What the request names does not exist",
    409: "The request contradicts what is bound already",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    421: "The host that was asked for is not this one",
    422: "A field is missing or malformed",
    429: "Too many attempts in a short time",
    503: "Too many readers at once, or the state cannot be read or written",
}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    listed = tuple(routes)
    types = [route.answer for route in listed if not isinstance(route.answer, str)]
    types += [kind for route in listed for kind in (route.body, route.query) if kind is not None]
    types.append(Problem)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = {_key(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in listed:
        path = re.sub(r"<(\w+)>", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, by_type, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": TITLE,
            "version": __version__,
            "description": "Reads are public and show aliases, coarse regions and aggregates; with the API key they show "
            "addresses and reasons too. Writes need the API key.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {_KEY: {"type": "apiKey", "in": "header", "name": KEY_HEADER}},
        },
    }


def _key(kind: Any) -> str:
    return repr(kind)


def _operation(route: Route, by_type: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    text = isinstance(route.answer, str)
    media = {route.answer: {"schema": {"type": "string"}}} if text else {JSON: {"schema": by_type[_key(route.answer)]}}
    responses: dict[str, Any] = {"200": {"description": "Done", "content": media}}
    for code in route.problems:
        responses[str(code)] = {
            "description": _PROBLEMS[code],
            "content": {JSON: {"schema": by_type[_key(Problem)]}},
        }
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}_{route.path.strip('/') or 'page'}").strip("_"),
        "summary": route.summary,
        "responses": responses,
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"<(\w+)>", route.path)
    ]
    if route.query is not None:
        fields = components[route.query.__name__]["properties"]
        parameters += [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in fields.items()]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": by_type[_key(route.body)]}}}
    if route.access in (Access.WRITE, Access.ADMIN):
        operation["security"] = [{_KEY: []}]
    elif route.access is Access.READ:
        operation["security"] = [{}, {_KEY: []}]
    return operation
