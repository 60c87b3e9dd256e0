import json
import random
from typing import Any

import jsonschema
import pytest

from adapters.dialects.choosing import choose_dialect
from engine.errors import InvalidRequest
from engine.grammar import GrammarError, Matcher
from engine.step import Grammar
from gateway.ports import ToolCallGrammar, ToolChoice
from gateway.schema.rendering import ChoiceEnd, finished_choice
from tests.gateway.scripted_model import byte_grammars

COMPILER = byte_grammars()
TYPED = ("qwen-xml", "gemma", "gemma4", "olmo3")  # styles whose arguments are no JSON
EDIT = {
    "type": "object",
    "properties": {
        "old": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        "next": {"anyOf": [{"$ref": "#/$defs/edit"}, {"type": "null"}]},
    },
    "required": ["old", "lines"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "Where."},
        "mode": {"$ref": "#/$defs/mode"},
        "level": {"type": "integer", "minimum": 3, "maximum": 12},
        "ratio": {"type": "number"},
        "day": {"type": "string", "format": "date"},
        "word": {"type": "string", "pattern": "^[a-f]+$", "maxLength": 4},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "boolean"}]},
        "size": {"type": ["string", "integer"], "enum": ["small", 1, "2"]},
        "names": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "edits": {"type": "array", "items": {"$ref": "#/$defs/edit"}},
    },
    "required": ["path", "mode", "level", "edits"],
    "additionalProperties": False,
    "$defs": {"edit": EDIT, "mode": {"type": "string", "enum": ["r", "w", "rw"]}},
}  # fmt: skip
# What a random model would hardly spell, and a wicked one would.
PHRASES = (
    "\n</parameter>\n", "</parameter>", "</function>\n</tool_call>", "<tool_call>", "<escape>",
    "<end_function_call>", '<|"|>', "<tool_call|>", "</function_calls>", '"', "]", "}", ")", ",",
    "null", "true", "[1]", '{"a": 1}', "12", "<|", "\n", "é",
)  # fmt: skip


def grammar_of(style: str, calls: ToolCallGrammar) -> Grammar:
    grammar = choose_dialect("", style).call_grammar(calls)
    assert grammar is not None
    return grammar


def takes(matcher: Matcher, text: str) -> Matcher | None:
    """The matcher after the text; None if the grammar does not allow it."""
    other = matcher.copy()
    try:
        other.feed(list(text.encode()))
    except GrammarError:
        return None
    return other


def allows(grammar: Grammar, text: str) -> bool:
    after = takes(COMPILER.compile(grammar), text)
    return after is not None and after.mask().accepts


def random_output(grammar: Grammar, rng: random.Random) -> str:
    """An output of a model that writes random bytes and phrases, and ends when it may."""
    matcher, written = COMPILER.compile(grammar), b""
    while not (mask := matcher.mask()).accepts:
        phrase = rng.choice(PHRASES).encode()
        if rng.random() < 0.5 and (after := takes(matcher, phrase.decode())) is not None:
            matcher = after
        else:
            allowed = [b for b in range(128) if mask.bits[b >> 3] >> (b & 7) & 1]
            phrase = bytes([rng.choice(allowed)])
            matcher.feed(list(phrase))
        written += phrase
        assert len(written) < 20_000, "it ends"
    return written.decode()


def parsed(style: str, text: str, tools: dict[str, Any]) -> list[tuple[str, Any]]:
    """The calls in an output that is nothing else."""
    parser = choose_dialect("", style).parser("", ToolChoice(tools), random.Random(1).getrandbits)
    assert parser is not None
    message = finished_choice([*parser.feed(text), *parser.finish()], ChoiceEnd("stop"))
    assert not message.content
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


@pytest.mark.parametrize("style", TYPED)
def test_a_forced_call_of_a_random_model_matches_the_schema(style: str) -> None:
    rng = random.Random(f"{style}1")
    grammar = grammar_of(style, ToolCallGrammar({"f": TOOL, "none": {}}, True, 1))
    seen: set[str] = set()
    wanted = {"f", "none", *TOOL["properties"]}
    while seen != wanted:  # at most 27 calls with these seeds
        ((name, arguments),) = parsed(style, random_output(grammar, rng), {"f": TOOL, "none": None})
        jsonschema.validate(arguments, TOOL if name == "f" else {"maxProperties": 0})
        seen |= {name, *arguments}


WRITTEN = {
    "qwen-xml": "<tool_call>\n<function={}>\n<parameter={}>\n{}\n</parameter>\n</function>\n"
    "</tool_call>",
    "gemma": "<start_function_call>call:{}{{{}:{}}}<end_function_call>",
    "gemma4": "<|tool_call>call:{}{{{}:{}}}<tool_call|>",
    "olmo3": "<function_calls>{}({}={})</function_calls>",
}
TEXTS = {"qwen-xml": "{}", "gemma": "<escape>{}<escape>", "gemma4": '<|"|>{}<|"|>', "olmo3": '"{}"'}
JSON_CALLS = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "llama3": '{"name": "%s", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "%s", "arguments": %s}]',
    "mistral-args": "[TOOL_CALLS]%s[ARGS]%s",
    "harmony": "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s",
    "granite": '<|tool_call|>[{"name": "%s", "arguments": %s}]',
    "phi4": '<|tool_call|>[{"name": "%s", "arguments": %s}]<|/tool_call|>',
}
MARKED = [*TYPED, *sorted(JSON_CALLS.keys() - {"llama3", "harmony"})]  # also within free text
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def call(style: str, name: str, parameter: str, value: object) -> str:
    """A call with one argument, as a model of this style writes it."""
    if style in JSON_CALLS:
        return JSON_CALLS[style] % (name, json.dumps({parameter: value}))
    shown = TEXTS[style].format(value) if isinstance(value, str) else value
    return WRITTEN[style].format(name, parameter, shown)


@pytest.mark.parametrize("style", MARKED)
def test_strict_calls_are_constrained_within_free_text(style: str) -> None:
    grammar = grammar_of(style, ToolCallGrammar({"f": NUMBER, "loose": None}))
    text = "<b>x</b>"
    good = call(style, "f", "a", 5)
    for output in ("", "Hello", f"So: {good}!", call(style, "loose", "b", text)):
        assert allows(grammar, output)
    for bad in (("f", "a", text), ("other", "a", 5), ("f", "b", 5)):
        assert not allows(grammar, "So: " + call(style, *bad))


@pytest.mark.parametrize("style", [*TYPED, *JSON_CALLS])
def test_an_answer_schema_is_an_alternative_to_a_call(style: str) -> None:
    grammar = grammar_of(style, ToolCallGrammar({"f": NUMBER}, answer=NUMBER))
    assert allows(grammar, call(style, "f", "a", 5))
    assert allows(grammar, '{"a": 5}')
    assert not allows(grammar, "Hello")
    assert not allows(grammar, '{"a": "x"}')


@pytest.mark.parametrize("style", MARKED)
def test_a_maximum_limits_the_calls(style: str) -> None:
    two = call(style, "f", "a", 5) * 2
    one = grammar_of(style, ToolCallGrammar({"f": NUMBER}, must_call=True, max_calls=1))
    more = grammar_of(style, ToolCallGrammar({"f": NUMBER}, must_call=True))
    assert allows(one, call(style, "f", "a", 5))
    assert [allows(one, two), allows(more, two)] == [False, True]


@pytest.mark.parametrize(
    ("style", "schema", "reason"),
    [
        ("qwen-xml", {"properties": {"a>": {}}, "required": ["a>"]}, 'name "a>"'),
        ("qwen-xml", {"properties": {"a": {"enum": []}}}, 'schema of the parameter "a"'),
        ("qwen-xml", {"properties": {"a": {"$ref": "#/$defs/no"}}}, "reference '#/[$]defs/no'"),
        ("qwen-xml", {"properties": {"a": {"minLength": "x"}}}, "'minLength' that is no natural"),
        ("qwen-xml", {"allOf": [{"type": "object"}, {"type": "array"}]}, "two values for 'type'"),
        ("olmo3", {"properties": {"a-b": {}}, "required": ["a-b"]}, 'name "a-b"'),
        ("gemma", {"properties": {"a": {"not": {}}}}, "keyword 'not'"),
        ("gemma4", {"properties": {"a": {"enum": [[1]]}}}, "list of values"),
    ],
)  # fmt: skip
def test_a_schema_that_calls_cannot_follow_is_an_error(
    style: str, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        choose_dialect("", style).call_grammar(ToolCallGrammar({"f": schema}, must_call=True))


@pytest.mark.parametrize("style", ["qwen-xml", "gemma"])
def test_exponentially_many_alternatives_are_an_error(style: str) -> None:
    nodes = {f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 2} for i in range(30)}
    schema = {"properties": {"a": {"type": ["string"], "$ref": "#/$defs/n0"}}, "$defs": nodes}
    with pytest.raises(InvalidRequest, match="is not supported in this model's format"):
        choose_dialect("", style).call_grammar(ToolCallGrammar({"f": schema}, must_call=True))
