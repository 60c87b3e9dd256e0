"""Free text in which certain words begin a part that must match a schema: calls of tools.

The text of `GrammarKind.TAGS` is JSON:

    {"triggers": ["<tool_call>"],
     "structures": [{"begin": "<tool_call>{\"name\": \"f\", \"arguments\": ",
                     "schema": {…}, "end": "}</tool_call>"}, …],
     "at_least": 0, "at_most": null, "has_text": true}

Every `begin` starts with a trigger; text goes on freely until a trigger has come, and then one of
its structures must follow. Instead of `schema` (JSON) a structure may have `regex`. `at_least`
and `at_most` count structures; without `has_text` nothing stands before, between or after them.
Then `answer` may be a schema: JSON that matches it may stand in the place of all structures.
Names of special tokens in `triggers`, `begin` and `end` stand for those tokens.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FIELDS = {"triggers", "structures", "at_least", "at_most", "has_text", "answer"}
# Blanks between the parts of a JSON text: enough to indent, not enough to fill an answer with.
JSON_BLANKS = r"\x20|\n[\x20\t]{0,32}"
MAX_STRUCTURES = 128
MAX_TIMES = 128


@dataclass(frozen=True, slots=True)
class Structure:
    """One part: what it begins with, what stands inside (Lark), what it ends with."""

    begin: str
    inside: str
    end: str


@dataclass(frozen=True, slots=True)
class Tags:
    """The triggers, the structures, and how many of them there may be (None: any number)."""

    triggers: tuple[str, ...]
    structures: tuple[Structure, ...]
    at_least: int
    at_most: int | None
    has_text: bool
    answer: str = ""  # Lark


def read_tags(text: str) -> Tags:
    """Raises `ValueError` saying what is wrong with it."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("tags are a JSON object")
    unknown = data.keys() - _FIELDS
    if unknown:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    tags = Tags(
        triggers=_triggers(data.get("triggers")),
        structures=_structures(data.get("structures")),
        at_least=_count(data.get("at_least", 0), "at_least"),
        at_most=None if data.get("at_most") is None else _count(data["at_most"], "at_most"),
        has_text=bool(data.get("has_text", True)),
        answer=_json(data["answer"]) if "answer" in data else "",
    )
    if tags.answer and tags.has_text:
        raise ValueError("answer is for tags without text")
    for structure in tags.structures:
        if not structure.begin.startswith(tags.triggers):
            raise ValueError(f"begin {structure.begin[:100]!r} starts with no trigger")
    if tags.at_most is not None and tags.at_most < max(tags.at_least, 1):
        raise ValueError("at_most is less than at_least, or than 1")
    return tags


def _triggers(found: Any) -> tuple[str, ...]:
    if not (isinstance(found, list) and found and all(isinstance(t, str) and t for t in found)):
        raise ValueError("triggers are an array of at least one string, none of them empty")
    for one in found:
        for other in found:
            if one is not other and other.startswith(one):
                raise ValueError(f"trigger {one[:100]!r} begins another")
    return tuple(found)


def _structures(found: Any) -> tuple[Structure, ...]:
    if not (isinstance(found, list) and 0 < len(found) <= MAX_STRUCTURES):
        raise ValueError(f"structures are an array of 1 to {MAX_STRUCTURES} objects")
    return tuple(map(_structure, found))


def _structure(found: Any) -> Structure:
    if not isinstance(found, dict) or found.keys() - {"begin", "schema", "regex", "end"}:
        raise ValueError("a structure has begin, schema or regex, and end")
    begin, end = found.get("begin"), found.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError("begin and end are strings")
    if ("schema" in found) == ("regex" in found):
        raise ValueError("a structure has either schema or regex")
    if "schema" in found:
        return Structure(begin, _json(found["schema"]), end)
    if not isinstance(found["regex"], str):
        raise ValueError("regex is a string")
    return Structure(begin, _regex(found["regex"]), end)


def _json(schema: Any) -> str:
    """JSON that matches the schema, in Lark."""
    if isinstance(schema, dict):
        schema = {"x-guidance": {"whitespace_pattern": JSON_BLANKS}, **schema}
    return f"%json {json.dumps(schema)}"


def _count(found: Any, name: str) -> int:
    if not isinstance(found, int) or not 0 <= found <= MAX_TIMES:
        raise ValueError(f"{name} is an integer from 0 to {MAX_TIMES}")
    return found


def tags_to_lark(tags: Tags, special: Mapping[str, int]) -> str:
    """The grammar in llguidance's Lark.

    A trigger is the end of a lazy lexeme: the text before it is free because it is the shortest
    that ends with the trigger, and whatever text remains has no trigger in it.
    """
    rules: list[str] = []
    for number, trigger in enumerate(tags.triggers):
        if trigger in special:
            text = "TEXT " if tags.has_text else ""
            rules.append(f"trigger_{number}: {text}<[{special[trigger]}]>")
        elif tags.has_text:
            rules.append(f"trigger_{number}[lazy]: /(.|\\n)*/ {json.dumps(trigger)}")
        else:
            rules.append(f"trigger_{number}: {json.dumps(trigger)}")
    for number, structure in enumerate(tags.structures):
        trigger = next(t for t in tags.triggers if structure.begin.startswith(t))
        parts = (
            f"trigger_{tags.triggers.index(trigger)}",
            _literal(structure.begin.removeprefix(trigger), special),
            structure.inside,
            _literal(structure.end, special),
        )
        rules.append(f"structure_{number}: {' '.join(part for part in parts if part)}")
    options = " | ".join(f"structure_{number}" for number in range(len(tags.structures)))
    most = "" if tags.at_most is None else str(tags.at_most)
    start = f"({options}){{{tags.at_least},{most}}}"
    if tags.answer:
        start += " | answer"
        rules.append(f"answer: {tags.answer}")
    if tags.has_text:
        start += " TEXT"
        rules.append("TEXT: /(.|\\n)*/")
    return "\n".join(["%llguidance {}", f"start: {start}", *rules])


def _literal(text: str, special: Mapping[str, int]) -> str:
    """`text` as Lark: strings, and special tokens by id."""
    if not text:
        return ""
    if not special:
        return json.dumps(text)
    longest_first = sorted(map(re.escape, special), key=len, reverse=True)
    parts = [part for part in re.split(f"({'|'.join(longest_first)})", text) if part]
    return " ".join(
        f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts
    )


def _regex(pattern: str) -> str:
    """The pattern between Lark's slashes."""
    return "/" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.S) + "/"
