"""OpenAI's own description of its answers (`tests/data/openai_answers.json.gz`), as a judge.

As strict as it gets: a field that a schema does not list may not be there. What we say beyond it
is named in `EXTENSIONS`, and where OpenAI's service differs from its description, in `PRACTICE`.
"""

import functools
import gzip
import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs

from tests.wire import anthropic_shapes

Json = dict[str, Any]

_FILE = Path(__file__).parents[1] / "data" / "openai_answers.json.gz"
_NULL: Json = {"type": "null"}
_TEXT: Json = {"type": ["string", "null"]}
_IDS: Json = {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}}
_STOP: Json = {"type": ["string", "integer"]}
_PROMPT_LOGPROBS: Json = {"type": ["array", "null"], "items": {"type": ["object", "null"]}}

_PROGRESS: Json = {  # llama.cpp's
    "type": "object",
    "required": ["total", "cache", "processed", "time_ms"],
    "properties": {
        name: {"type": "integer", "minimum": 0}
        for name in ("total", "cache", "processed", "time_ms")
    },
    "additionalProperties": False,
}

# Where: a component, then properties; `[]` is "each of them". vLLM's spelling, but for `Model`.
EXTENSIONS: dict[str, dict[str, Json]] = {
    "Model": {
        "max_model_len": {"type": ["integer", "null"], "minimum": 1},
        "task": {"enum": ["generate", "embed", "score", None]},
        "root": _TEXT,
        "parent": _TEXT,
        "status": {"type": "object", "required": ["value"]},
    },
    "CreateChatCompletionResponse": {
        "prompt_logprobs": _PROMPT_LOGPROBS,
        "prompt_token_ids": _IDS,
    },
    "CreateChatCompletionResponse.choices[]": {"token_ids": _IDS, "stop_reason": _STOP},
    "ChatCompletionResponseMessage": {"reasoning_content": _TEXT, "reasoning": _TEXT},
    "CreateChatCompletionStreamResponse": {
        "prompt_progress": _PROGRESS,
        "prompt_logprobs": _PROMPT_LOGPROBS,
        "prompt_token_ids": _IDS,
    },
    "CreateChatCompletionStreamResponse.choices[]": {"token_ids": _IDS, "stop_reason": _STOP},
    "ChatCompletionStreamResponseDelta": {"reasoning_content": _TEXT, "reasoning": _TEXT},
    "ResponseProperties": {
        "prompt_cache_diagnostics": {"type": "object"},  # in the client's types, and newer
        "store": {"type": "boolean"},  # these three in Open Responses
        "frequency_penalty": {"type": "number"},
        "presence_penalty": {"type": "number"},
    },
    "InputMessage": {"id": {"type": "string"}},  # in lists of what was asked, as OpenAI answers
    "CreateCompletionResponse": {"prompt_progress": _PROGRESS},
    "CreateCompletionResponse.choices[]": {
        "prompt_logprobs": _PROMPT_LOGPROBS,
        "prompt_token_ids": _IDS,
        "token_ids": _IDS,
        "stop_reason": _STOP,
    },
}


def _nullable(schema: Json) -> Json:
    return {"anyOf": [schema, _NULL]}


def _first_has_none(schema: Json) -> Json:
    """With `echo` nothing stands before the first token, so it has no log-probability."""
    return {**schema, "items": _nullable(schema["items"])}


PRACTICE: dict[str, Callable[[Json], Json]] = {
    "CreateCompletionResponse.choices[].logprobs.token_logprobs": _first_has_none,
    "CreateCompletionResponse.choices[].logprobs.top_logprobs": _first_has_none,
    "Embedding.embedding": lambda schema: {"anyOf": [schema, {"type": "string"}]},  # base64
    "Response.usage": _nullable,  # while it is generated
}


def _find(schemas: dict[str, Json], where: str) -> Json:
    """The schema at a place as `EXTENSIONS` names it, seen through `anyOf` with null; of several
    parts (`allOf`) the last one."""
    name, *steps = where.replace("[]", ".[]").split(".")
    schema = schemas[name]
    for step in steps:
        schema = _not_null(schema)
        schema = schema["items"] if step == "[]" else schema["properties"][step]
    return _not_null(schema)


def _not_null(schema: Json) -> Json:
    choices = [choice for choice in schema.get("anyOf", ()) if choice != _NULL]
    parts: list[Json] = choices if len(choices) == 1 else schema.get("allOf", [schema])
    return parts[-1]


def _seal(schema: Any, *, is_part: bool = False) -> None:
    """Allow no property that is not listed. A part of an `allOf` is sealed with its whole."""
    if isinstance(schema, list):
        for each in schema:
            _seal(each)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key == "properties":
            _seal(list(value.values()))
        elif key == "allOf":
            for each in value:
                _seal(each, is_part=True)
        elif key != "enum":
            _seal(value)
    is_listing = isinstance(schema.get("properties"), dict) or "allOf" in schema
    if is_listing and not is_part and "additionalProperties" not in schema:
        schema["unevaluatedProperties"] = False


@functools.cache
def _schemas() -> dict[str, Json]:
    schemas: dict[str, Json] = json.loads(gzip.decompress(_FILE.read_bytes()))["schemas"]
    for where, extra in EXTENSIONS.items():
        _find(schemas, where)["properties"].update(extra)
    for where, change in PRACTICE.items():
        place, _, name = where.rpartition(".")
        properties = _find(schemas, place)["properties"]
        properties[name] = change(properties[name])
    parts = {
        part["$ref"].rsplit("/", 1)[1]
        for schema in schemas.values()
        for part in schema.get("allOf", ())
        if "$ref" in part
    }
    for name, schema in schemas.items():
        _seal(schema, is_part=name in parts)
    schemas["EmptyModelParam"] = {"type": "object"}  # the JSON schema of a tool's parameters
    schemas["CompletionChunk"] = _completion_chunk(schemas)
    schemas["ResponseItemList"] = _list_of_items()
    return schemas


def _completion_chunk(schemas: dict[str, Json]) -> Json:
    """The description has no chunk of a streamed completion; it is a whole one, half empty."""
    chunk = deepcopy(schemas["CreateCompletionResponse"])
    chunk["properties"]["usage"] = _nullable(chunk["properties"]["usage"])
    choice = _find({"chunk": chunk}, "chunk.choices[]")["properties"]
    choice["finish_reason"] = _nullable(choice["finish_reason"])
    return chunk


def _list_of_items() -> Json:
    item = {"anyOf": [{"$ref": "#/$defs/InputItem"}, {"$ref": "#/$defs/OutputItem"}]}
    named = {"object": {"const": "list"}, "data": {"type": "array", "items": item}}
    named |= {"first_id": _TEXT, "last_id": _TEXT, "has_more": {"type": "boolean"}}
    return {
        "type": "object",
        "properties": named,
        "required": ["object", "data", "has_more"],
        "additionalProperties": False,
    }


@functools.cache
def _validator(name: str) -> jsonschema_rs.Draft202012Validator:
    schemas = _schemas()
    assert name in schemas, f"no schema {name}"
    return jsonschema_rs.Draft202012Validator({"$defs": schemas, "$ref": f"#/$defs/{name}"})


def complaints(name: str, value: object) -> list[str]:
    """What is wrong with `value` as an instance of the schema; empty if nothing is."""
    validator = _validator(name)
    if validator.is_valid(value):
        return []
    shown = json.dumps(value)[:500]
    return [
        f"{name}{''.join(f'[{part!r}]' for part in error.instance_path)}: {error.message} ({shown})"
        for error in validator.iter_errors(value)
    ]


class Shape(NamedTuple):
    """What a path answers: the schema of a body, and of a stream's chunk; "" is no schema."""

    method: str
    path: re.Pattern[str]
    whole: str
    chunk: str = ""


def _shape(method: str, path: str, whole: str, chunk: str = "") -> Shape:
    return Shape(method, re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), whole, chunk)


SHAPES = (
    _shape(
        "POST",
        "(/v1)?/chat/completions",
        "CreateChatCompletionResponse",
        "CreateChatCompletionStreamResponse",
    ),
    _shape("POST", "(/v1)?/completions", "CreateCompletionResponse", "CompletionChunk"),
    _shape("GET", "/v1/models", "ListModelsResponse"),
    Shape("GET", re.compile("/v1/models/.+"), "Model"),
    _shape("POST", "(/v1)?/embeddings", "CreateEmbeddingResponse"),
    _shape("POST", "/v1/decisions", ""),  # not in the description yet
    _shape("POST", "/v1/files", "OpenAIFile"),
    _shape("GET", "/v1/files", "ListFilesResponse"),
    _shape("GET", "/v1/files/{id}", "OpenAIFile"),
    _shape("DELETE", "/v1/files/{id}", "DeleteFileResponse"),
    _shape("GET", "/v1/files/{id}/content", ""),
    _shape("POST", "/v1/batches", "Batch"),
    _shape("GET", "/v1/batches", "ListBatchesResponse"),
    _shape("GET", "/v1/batches/{id}", "Batch"),
    _shape("POST", "/v1/batches/{id}/cancel", "Batch"),
    _shape("POST", "/v1/responses", "Response", "ResponseStreamEvent"),
    _shape("POST", "/v1/responses/input_tokens", ""),
    _shape("POST", "/v1/responses/compact", ""),
    _shape("GET", "/v1/responses/{id}", "Response", "ResponseStreamEvent"),
    _shape("DELETE", "/v1/responses/{id}", ""),
    _shape("POST", "/v1/responses/{id}/cancel", "Response"),
    _shape("GET", "/v1/responses/{id}/input_items", "ResponseItemList"),
    *(  # not in the description; checked by the client's types
        Shape(method, re.compile(r"/v1/conversations(/[^/]+(/items(/[^/]+)?)?)?"), "")
        for method in ("GET", "POST", "DELETE")
    ),
)
# What OpenAI does not have, or not in this form.
OURS = re.compile(
    r"/(health|ready|infill|models(/(load|unload|sse))?|v1/loads|(v1/)?score|(v[12]/)?rerank|v1/systemone)"
    r"|/(metrics|version|docs|openapi\.json)|/admin/.+|(/v1)?/(de)?tokenize"
    r"|/v1/(un)?load_lora_adapter|/v1/streams?(/.+)?"
    r"|/v1/(chat/)?completions/(render|[^/]+/cancel)|/v1/requests/.+|/v1/messages(/.+)?"
)


def shape_of(method: str, path: str) -> Shape | None:
    """What is described for this path."""
    matches = (s for s in SHAPES if s.method == method and s.path.fullmatch(path))
    return next(matches, None)


def whole_complaints(method: str, path: str, status: int, body: object) -> list[str]:
    """What is wrong with a JSON answer."""
    if path.startswith(anthropic_shapes.MESSAGES):
        return anthropic_shapes.whole_complaints(path, status, body)
    if status >= 400:
        return complaints("ErrorResponse", body)
    shape = shape_of(method, path)
    if shape is None:
        known = OURS.fullmatch(path) is not None
        return (
            []
            if known
            else [f"{method} {path}: no shape is named for it in tests/wire/openai_shapes.py"]
        )
    return complaints(shape.whole, body) if shape.whole else []


def chunk_complaints(method: str, path: str, chunk: object) -> list[str]:
    """What is wrong with the data of one server-sent event; an error may come at any time."""
    if path.startswith(anthropic_shapes.MESSAGES):
        return anthropic_shapes.chunk_complaints(chunk)
    shape = shape_of(method, path)
    if shape is None or chunk == "DONE":
        return []
    if isinstance(chunk, dict) and "error" in chunk and "id" not in chunk:
        return complaints("ErrorResponse", chunk)
    return complaints(shape.chunk, chunk)
