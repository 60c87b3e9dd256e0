"""The OpenAPI document as one HTML page without scripts or external resources."""

import json
from html import escape
from typing import Any

Json = dict[str, Any]

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{margin-bottom:0}h2{text-transform:capitalize;border-bottom:1px solid #ccc;margin-top:2rem}
summary{cursor:pointer;padding:.3rem 0}code{background:#f2f2f2;padding:.1rem .3rem}
b{display:inline-block;width:4.5rem;color:#06c}table{border-collapse:collapse;margin:.5rem 0 1rem}
td,th{text-align:left;padding:.15rem .8rem .15rem 0;border-bottom:1px solid #eee;vertical-align:top}
pre{background:#f2f2f2;padding:.6rem;overflow:auto}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}code,pre{background:#2a2a2a}
td,th{border-color:#333}b{color:#6af}a{color:#6af}}
"""
_SHAPES = ("anyOf", "oneOf")


def render(document: Json) -> str:
    """The HTML page of a document made by `gateway.web.openapi.describe`."""
    info = document["info"]
    sections = "".join(
        f"<h2>{escape(tag)}</h2>{''.join(operations)}"
        for tag, operations in _by_tag(document).items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(info['title'])}</title><style>{STYLE}</style>"
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>"
        f"<p>{escape(info['description'])} "
        '<a href="openapi.json">openapi.json</a></p>'
        f"{sections}</html>"
    )


def _by_tag(document: Json) -> dict[str, list[str]]:
    tags: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            section = _operation(path, method, operation, document["components"]["schemas"])
            tags.setdefault(operation["tags"][0], []).append(section)
    return tags


def _operation(path: str, method: str, operation: Json, schemas: Json) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema")
    fields = "" if schema is None else _fields(_resolved(schema, schemas), schemas)
    media_types = ", ".join(operation["responses"]["200"]["content"])
    return (
        f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> "
        f"{escape(operation['summary'])}</summary>"
        f"<p>Responds with <code>{escape(media_types)}</code>.</p>"
        f"{fields}<pre>{escape(_curl(path, method, schema is not None))}</pre></details>"
    )


def _fields(schema: Json, schemas: Json) -> str:
    required = schema.get("required", ())
    rows = (
        f"<tr><td><code>{escape(name)}</code>{'' if name not in required else ' *'}"
        f"<td>{escape(_kind(field, schemas))}"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table><tr><th>Field<th>Type{''.join(rows)}</table>"


def _kind(schema: Json, schemas: Json) -> str:
    """A type in a few words, without null, which every optional field allows."""
    for shape in _SHAPES:
        if shape in schema:
            kinds = [_kind(each, schemas) for each in schema[shape] if each != {"type": "null"}]
            return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    if schema.get("type") == "array":
        return f"array of {_kind(schema.get('items', {}), schemas)}"
    return str(schema.get("type", "anything")) + _range(schema)


def _range(schema: Json) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}" if abs(high) < 1e15 else ""
    return "" if low is None else f", at least {low:g}"


def _resolved(schema: Json, schemas: Json) -> Json:
    name = schema.get("$ref", "").rsplit("/", 1)[-1]
    found: Json = schemas.get(name, schema)
    return found


def _curl(path: str, method: str, has_body: bool) -> str:
    line = f"curl http://127.0.0.1:8000{path}"
    if method != "get":
        line = f"curl -X {method.upper()} http://127.0.0.1:8000{path}"
    return f"{line} -H 'content-type: application/json' -d '{{…}}'" if has_body else line
