"""The grammar of `call:NAME{key:value,…}`, whose strings stand between quote marks.

Schemas may have the keywords that are handled here; others are an error that names them. Objects
with known properties have no others, and those in the schema's order.
"""

import json
import re
from typing import Any

from adapters.dialects.calls.bare_call import BareCallMarks
from adapters.dialects.calls.schemas import (
    ANNOTATIONS,
    NUMBER_BOUNDS,
    Schema,
    SchemaReader,
    items_of,
    listed_values,
    number_of,
    others_of,
    parameters_of,
    separated,
    string_patterns,
    unwritable,
)

_PLAIN_KEY = re.compile(r"[\w.\-$]+")
_UNHANDLED = (
    "not", "if", "contains", "uniqueItems", "propertyNames", "patternProperties", "prefixItems",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
)  # fmt: skip
_BY_KEYWORD = {"properties": "object", "items": "array", "pattern": "string"}
_TYPES = ["string", "number", "boolean", "null", "array", "object"]
_MAX_DEPTH = 32


def bare_structure(marks: BareCallMarks, name: str, schema: Schema | None) -> dict[str, Any]:
    """The tagged structure of a call whose arguments match the schema; None allows any."""
    values = _Values(marks, {"type": "object"} if schema is None else schema)
    inside = values.object(values.reader.root)
    begin = f"{marks.open}call:{name}"
    return {"begin": begin, "inside": inside, "end": marks.close, "rules": values.rules}


class _Values:
    """Writes the parts of values. The parts of references, and of anything, are rules."""

    def __init__(self, marks: BareCallMarks, root: Schema) -> None:
        self.reader = SchemaReader(root)
        self.rules: dict[str, Any] = {}
        self._marks = marks
        self._names: dict[str, str] = {}  # each rule's, under its reference
        self._depth = 0

    def value(self, schema: Any) -> Any:
        """The part of a value. Raises `InvalidRequest`."""
        if isinstance(schema, dict) and "$ref" in schema and not _asserted(schema, "$ref"):
            ref = str(schema["$ref"])
            return self._named(ref, self.reader.target(ref))
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise unwritable(f"A schema nested more than {_MAX_DEPTH} levels deep")
        part = self._value(self.reader.resolved(schema))
        self._depth -= 1
        return part

    def _value(self, schema: Schema) -> Any:
        for keyword in _UNHANDLED:
            if keyword in schema:
                raise unwritable(f"The keyword '{keyword}'")
        for keyword in ("anyOf", "oneOf"):
            if members := items_of(schema, keyword):
                rest = {key: value for key, value in schema.items() if key != keyword}
                if _asserted(rest):
                    members = [{"allOf": [rest, each]} for each in members]
                return {"any": [self.value(each) for each in members]}
        listed = listed_values(schema)
        if listed is not None:
            return self._listed(listed)
        types = schema.get("type") or [t for key, t in _BY_KEYWORD.items() if key in schema]
        if not types:
            return self._named("", {"type": _TYPES})
        types = types if isinstance(types, list) else [types]
        return {"any": [self._of_type(str(name), schema) for name in types]}

    def object(self, schema: Schema) -> Any:
        """The part of an object."""
        parameters, others = parameters_of(schema), others_of(schema)
        if parameters or others is False:
            entries = [
                ([self._key(each.name), ":", self.value(each.schema)], each.is_required)
                for each in parameters
            ]
            return ["{", separated(entries, ",", self.rules, f"at{len(self.rules)}"), "}"]
        entry = [{"regex": r"[A-Za-z0-9_.\-]{1,64}"}, ":", self.value(others)]
        return ["{", {"maybe": [entry, {"many": [",", entry]}]}, "}"]

    def _of_type(self, name: str, schema: Schema) -> Any:
        if name == "string":
            return self._string(string_patterns(schema))
        if name == "object":
            return self.object(schema)
        if name == "array":
            return self._array(schema)
        return {"schema": {"type": name, **{k: schema[k] for k in NUMBER_BOUNDS & schema.keys()}}}

    def _array(self, schema: Schema) -> Any:
        item = self.value(schema.get("items", True))
        least, most = number_of(schema, "minItems") or 0, number_of(schema, "maxItems")
        if most == 0:
            return "[]"
        more = {"many": [",", item], "least": max(least - 1, 0), "most": most and most - 1}
        whole = [item, more]
        return ["[", whole if least else {"maybe": whole}, "]"]

    def _string(self, patterns: list[str]) -> Any:
        quote, close = self._marks.quote, self._marks.close
        return [quote, {"until": quote, "without": [quote, close], "matching": patterns}]

    def _listed(self, values: list[Any]) -> Any:
        """A choice of the values that are literals: no arrays and objects."""
        quote = self._marks.quote
        texts = [f"{quote}{v}{quote}" for v in values if isinstance(v, str) and "<" not in v]
        texts += [json.dumps(v) for v in values if not isinstance(v, str | list | dict)]
        if not texts:
            raise unwritable(f"The list of values {json.dumps(values)[:100]}")
        return {"any": texts}

    def _key(self, name: str) -> Any:
        if _PLAIN_KEY.fullmatch(name):
            return name
        if "<" in name:
            raise unwritable(f"The name {json.dumps(name)}")
        return f"{self._marks.quote}{name}{self._marks.quote}"

    def _named(self, ref: str, schema: Any) -> dict[str, str]:
        """A reference to the rule for the schema that `ref` names."""
        if ref not in self._names:
            self._names[ref] = name = f"ref{len(self._names)}"
            self.rules[name] = self.value(schema)
        return {"rule": self._names[ref]}


def _asserted(schema: Schema, *but: str) -> bool:
    return bool(schema.keys() - ANNOTATIONS - {"$defs", "definitions", "$schema", *but})
