"""OpenAI's own description of its answers, as a checker (`tests/data/openai_answers.json`).

As strict as it gets: what a schema does not list may not be there.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent.parent / "data" / "openai_answers.json"
SCHEMAS: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))["schemas"]
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
    "number": (int, float),
    "integer": int,
    "null": type(None),
}


def complaints(name: str, value: object) -> list[str]:
    """What is wrong with `value` as an instance of the schema; empty if nothing is."""
    return list(_check(SCHEMAS[name], value, name))


def _check(schema: Mapping[str, Any], value: object, path: str) -> Iterator[str]:
    if value is None and schema.get("nullable"):
        return
    if "$ref" in schema:
        yield from _check(SCHEMAS[schema["$ref"].rsplit("/", 1)[1]], value, path)
        return
    for choice in ("anyOf", "oneOf"):
        if choice in schema and all(list(_check(s, value, path)) for s in schema[choice]):
            yield f"{path}: {value!r} is none of the choices"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not in {schema['enum']}"
    if "type" in schema and not _is(schema["type"], value):
        yield f"{path}: {value!r} is not of type {schema['type']}"
    elif isinstance(value, dict):
        yield from _check_object(schema, value, path)
    elif isinstance(value, list):
        yield from _check_items(schema.get("items", {}), value, path)


def _check_items(schema: Mapping[str, Any], items: list[Any], path: str) -> Iterator[str]:
    for i, item in enumerate(items):
        yield from _check(schema, item, f"{path}[{i}]")


def _check_object(schema: Mapping[str, Any], value: dict[str, Any], path: str) -> Iterator[str]:
    known = schema.get("properties")
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}: {name} is missing"
    for name, item in value.items():
        if known is None:
            yield from _check(schema.get("additionalProperties", {}), item, f"{path}.{name}")
        elif name not in known:
            yield f"{path}: {name} is not in the description"
        else:
            yield from _check(known[name], item, f"{path}.{name}")


def _is(kind: str, value: object) -> bool:
    is_misread = isinstance(value, bool) and kind in ("number", "integer")
    return isinstance(value, _TYPES[kind]) and not is_misread
