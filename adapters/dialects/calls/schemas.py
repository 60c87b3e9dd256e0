"""JSON schemas of tools' parameters, read for calls whose arguments are not JSON."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import InvalidRequest

Schema = Mapping[str, Any]
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "discriminator"}
)
NUMBER_BOUNDS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
MAX_STEPS = 3000  # in reading one schema: about 10 ms
CHARS_PER_STEP = 100
_PYTHON_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "string": str,
    "array": list,
    "object": dict,
    "null": type(None),
}
_FORMATS = {
    "date": r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])",
    "time": r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+\-](?:[01]\d|2[0-3]):[0-5]\d)",
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[A-Za-z0-9_.+\-]{1,64}@[A-Za-z0-9\-]{1,63}(?:\.[A-Za-z0-9\-]{1,63})+",
    "ipv4": r"(?:(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"


class Parameter(NamedTuple):
    """One parameter of a tool, or one property of an object."""

    name: str
    schema: Any
    is_required: bool


def unwritable(what: str) -> InvalidRequest:
    """The error for a schema whose values this model's calls cannot have."""
    return InvalidRequest(f"{what} is not supported in this model's format of tool calls.", "tools")


def parameters_of(schema: Schema) -> list[Parameter]:
    """The properties of an object, in order."""
    required = [name for name in items_of(schema, "required") if isinstance(name, str)]
    properties = schema.get("properties")
    properties = {**properties} if isinstance(properties, Mapping) else {}
    properties |= {name: {} for name in required if name not in properties}
    return [Parameter(name, each, name in required) for name, each in properties.items()]


def others_of(schema: Schema) -> Any:
    """The schema of further properties; False if there are none. An object with known properties
    has no others."""
    return False if "properties" in schema else schema.get("additionalProperties", True)


class SchemaReader:
    """Follows the references of one schema. What it reads is limited, since short schemas can have
    exponentially many alternatives; errors are `InvalidRequest`."""

    def __init__(self, root: Any) -> None:
        self._whole = root
        self._num_steps = 0
        self._moved: Any = None  # the whole schema, as `rooted` includes it
        self._moved_steps = 0
        self.root = self.resolved(root)

    def resolved(self, schema: Any) -> Schema:
        """The schema with its own `$ref` and `allOf` replaced by what they name; {} allows
        anything. Raises `InvalidRequest` for parts that differ in one keyword."""
        self._count()
        if not isinstance(schema, Mapping):
            return {}
        merged: dict[str, Any] = {k: v for k, v in schema.items() if k not in ("$ref", "allOf")}
        named = [self.target(schema["$ref"])] if "$ref" in schema else []
        for part in (*named, *items_of(schema, "allOf")):
            for key, value in self.resolved(part).items():
                if merged.setdefault(key, value) != value and key not in ANNOTATIONS:
                    raise unwritable(f"'allOf' with two values for '{key}'")
        return merged

    def target(self, ref: Any) -> Any:
        """What a local reference names."""
        found = self._whole
        for name in str(ref).removeprefix("#").split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (LookupError, ValueError, TypeError):
                raise unwritable(f"The reference '{str(ref)[:100]}'") from None
        return found

    def alternatives(self, schema: Any) -> Iterator[Schema]:
        """The schemas, each of one type, of one list of values or of anything, one of which a value
        must match."""
        found = self.resolved(schema)
        unions = [key for key in ("anyOf", "oneOf") if items_of(found, key)]
        if unions:
            rest = {key: value for key, value in found.items() if key != unions[0]}
            for each in found[unions[0]]:
                yield from self.alternatives({"allOf": [rest, each]})
        elif listed_values(found) is None and isinstance(found.get("type"), list):
            for name in found["type"]:
                self._count()
                yield {**found, "type": str(name)}
        else:
            yield found

    def types(self, schema: Any) -> set[str]:
        """The types that a schema names, also by its values; empty if it names none."""
        found: set[str] = set()
        for each in self.alternatives(schema):
            values = listed_values(each)
            if values is not None:
                found |= {n for n in _PYTHON_TYPES if any(has_type(v, [n]) for v in values)}
            elif "type" in each:
                found.add(str(each["type"]))
        return found

    def rooted(self, schema: Any) -> Any:
        """A schema that is part of this one, as a schema of its own."""
        if '"$ref"' not in json.dumps(schema):
            return schema
        if self._moved is None:
            self._moved = moved(self._whole, "#/$defs/root")
            self._moved_steps = len(json.dumps(self._moved)) // CHARS_PER_STEP
        self._count(self._moved_steps)
        return {"allOf": [moved(schema, "#/$defs/root")], "$defs": {"root": self._moved}}

    def _count(self, num_steps: int = 1) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise unwritable("A schema of a tool with so many alternatives or references")


def listed_values(schema: Schema) -> list[Any] | None:
    """The values of `enum` or `const` that have the schema's type; None without these keywords."""
    if "const" in schema:
        values = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        values = schema["enum"]
    else:
        return None
    types = schema.get("type", list(_PYTHON_TYPES))
    types = types if isinstance(types, list) else [types]
    return [value for value in values if has_type(value, types)]


def has_type(value: Any, types: Sequence[Any]) -> bool:
    """Whether a JSON value has one of the types."""
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, _PYTHON_TYPES.get(str(name), ())) for name in types)


def items_of(schema: Schema, key: str) -> list[Any]:
    """The list under a key; empty if there is none."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def number_of(schema: Schema, key: str) -> int | None:
    """The number under a key. Raises `InvalidRequest` for anything else."""
    found = schema.get(key)
    if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 0):
        raise unwritable(f"A '{key}' that is no natural number")
    return found


def string_patterns(schema: Schema) -> list[str]:
    """Regular expressions that a text must match to fit a schema of strings."""
    found = []
    least, most = number_of(schema, "minLength"), number_of(schema, "maxLength")
    if least or most is not None:
        found.append(f".{{{least or 0},{'' if most is None else most}}}")
    if "pattern" in schema:
        pattern = str(schema["pattern"])
        begins, ends = pattern.startswith("^"), pattern.endswith("$") and pattern[-2:] != r"\$"
        pattern = pattern[begins : len(pattern) - ends]
        found.append(f"{'' if begins else '.*'}(?:{pattern}){'' if ends else '.*'}")
    if str(schema.get("format")) in _FORMATS:
        found.append(_FORMATS[str(schema["format"])])
    return found


def moved(schema: Any, place: str) -> Any:
    """The schema with its local `$ref`s relocated to the JSON pointer `place`."""
    if isinstance(schema, Mapping):
        return {
            name: place + value[1:]
            if name == "$ref" and isinstance(value, str) and value.startswith("#")
            else moved(value, place)
            for name, value in schema.items()
        }
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [moved(item, place) for item in schema]
    return schema


def separated(
    entries: Sequence[tuple[Any, bool]], separator: str, rules: dict[str, Any], name: str
) -> Any:
    """The part for these parts in order, with a separator between those that are there. The second
    of each says whether it is required. Adds to `rules`, under names that begin with `name`."""
    head: Any = []
    tail: Any = []
    for number, (part, is_required) in reversed([*enumerate(entries)]):
        item, after, first = (f"{name}_{number}", f"{name}_{number}_tail", f"{name}_{number}_head")
        rules[item] = part
        begun = [{"rule": item}, tail]
        rules[first] = begun if is_required else {"any": [begun, head]}
        next_one = [separator, {"rule": item}]
        rules[after] = [next_one if is_required else {"maybe": next_one}, tail]
        head, tail = {"rule": first}, {"rule": after}
    return head


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else math.copysign(1.7976931348623157e308, value)


def _no_json(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


# Of numbers that are too large for a float, the largest; NaN is a `ValueError`.
DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_json)
