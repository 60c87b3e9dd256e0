"""The server's OpenAPI 3.1 document, generated from the routes and their request structs."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
import orjson
from starlette.routing import compile_path

from gateway.schema.anthropic.renderer import AnthropicDialect
from gateway.schema.fields.sampling import MINIMUMS, RANGES
from gateway.version import podway_version
from gateway.web.docs_page import render
from gateway.web.route import JSON, Access, Route

Json = dict[str, Any]

FORM = "multipart/form-data"
REF = "#/components/schemas/{name}"


def _object(optional: tuple[str, ...] = (), /, **properties: Json) -> Json:
    """The schema of an object whose properties are required, other than those in `optional`."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


STRING: Json = {"type": "string"}
NULLABLE: Json = {"type": ["string", "null"]}
_ERROR = _object(error=_object(message=STRING, type=STRING, param=NULLABLE, code=NULLABLE))
_ANTHROPIC_ERROR = _object(
    ("request_id",),
    type={"const": "error"},
    error=_object(type=STRING, message=STRING),
    request_id=NULLABLE,
)


class Documents(NamedTuple):
    """The OpenAPI document as JSON, and the same as a web page."""

    json: bytes
    page: str


@cache
def documents(routes: tuple[Route, ...]) -> Documents:
    """Both documents of an app with these routes; they are made once."""
    document = describe(routes)
    return Documents(orjson.dumps(document), render(document))


def describe(routes: Iterable[Route]) -> Json:
    """The OpenAPI document of an app with these routes."""
    bodies = {route.body for route in routes if route.body is not None}
    ordered = sorted(bodies, key=lambda body: body.__qualname__)
    refs, schemas = msgspec.json.schema_components(ordered, ref_template=REF)
    for schema in schemas.values():
        _bound(schema.get("properties", {}))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Podway",
            "version": podway_version(),
            "description": "An OpenAI-compatible gateway with its own serving engine.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": _paths(routes, dict(zip(ordered, refs, strict=True))),
        "components": {
            "schemas": {**schemas, "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _paths(routes: Iterable[Route], refs: Mapping[type[msgspec.Struct], Json]) -> Json:
    paths: Json = {}
    for route in routes:
        path = compile_path(route.path)[1]
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, refs)
    return paths


def _operation(route: Route, path: str, refs: Mapping[type[msgspec.Struct], Json]) -> Json:
    error = "AnthropicError" if isinstance(route.dialect, AnthropicDialect) else "Error"
    operation: Json = {
        "operationId": _identifier(route.method, path),
        "summary": route.summary,
        "tags": [route.tag],
        "responses": {
            "200": {
                "description": "Success.",
                "content": {
                    kind: {"schema": {"type": "object"} if kind == JSON else STRING}
                    for kind in route.media_types
                },
            },
            "default": {
                "description": "Error.",
                "content": {JSON: {"schema": {"$ref": REF.format(name=error)}}},
            },
        },
    }
    if parameters := [*_parameters(path), *_query(route.query)]:
        operation["parameters"] = parameters
    if route.body is not None:
        content = {JSON: {"schema": refs[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    elif route.form:
        content = {FORM: {"schema": _form(route.form)}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.access is Access.OPEN:
        operation["security"] = []
    return operation


def _identifier(method: str, path: str) -> str:
    """For example `get_v1_models_model`; unique because method and path are."""
    words = path.replace("/", " ").replace(".", " ").replace("{", "").replace("}", "").split()
    return "_".join([method.lower(), *words])


def _parameters(path: str) -> list[Json]:
    names = [part.partition("}")[0] for part in path.split("{")[1:]]
    return [{"name": name, "in": "path", "required": True, "schema": STRING} for name in names]


def _query(names: tuple[str, ...]) -> list[Json]:
    return [{"name": name, "in": "query", "schema": STRING} for name in names]


def _form(names: tuple[str, ...]) -> Json:
    binary = STRING | {"format": "binary"}
    return _object(**{name: binary if name == "file" else STRING for name in names})


def _bound(properties: Json) -> None:
    """Add the ranges of numeric fields, which the structs do not declare."""
    for name, schema in properties.items():
        for part in schema.get("anyOf", [schema]):
            if part.get("type") not in ("integer", "number"):
                continue
            if name in RANGES:
                part["minimum"], part["maximum"] = RANGES[name]
            if name in MINIMUMS:
                part["minimum"] = MINIMUMS[name]
