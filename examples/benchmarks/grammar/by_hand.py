"""Typical schemas, and keywords that are hard to enforce."""

from typing import Any

Schema = dict[str, Any]


def record(**properties: Schema) -> Schema:
    """An object of exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer"}
BY_HAND: dict[str, Schema] = {
    "any value": {},
    "any object": {"type": "object"},
    "sentiment": record(label={"enum": ["good", "bad", "neutral"]}, score={"type": "number"}),
    "person": record(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}, email=TEXT),
    "calendar event": record(
        title=TEXT,
        day={"type": "string", "format": "date"},
        people={"type": "array", "items": TEXT},
    ),
    "weather tool": record(city=TEXT, unit={"type": ["string", "null"], "enum": ["c", "f", None]}),
    "steps of reasoning": record(
        steps={"type": "array", "items": record(explanation=TEXT, output=TEXT)}, answer=TEXT
    ),
    "user interface": {
        "$defs": {
            "part": record(
                type={"enum": ["div", "button", "field"]},
                label=TEXT,
                children={"type": "array", "items": {"$ref": "#/$defs/part"}},
            )
        },
        "$ref": "#/$defs/part",
    },
    "linked list": {
        "$defs": {
            "cell": record(
                value=COUNT, next={"anyOf": [{"$ref": "#/$defs/cell"}, {"type": "null"}]}
            )
        },
        "$ref": "#/$defs/cell",
    },
    "either of two records": {"anyOf": [record(a=COUNT), record(b=TEXT)]},
    "one of two records": {"oneOf": [record(a=COUNT), record(b=TEXT)]},
    "all of two": {
        "allOf": [
            {"type": "object", "properties": {"a": COUNT}, "required": ["a"]},
            {"properties": {"b": TEXT}, "required": ["b"]},
        ]
    },
    "map of numbers": {"type": "object", "additionalProperties": {"type": "number"}},
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^x_": COUNT},
        "additionalProperties": False,
    },
    "bounded text": {"type": "string", "minLength": 2, "maxLength": 40},
    "pattern": {"type": "string", "pattern": r"^[A-Z]{2}\d{4}$"},
    "pattern in the middle": {"type": "string", "pattern": "cat|dog"},
    "uuid": {"type": "string", "format": "uuid"},
    "unknown format": {"type": "string", "format": "nonsense"},
    "bounded number": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "multiple": {"type": "integer", "multipleOf": 7},
    "tuple": {"type": "array", "prefixItems": [TEXT, COUNT], "items": False, "minItems": 2},
    "bounded array": {"type": "array", "items": COUNT, "minItems": 3, "maxItems": 100},
    "distinct items": {"type": "array", "items": COUNT, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "not": {"not": {"type": "string"}},
    "if, then, else": {
        "type": "object",
        "properties": {"a": COUNT},
        "if": {"properties": {"a": {"const": 1}}},
        "then": {"required": ["b"]},
        "else": {},
    },
    "dependent": {
        "type": "object",
        "properties": {"a": COUNT, "b": COUNT},
        "dependentRequired": {"a": ["b"]},
    },
    "number of properties": {"type": "object", "minProperties": 1, "maxProperties": 3},
    "names of properties": {"type": "object", "propertyNames": {"maxLength": 3}},
    "a hundred properties": record(**{f"property_{number}": TEXT for number in range(100)}),
    "a thousand words": {"enum": [f"word-{number}" for number in range(1000)]},
    "annotated": {
        "title": "A",
        "description": "b",
        "type": "integer",
        "default": 1,
        "examples": [2],
    },
}
