"""The server's OpenAPI 3.1 document, generated from the routes and their request structs.

Each endpoint has one entry in `OPERATIONS`; a route without an entry is listed with a body of any
type.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gateway.schema.anthropic.request import AnthropicRequest
from gateway.schema.fields.sampling import MINIMUMS, RANGES
from gateway.schema.openai.batches import BatchRequest
from gateway.schema.openai.chat import ChatRequest
from gateway.schema.openai.completions import CompletionRequest
from gateway.schema.openai.embeddings import EmbeddingRequest
from gateway.schema.openai.scoring import RerankRequest, ScoreRequest
from gateway.schema.openai.tokens import DetokenizeRequest, TokenizeRequest
from gateway.schema.responses.request import ResponseRequest
from gateway.version import podway_version
from gateway.web.routes.operations.admin import PolicyChoice
from gateway.web.routes.operations.loras import LoadLoraRequest, UnloadLoraRequest

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

Json = dict[str, Any]

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"
FORM = "multipart/form-data"
PAGING = ("after", "limit", "order")
REF = "#/components/schemas/{name}"
UNGUARDED = frozenset({"/health", "/ready"})


class Operation(NamedTuple):
    """The description of a route; `body` is the struct that decodes its request."""

    tag: str
    summary: str
    body: type[msgspec.Struct] | None = None
    media_types: tuple[str, ...] = (JSON,)  # of the response
    query: tuple[str, ...] = ()
    form: tuple[str, ...] = ()  # parts of a multipart body, all required; `file` is a file


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "text", "The next message of a conversation.", ChatRequest, (JSON, EVENTS)
    ),
    ("POST", "/v1/completions"): Operation(
        "text", "The continuation of a prompt.", CompletionRequest, (JSON, EVENTS)
    ),
    ("POST", "/v1/chat/completions/render"): Operation(
        "text", "The rendered prompt of a conversation, as text and token ids.", ChatRequest
    ),
    ("POST", "/tokenize"): Operation("text", "The token ids of a text.", TokenizeRequest),
    ("POST", "/detokenize"): Operation("text", "The text of token ids.", DetokenizeRequest),
    ("GET", "/v1/models"): Operation("models", "The models of this server."),
    ("GET", "/v1/models/{model}"): Operation("models", "One model."),
    ("POST", "/v1/files"): Operation("batches", "Upload a file.", form=("purpose", "file")),
    ("GET", "/v1/files"): Operation("batches", "Your files.", query=(*PAGING, "purpose")),
    ("GET", "/v1/files/{file_id}"): Operation("batches", "The metadata of a file."),
    ("DELETE", "/v1/files/{file_id}"): Operation("batches", "Delete a file."),
    ("GET", "/v1/files/{file_id}/content"): Operation(
        "batches", "The content of a file.", media_types=("application/octet-stream",)
    ),
    ("POST", "/v1/batches"): Operation("batches", "Run a file of requests.", BatchRequest),
    ("GET", "/v1/batches"): Operation("batches", "Your batches.", query=PAGING),
    ("GET", "/v1/batches/{batch_id}"): Operation("batches", "The status of a batch."),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation("batches", "Cancel a batch."),
    ("POST", "/v1/embeddings"): Operation("pooling", "The embeddings of texts.", EmbeddingRequest),
    **{
        ("POST", path): Operation("pooling", "The scores of pairs of texts.", ScoreRequest)
        for path in ("/score", "/v1/score")
    },
    **{
        ("POST", path): Operation(
            "pooling", "Documents by their relevance to a query.", RerankRequest
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    },
    ("POST", "/v1/messages"): Operation(
        "messages",
        "The next message, in the format of Anthropic's API.",
        AnthropicRequest,
        (JSON, EVENTS),
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "messages", "The number of tokens of a prompt.", AnthropicRequest
    ),
    ("POST", "/v1/responses"): Operation(
        "responses", "The next items of a conversation.", ResponseRequest, (JSON, EVENTS)
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        "responses", "The number of tokens of a prompt.", ResponseRequest
    ),
    ("POST", "/v1/responses/compact"): Operation(
        "responses", "Rejected: compaction is not supported."
    ),
    ("GET", "/v1/responses/{response_id}"): Operation("responses", "A stored response."),
    ("DELETE", "/v1/responses/{response_id}"): Operation("responses", "Delete a stored response."),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        "responses", "Cancel a response in progress."
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        "responses", "The input items of a response.", query=PAGING
    ),
    ("POST", "/v1/requests/{request_id}/cancel"): Operation(
        "requests", "Cancel a running request by its x-request-id."
    ),
    ("GET", "/v1/requests/{request_id}/timeline"): Operation(
        "requests", "The phases of a request, and what cost it the most time."
    ),
    ("GET", "/"): Operation(
        "operation", "The web page, or a short text.", media_types=("text/html", TEXT)
    ),
    ("GET", "/page/{name}"): Operation(
        "operation",
        "A file of the web page.",
        media_types=("text/javascript", "text/css", "text/html", "image/svg+xml", TEXT),
    ),
    ("GET", "/admin/live"): Operation(
        "operation", "The engine's live state, ten events a second.", media_types=(EVENTS,)
    ),
    ("POST", "/admin/simulate"): Operation(
        "operation",
        "A recording under another policy, in virtual time.",
        media_types=("application/jsonl",),
    ),
    ("GET", "/admin/policy"): Operation("operation", "The scheduling policy."),
    ("POST", "/admin/policy"): Operation(
        "operation", "Change the scheduling policy while serving.", PolicyChoice
    ),
    ("POST", "/v1/load_lora_adapter"): Operation(
        "operation", "Load a LoRA adapter.", LoadLoraRequest, (TEXT,)
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        "operation", "Unload a LoRA adapter.", UnloadLoraRequest, (TEXT,)
    ),
    ("GET", "/health"): Operation("operation", "Liveness."),
    ("GET", "/v1/loads"): Operation("operation", "Load, for routers, in SGLang's format."),
    ("GET", "/ready"): Operation("operation", "Readiness."),
    ("GET", "/metrics"): Operation(
        "operation", "Metrics in the Prometheus text format.", media_types=(TEXT,)
    ),
    ("GET", "/openapi.json"): Operation("operation", "This document."),
    ("GET", "/docs"): Operation(
        "operation", "This document as a web page.", media_types=("text/html",)
    ),
}

_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ANTHROPIC_ERROR: Json = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
        "request_id": {"type": ["string", "null"]},
    },
    "required": ["type", "error"],
}


def describe(routes: "Iterable[BaseRoute]") -> Json:
    """The document of an app with these routes."""
    bodies = {operation.body for operation in OPERATIONS.values() if operation.body is not None}
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


def _paths(routes: "Iterable[BaseRoute]", refs: Mapping[type[msgspec.Struct], Json]) -> Json:
    paths: Json = {}
    for route in routes:
        path = getattr(route, "path_format", None)
        if path is None:
            continue
        for method in sorted(getattr(route, "methods", None) or ()):
            if method != "HEAD":
                paths.setdefault(path, {})[method.lower()] = _operation(method, path, refs)
    return paths


def _operation(method: str, path: str, refs: Mapping[type[msgspec.Struct], Json]) -> Json:
    about = OPERATIONS.get((method, path), Operation("more", f"{method} {path}"))
    error = "AnthropicError" if about.tag == "messages" else "Error"
    operation: Json = {
        "operationId": _identifier(method, path),
        "summary": about.summary,
        "tags": [about.tag],
        "responses": {
            "200": {
                "description": "Success.",
                "content": {kind: {"schema": _response_schema(kind)} for kind in about.media_types},
            },
            "default": {
                "description": "Error.",
                "content": {JSON: {"schema": {"$ref": REF.format(name=error)}}},
            },
        },
    }
    if parameters := [*_parameters(path), *_query(about.query)]:
        operation["parameters"] = parameters
    if about.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": refs[about.body]}},
        }
    elif about.form:
        operation["requestBody"] = {
            "required": True,
            "content": {FORM: {"schema": _form(about.form)}},
        }
    elif method == "POST" and (method, path) not in OPERATIONS:
        operation["requestBody"] = {"content": {"*/*": {"schema": {}}}}
    if path in UNGUARDED:
        operation["security"] = []
    return operation


def _identifier(method: str, path: str) -> str:
    """For example `get_v1_models_model`; unique because method and path are."""
    words = path.replace("/", " ").replace(".", " ").replace("{", "").replace("}", "").split()
    return "_".join([method.lower(), *words])


def _response_schema(kind: str) -> Json:
    return {"type": "object"} if kind == JSON else {"type": "string"}


def _parameters(path: str) -> list[Json]:
    names = [part.partition("}")[0] for part in path.split("{")[1:]]
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]


def _query(names: tuple[str, ...]) -> list[Json]:
    return [{"name": name, "in": "query", "schema": {"type": "string"}} for name in names]


def _form(names: tuple[str, ...]) -> Json:
    parts = {
        name: {"type": "string", **({"format": "binary"} if name == "file" else {})}
        for name in names
    }
    return {"type": "object", "properties": parts, "required": list(names)}


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
