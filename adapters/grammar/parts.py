"""Parts of a tagged structure, from JSON to Lark.

A part is one of these:

- a string: this text, in which names of special tokens stand for those tokens;
- an array: its parts, one after the other;
- `{"any": [PART, …]}`: one of them; `{"maybe": PART}`: it or nothing;
- `{"many": PART, "least": 0, "most": null}`: it, several times;
- `{"rule": NAME}`: the part that the structure's `rules` have under this name;
- `{"regex": PATTERN}`;
- `{"schema": …, "without": [MARK, …]}`: JSON that matches a schema; its strings contain no mark;
- `{"until": END, "without": [MARK, …], "matching": [PATTERN, …], "unlike": [PATTERN, …]}`: text and
  then END. The text contains no mark, matches all patterns of `matching` and none of `unlike`.

A mark begins with `<` and has no other `<`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Whitespace between JSON tokens: enough to indent, too little to fill an output.
JSON_BLANKS = r"\x20|\n[\x20\t]{0,32}"
MAX_TIMES = 128
_ANY = "podway_any"  # in `$defs`: the schema of any JSON
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_ELSEWHERE = ("$ref", "anyOf", "oneOf", "allOf")  # where the types are, if here is none


class LarkParts:
    """Writes the parts of one structure. `prefix` begins the names of its rules and terminals."""

    def __init__(self, special: Mapping[str, int], prefix: str = "part") -> None:
        self.lines: list[str] = []  # rules and terminals that the parts refer to
        self._special = special
        self._prefix = prefix
        self._num_terminals = 0

    def add_rules(self, rules: Mapping[str, Any]) -> None:
        """Write the structure's rules. Raises `ValueError`."""
        for name, part in rules.items():
            self.lines.append(f"{self._rule(name)}: {self.written(part)}")

    def written(self, part: Any) -> str:
        """The part as a Lark expression. Raises `ValueError`."""
        match part:
            case str():
                return literal(part, self._special) or '""'
            case [*parts]:
                return " ".join(map(self.written, parts)) or '""'
            case {"any": [_, *_] as parts}:
                return f"({' | '.join(map(self.written, parts))})"
            case {"maybe": inner}:
                return f"({self.written(inner)})?"
            case {"many": inner}:
                least, most = count(part.get("least", 0), "least"), part.get("most")
                most = "" if most is None else count(most, "most")
                return f"({self.written(inner)}){{{least},{most}}}"
            case {"rule": str(name)}:
                return self._rule(name)
            case {"regex": str(pattern)}:
                return regex(pattern)
            case {"schema": schema}:
                return json_part(schema, part.get("without", ()))
            case {"until": str(end)}:
                return self._text(end, part)
        raise ValueError(f"unknown part {json.dumps(part)[:100]}")

    def _rule(self, name: str) -> str:
        if not re.fullmatch(r"[a-z0-9_]+", name):
            raise ValueError(f"a rule's name has letters, digits and underscores, not {name!r}")
        return f"{self._prefix}_{name}"

    def _text(self, end: str, part: Mapping[str, Any]) -> str:
        """A terminal for the text, and for its end too unless that is a token of its own: else
        greedy text would take the end's beginning."""
        kinds = [regex(text_without(part.get("without", ())))]
        kinds += [regex(rf"(?s:{pattern})") for pattern in part.get("matching", ())]
        kinds += ["~" + regex(rf"(?s:{pattern})") for pattern in part.get("unlike", ())]
        self._num_terminals += 1
        name = f"{self._prefix.upper()}_TEXT_{self._num_terminals}"
        close = literal(end, self._special)
        is_token = end in self._special
        self.lines.append(f"{name}: ({' & '.join(kinds)}){'' if is_token else ' ' + close}")
        return f"{name} {close}" if is_token else name


def text_without(marks: Sequence[str]) -> str:
    """A regular expression for text that contains none of the marks."""
    for mark in marks:
        if not mark.startswith("<") or "<" in mark[1:]:
            raise ValueError(f"a mark begins with < and has no other, unlike {mark[:100]!r}")
    return rf"[^<]*(?:<{_not_after([mark[1:] for mark in marks])})*"


def _not_after(words: Sequence[str]) -> str:
    """Text without `<` that begins with none of the words."""
    if not words:
        return "[^<]*"
    by_first: dict[str, list[str]] = {}
    for word in words:
        by_first.setdefault(word[0], []).append(word[1:])
    ways = [rf"[^<{''.join(map(_in_class, by_first))}][^<]*"]
    for first, rests in by_first.items():
        if all(rests):  # else the word is complete
            ways.append(re.escape(first) + _not_after(rests))
    return f"(?:{'|'.join(ways)})?"


def _in_class(char: str) -> str:
    return "\\" + char if char in r"\]^-" else char


def json_part(schema: Any, without: Sequence[str] = ()) -> str:
    """Lark for JSON that matches the schema, and whose strings contain no mark of `without`."""
    if without:
        pattern = f"^{text_without(without)}$"
        schema = _bounded(schema, pattern)
        anything = _bounded({}, pattern)
        if isinstance(schema, dict):
            schema["$defs"] = {**schema.get("$defs", {}), _ANY: anything}
    if isinstance(schema, dict):
        schema = {"x-guidance": {"whitespace_pattern": JSON_BLANKS}, **schema}
    return f"%json {json.dumps(schema)}"


def _bounded(schema: Any, pattern: str) -> Any:
    """The schema with this pattern for all strings. Objects with known properties have no other."""
    if schema is True:
        return {"$ref": f"#/$defs/{_ANY}"}
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in _MAPS & schema.keys():
        if isinstance(schema[key], dict):
            found[key] = {name: _bounded(each, pattern) for name, each in schema[key].items()}
    for key in _LISTS & schema.keys():
        if isinstance(schema[key], list):
            found[key] = [_bounded(each, pattern) for each in schema[key]]
    if "type" in schema or schema.keys().isdisjoint(_ELSEWHERE):
        _bound_types(found, schema, pattern)
    return found


def _bound_types(found: dict[str, Any], schema: Mapping[str, Any], pattern: str) -> None:
    """Add the pattern to what the schema says about its types."""
    types = schema.get("type", ["string", "array", "object"])
    types = types if isinstance(types, list) else [types]
    if "string" in types:
        found["allOf"] = [*found.get("allOf", ()), {"pattern": pattern}]
    if "array" in types:
        found["items"] = _bounded(schema.get("items", True), pattern)
    if "object" in types:
        others = schema.get("additionalProperties", True)
        if others is not False and schema.keys().isdisjoint(("properties", "patternProperties")):
            found["patternProperties"] = {pattern: _bounded(others, pattern)}
        found["additionalProperties"] = False


def count(found: Any, name: str) -> int:
    """`found` as a number of times. Raises `ValueError`."""
    if not isinstance(found, int) or not 0 <= found <= MAX_TIMES:
        raise ValueError(f"{name} must be an integer from 0 to {MAX_TIMES}")
    return found


def literal(text: str, special: Mapping[str, int]) -> str:
    """`text` in Lark: string literals, and special tokens by id."""
    if not text:
        return ""
    if not special:
        return json.dumps(text)
    longest_first = sorted(map(re.escape, special), key=len, reverse=True)
    parts = [part for part in re.split(f"({'|'.join(longest_first)})", text) if part]
    return " ".join(
        f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts
    )


def regex(pattern: str) -> str:
    """The pattern as a Lark regular expression, with slashes escaped."""
    return "/" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.S) + "/"
