"""Free text with tagged parts that must match a schema, such as tool calls.

The text of `GrammarKind.TAGS` is JSON:

    {"triggers": ["<tool_call>"],
     "structures": [{"begin": "<tool_call>{\"name\": \"f\", \"arguments\": ",
                     "inside": {"schema": {…}}, "end": "}</tool_call>"}, …],
     "at_least": 0, "at_most": null, "has_text": true}

Every `begin` starts with a trigger. Text is free until a trigger is generated; then one of the
trigger's structures must follow. `inside` is a part (`adapters.grammar.parts`), which may refer to
the structure's `rules`.
`at_least` and `at_most` limit the number of structures. If `has_text` is false, no text may come
before, between or after them, and `answer` may be a schema: the output may then be JSON that
matches it instead of the structures. Names of special tokens in `triggers`, `begin` and `end`
stand for those tokens.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapters.grammar.parts import LarkParts, count, json_part

_FIELDS = {"triggers", "structures", "at_least", "at_most", "has_text", "answer"}
MAX_STRUCTURES = 128


@dataclass(frozen=True, slots=True)
class Structure:
    """One tagged part: its beginning, its content and its end, and the rules of its content."""

    begin: str
    inside: Any
    end: str
    rules: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tags:
    """The triggers and structures, and how many structures are allowed (None: no limit)."""

    triggers: tuple[str, ...]
    structures: tuple[Structure, ...]
    at_least: int
    at_most: int | None
    has_text: bool
    answer: str = ""  # Lark


def read_tags(text: str) -> Tags:
    """Parse the JSON form. Raises `ValueError` that names the invalid field."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("tags must be a JSON object")
    unknown = data.keys() - _FIELDS
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
    tags = Tags(
        triggers=_triggers(data.get("triggers")),
        structures=_structures(data.get("structures")),
        at_least=count(data.get("at_least", 0), "at_least"),
        at_most=None if data.get("at_most") is None else count(data["at_most"], "at_most"),
        has_text=bool(data.get("has_text", True)),
        answer=json_part(data["answer"]) if "answer" in data else "",
    )
    if tags.answer and tags.has_text:
        raise ValueError("answer requires has_text to be false")
    for structure in tags.structures:
        if not structure.begin.startswith(tags.triggers):
            raise ValueError(f"begin {structure.begin[:100]!r} does not start with a trigger")
    if tags.at_most is not None and tags.at_most < max(tags.at_least, 1):
        raise ValueError("at_most must be at least 1 and at least at_least")
    return tags


def _triggers(found: Any) -> tuple[str, ...]:
    if not (isinstance(found, list) and found and all(isinstance(t, str) and t for t in found)):
        raise ValueError("triggers must be an array of at least one string, none of them empty")
    for one in found:
        for other in found:
            if one is not other and other.startswith(one):
                raise ValueError(f"trigger {one[:100]!r} is a prefix of another trigger")
    return tuple(found)


def _structures(found: Any) -> tuple[Structure, ...]:
    if not (isinstance(found, list) and 0 < len(found) <= MAX_STRUCTURES):
        raise ValueError(f"structures must be an array of 1 to {MAX_STRUCTURES} objects")
    return tuple(map(_structure, found))


def _structure(found: Any) -> Structure:
    if not isinstance(found, dict) or found.keys() - {"begin", "inside", "end", "rules"}:
        raise ValueError("a structure must have begin, inside and end, and may have rules")
    begin, end, rules = found.get("begin"), found.get("end", ""), found.get("rules", {})
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(rules, dict):
        raise ValueError("begin and end must be strings, and rules an object")
    return Structure(begin, found.get("inside"), end, rules)


def tags_to_lark(tags: Tags, special: Mapping[str, int]) -> str:
    """The grammar in llguidance's Lark dialect.

    A trigger is the end of a lazy lexeme, which matches the shortest text that ends with the
    trigger. So the free text before a trigger does not contain one.
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
        parts = LarkParts(special, f"part_{number}")
        whole = parts.written(
            [structure.begin.removeprefix(trigger), structure.inside, structure.end]
        )
        parts.add_rules(structure.rules)
        rules.append(f"structure_{number}: trigger_{tags.triggers.index(trigger)} {whole}")
        rules += parts.lines
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
