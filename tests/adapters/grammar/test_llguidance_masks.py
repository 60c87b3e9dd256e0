"""The tokens that a grammar allows, with the built-in vocabulary and some unused ids."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adapters
from adapters.grammar.llguidance_masks import LlguidanceCompiler
from adapters.tokenizers import load_token_table
from engine.grammar import GrammarCompiler, GrammarError, Mask, TokenTable
from engine.step import Grammar, GrammarKind

BUILTIN = Path(adapters.__file__).parent / "builtin"
SPARE = 37  # ids of the model beyond those of its tokenizer
CALL = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
        "additionalProperties": False}  # fmt: skip
TAGS: dict[str, Any] = {
    "triggers": ["<tool_call>", "<|im_end|>"],
    "structures": [
        {
            "begin": '<tool_call>{"name": "f", "arguments": ',
            "inside": {"schema": CALL},
            "end": "}</tool_call>",
        },
        {"begin": '<tool_call>{"name": "g"', "inside": {"regex": "/?"}, "end": "}</tool_call>"},
        {"begin": "<|im_end|>!", "inside": {"regex": "[0-9]+"}, "end": "<|endoftext|>"},
    ],
}
F = '<tool_call>{"name": "f", "arguments": {"x": 3}}</tool_call>'
G = '<tool_call>{"name": "g"/}</tool_call>'


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return load_token_table(BUILTIN)


@pytest.fixture(scope="module")
def compiler(table: TokenTable) -> GrammarCompiler:
    return LlguidanceCompiler(table, len(table.tokens) + SPARE)


def ids(mask: Mask) -> set[int]:
    return {
        8 * at + bit for at, byte in enumerate(mask.bits) for bit in range(8) if byte >> bit & 1
    }


def accepts(compiler: GrammarCompiler, table: TokenTable, grammar: Grammar, text: str) -> bool:
    """Whether the grammar accepts the text, encoded as a model would generate it."""
    matcher = compiler.compile(grammar)
    try:
        matcher.feed(table.encode(text))
    except GrammarError:
        return False
    return matcher.mask().accepts


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        (Grammar(GrammarKind.JSON_OBJECT), '{"a": [1, null]}', "[1]"),
        (Grammar(GrammarKind.JSON_SCHEMA, json.dumps(CALL)), '{"x": -7}', '{"x": "7"}'),
        (Grammar(GrammarKind.JSON_SCHEMA, "true"), '"é\\n"', "x"),
        (Grammar(GrammarKind.REGEX, r"\d{3}/[a-z]{3}"), "123/abc", "123/abC"),
        (
            Grammar(GrammarKind.CHOICE, '["yes", "no", "n\\"\\\\é\\n\\u0001"]'),
            'n"\\é\n\x01',
            "maybe",
        ),
        (Grammar(GrammarKind.LARK, 'start: "a" start "b" | "x"'), "aaxbb", "aaxb"),
        (Grammar(GrammarKind.EBNF, 'root ::= "a" root "b" | "x"'), "aaxbb", "aaxbbb"),
    ],
    ids=lambda value: str(value.kind) if isinstance(value, Grammar) else "",
)
def test_every_kind_of_grammar_accepts_its_texts_only(
    compiler: GrammarCompiler, table: TokenTable, grammar: Grammar, inside: str, outside: str
) -> None:
    assert accepts(compiler, table, grammar, inside)
    assert not accepts(compiler, table, grammar, outside)
    assert not accepts(compiler, table, grammar, inside[:-1])


@pytest.mark.parametrize(
    ("changes", "inside", "outside"),
    [
        ({}, ["", "hello", F, "hi " + F + "\n" + G + " bye", "a <tool", "<tool_call", "{}"],
         ["a <tool_call> b", F[:-1], F + "<tool_call>", '<tool_call>{"name": "h"']),
        ({"at_least": 1}, [F, "hi" + F, G + F + "."], ["", "hi", F[:-1]]),
        ({"at_least": 1, "at_most": 1, "has_text": False}, [F, G], ["", " " + F, F + F, F + " "]),
        ({"at_most": 2, "has_text": False}, ["", F, F + G], [F + F + F, "x"]),
    ],
)  # fmt: skip
def test_tags_allow_free_text_and_constrain_the_structures(
    compiler: GrammarCompiler,
    table: TokenTable,
    changes: dict[str, Any],
    inside: list[str],
    outside: list[str],
) -> None:
    grammar = Grammar(GrammarKind.TAGS, json.dumps(TAGS | changes))
    found = {text: accepts(compiler, table, grammar, text) for text in [*inside, *outside]}
    assert found == {text: text in inside for text in [*inside, *outside]}


def test_special_token_names_in_tags_match_those_tokens(
    compiler: GrammarCompiler, table: TokenTable
) -> None:
    trigger, end = table.special["<|im_end|>"], table.special["<|endoftext|>"]
    matcher = compiler.compile(Grammar(GrammarKind.TAGS, json.dumps(TAGS)))
    assert trigger in ids(matcher.mask())
    matcher.feed([*table.encode("so"), trigger, *table.encode("!12")])
    assert end in ids(matcher.mask())
    matcher.feed([end])
    assert matcher.mask().accepts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "JSON object"),
        ('{"trigger": []}', "unknown fields: trigger"),
        ('{"triggers": ["<a", "<ab"], "structures": [{}]}', "prefix of another trigger"),
        ('{"triggers": ["<a"], "structures": []}', "1 to 128"),
        (
            '{"triggers": ["<a"], "structures": [{"begin": "<b", "inside": "x"}]}',
            "does not start with a trigger",
        ),
        ('{"triggers": ["<a"], "structures": [{"begin": "<a"}]}', "unknown part null"),
        (json.dumps(TAGS | {"at_least": 3, "at_most": 2}), "at_most must be"),
        (json.dumps(TAGS | {"at_most": 200}), "from 0 to 128"),
    ],
)
def test_the_error_for_invalid_tags_names_the_field(
    compiler: GrammarCompiler, text: str, message: str
) -> None:
    with pytest.raises(GrammarError, match=message):
        compiler.compile(Grammar(GrammarKind.TAGS, text))


def test_control_tokens_and_unused_ids_never_match(
    compiler: GrammarCompiler, table: TokenTable
) -> None:
    allowed = ids(compiler.compile(Grammar(GrammarKind.REGEX, r"(?s:.)*")).mask())
    assert allowed.isdisjoint(table.special.values())
    assert allowed.isdisjoint(range(len(table.tokens), len(table.tokens) + SPARE))
    assert set(table.encode("Hello <|")) <= allowed


def test_a_copy_of_a_matcher_is_independent(compiler: GrammarCompiler, table: TokenTable) -> None:
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, "ab|cd"))
    copy = matcher.copy()
    copy.feed(table.encode("a"))
    assert ids(copy.mask()).isdisjoint(table.encode("c"))
    assert ids(matcher.mask()) >= {*table.encode("a"), *table.encode("c")}


def test_a_token_outside_the_grammar_is_an_error(
    compiler: GrammarCompiler, table: TokenTable
) -> None:
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, "ab"))
    with pytest.raises(GrammarError):
        matcher.feed(table.encode("z"))
    with pytest.raises(GrammarError):
        matcher.mask()


KEYS = st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=4), st.sampled_from([None, 2]))
def test_every_json_object_is_accepted(
    compiler: GrammarCompiler, table: TokenTable, value: dict[str, Any], indent: int | None
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    text = text.replace("\x7f", "\\u007f")  # the form that the library accepts
    assert accepts(compiler, table, Grammar(GrammarKind.JSON_OBJECT), text)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4), st.integers())
def test_a_choice_accepts_exactly_its_texts(
    compiler: GrammarCompiler, table: TokenTable, choices: list[str], seed: int
) -> None:
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(choices))
    for choice in choices:
        assert accepts(compiler, table, grammar, choice)
    other = Random(seed).choice(choices)[:-1]
    assert accepts(compiler, table, grammar, other) == (other in choices)
