"""Random JSON schemas: every keyword that APIs and tools use, nested, and each one satisfiable."""

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

WORDS = ("id", "name", "größe", "tags", "unit price", "kind", "ok", "x", 'the "end"', "créé", "n")
PATTERNS = (r"^[a-z]{2,5}$", r"^\d{3}-\d{2}$", r"^(GET|PUT) /[a-z]*$", r"^#[0-9a-f]{6}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
MAX_DEPTH = 3


def random_schemas(count: int, seed: int) -> list[Schema]:
    """`count` schemas; the same ones for the same seed."""
    return [random_schema(Random(f"{seed}/{number}")) for number in range(count)]


def random_schema(rng: Random) -> Schema:
    """One schema; one in eight is recursive."""
    if rng.random() < 0.125:
        return _recursive(rng)
    return _any(rng, MAX_DEPTH)


def _any(rng: Random, depth: int) -> Schema:
    leaves: list[Callable[[Random], Schema]] = [_text, _text, _integer, _number, _choice, _constant]
    inner: list[Callable[[Random, int], Schema]] = [_object, _object, _object, _array, _union]
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(leaves)(rng)
    return rng.choice(inner)(rng, depth - 1)


def _text(rng: Random) -> Schema:
    match rng.randrange(4):
        case 0:
            least = rng.randrange(4)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(12)}
        case 1:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case 2:
            return {"type": "string", "format": rng.choice(FORMATS)}
    return {"type": "string"}


def _integer(rng: Random) -> Schema:
    schema: Schema = {"type": "integer"}
    low = rng.randrange(-200, 200)
    if rng.random() < 0.6:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randrange(2, 10_000)
    if rng.random() < 0.1:
        return {"type": "integer", "multipleOf": rng.choice([2, 5, 10])}
    return schema


def _number(rng: Random) -> Schema:
    if rng.random() < 0.5:
        return {"type": "number"}
    low = round(rng.uniform(-50, 50), 2)
    return {"type": "number", "minimum": low, "maximum": low + rng.randrange(1, 500)}


def _choice(rng: Random) -> Schema:
    values: list[object] = [*WORDS, 0, -1, 2.5, True, None, ["a", 1], {"deep": {"er": []}}]
    return {"enum": rng.sample(values, rng.randrange(1, 6))}


def _constant(rng: Random) -> Schema:
    return {"const": rng.choice([*WORDS, 17, None, False])} if rng.random() < 0.7 else {
        "type": rng.choice(["boolean", "null"])
    }  # fmt: skip


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randrange(1, 5))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
    }
    more = rng.random()
    if more < 0.75:
        schema["additionalProperties"] = False
    elif more < 0.85:
        schema["additionalProperties"] = _integer(rng)
    return schema


def _array(rng: Random, depth: int) -> Schema:
    if rng.random() < 0.2:
        parts = [_any(rng, depth) for _ in range(rng.randrange(1, 4))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    schema: Schema = {"type": "array", "items": _any(rng, depth)}
    least = rng.randrange(3)
    if rng.random() < 0.8:
        schema |= {"minItems": least, "maxItems": least + rng.randrange(1, 4)}
    return schema


def _union(rng: Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        kinds = rng.sample(["string", "integer", "boolean", "null", "number"], 2)
        return {"type": kinds}
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randrange(2, 4))]}


def _recursive(rng: Random) -> Schema:
    """A tree whose nodes have a value and few children."""
    node: Schema = {
        "type": "object",
        "properties": {
            "value": _any(rng, 0),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
