"""Make `openai_answers.json.gz` of OpenAI's OpenAPI description: the schemas of its answers.

    python tests/data/trim_openai.py openapi.json

`openapi.json` is the description that OpenAI publishes (github.com/openai/openai-openapi, MIT) in
JSON. Kept is what `ROOTS` reach, without what only explains; OpenAPI's own words become JSON
Schema's: `nullable`, the recursive reference, and `oneOf` (told apart by a field) as `anyOf`.
"""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
OUT = Path(__file__).with_name("openai_answers.json.gz")


def main(source: Path) -> None:
    """Read the description, write the extract beside this file."""
    described = json.loads(source.read_text(encoding="utf-8"))
    schemas = described["components"]["schemas"]
    names = reached(schemas, ROOTS)
    extract = {
        "source": "OpenAI's OpenAPI description (github.com/openai/openai-openapi), trimmed",
        "license": described["info"]["license"]["name"],
        "version": described["info"]["version"],
        "schemas": {name: plain(schemas[name], name) for name in sorted(names)},
    }
    packed = json.dumps(extract, separators=(",", ":"), sort_keys=True).encode()
    OUT.write_bytes(gzip.compress(packed, 9, mtime=0))


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


def plain(schema: Any, owner: str) -> Any:
    """The schema in JSON Schema's words; `owner` is the component it stands in."""
    if isinstance(schema, list):
        return [plain(part, owner) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        kept: dict[str, Any] = {"$ref": "#/$defs/" + schema["$ref"].rsplit("/", 1)[1]}
    elif "$recursiveRef" in schema:
        kept = {"$ref": f"#/$defs/{owner}"}
    else:
        kept = {
            "anyOf" if key == "oneOf" else key: _plain_value(key, value, owner)
            for key, value in schema.items()
            if key not in EXPLAINS | {"nullable"} and not key.startswith("x-")
        }
    return {"anyOf": [kept, {"type": "null"}]} if schema.get("nullable") else kept


def _plain_value(key: str, value: Any, owner: str) -> Any:
    if key == "properties":
        return {name: plain(part, owner) for name, part in value.items()}
    return value if key == "enum" else plain(value, owner)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
