"""Make `openai_answers.json.gz` and `openai_requests.json.gz` of OpenAI's OpenAPI description.

    python -m tests.data.trim_openai openapi.json

`openapi.json` is the description that OpenAI publishes (github.com/openai/openai-openapi, MIT) in
JSON. Kept of its answers is what `ROOTS` reach, and of its requests the operations that the server
has, without what only explains. OpenAPI's own words become JSON Schema's: `nullable`, the recursive
reference, and `oneOf` (told apart by a field) as `anyOf`.
"""

import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway.web.table import ROUTES

ROOTS = (
    "Batch",
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "CreateEmbeddingResponse",
    "DeleteFileResponse",
    "ErrorResponse",
    "InputItem",
    "ListBatchesResponse",
    "ListFilesResponse",
    "ListModelsResponse",
    "Model",
    "OpenAIFile",
    "Response",
    "ResponseStreamEvent",
)
EXPLAINS = {
    "default",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "format",
    "title",
    "$recursiveAnchor",
}
DEFS, COMPONENTS = "#/$defs/", "#/components/schemas/"


def main(source: Path) -> None:
    """Read the description, write the extracts beside this file."""
    described = json.loads(source.read_text(encoding="utf-8"))
    schemas = described["components"]["schemas"]
    names = reached(schemas, ROOTS)
    origin = {
        "source": "OpenAI's OpenAPI description (github.com/openai/openai-openapi), trimmed",
        "license": described["info"]["license"]["name"],
        "version": described["info"]["version"],
    }
    answers = {name: plain(schemas[name], name, DEFS) for name in sorted(names)}
    write("openai_answers.json.gz", origin | {"schemas": answers})
    paths = {
        path: asked for path, each in described["paths"].items() if (asked := served(path, each))
    }
    needed = reached(schemas, tuple(references(paths)))
    components = {name: plain(schemas[name], name, COMPONENTS) for name in sorted(needed)}
    title = f"{origin['source']}, {origin['license']}"
    document = {"openapi": "3.1.0", "info": {"title": title, "version": origin["version"]}}
    parts = {"paths": plain(paths, "", COMPONENTS), "components": {"schemas": components}}
    write("openai_requests.json.gz", document | parts)


def write(name: str, extract: Any) -> None:
    """Write a file beside this one."""
    packed = json.dumps(extract, separators=(",", ":"), sort_keys=True).encode()
    Path(__file__).with_name(name).write_bytes(gzip.compress(packed, 9, mtime=0))


def served(path: str, methods: dict[str, Any]) -> dict[str, Any]:
    """What the operations of a path take, of those that the server has."""
    ours = {(route.method, re.sub(r"{[^}]+}", "{}", route.path)) for route in ROUTES.routes}
    place = "/v1" + re.sub(r"{[^}]+}", "{}", path)
    return {
        method: {
            "operationId": operation["operationId"],
            "parameters": operation.get("parameters", []),
            **({"requestBody": operation["requestBody"]} if "requestBody" in operation else {}),
            "responses": {"200": {"description": ""}},
        }
        for method, operation in methods.items()
        if (method.upper(), place) in ours
    }


def reached(schemas: dict[str, Any], roots: tuple[str, ...]) -> set[str]:
    """The roots and whatever they refer to."""
    found: set[str] = set()
    left = list(roots)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left.extend(references(schemas[name]))
    return found


def references(schema: Any) -> Iterator[str]:
    """The names that a schema refers to."""
    if isinstance(schema, dict):
        if isinstance(target := schema.get("$ref"), str):
            yield target.rsplit("/", 1)[1]
        for part in schema.values():
            yield from references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from references(part)


def plain(schema: Any, owner: str, place: str) -> Any:
    """The schema in JSON Schema's words; `owner` is the component it stands in, and `place` where
    components are."""
    if isinstance(schema, list):
        return [plain(part, owner, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        kept: dict[str, Any] = {"$ref": place + schema["$ref"].rsplit("/", 1)[1]}
    elif "$recursiveRef" in schema:
        kept = {"$ref": place + owner}
    else:
        kept = {
            "anyOf" if key == "oneOf" else key: _plain_value(key, value, owner, place)
            for key, value in schema.items()
            if (key not in EXPLAINS | {"nullable"} or value == "binary")
            and not key.startswith("x-")
        }
    return {"anyOf": [kept, {"type": "null"}]} if schema.get("nullable") else kept


def _plain_value(key: str, value: Any, owner: str, place: str) -> Any:
    if key == "properties":
        return {name: plain(part, owner, place) for name, part in value.items()}
    return value if key == "enum" else plain(value, owner, place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
