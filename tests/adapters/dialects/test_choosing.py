from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from adapters.dialects.choosing import REASONING_MARKS, TOOL_STYLES, choose_dialect
from adapters.dialects.loading import load_chat_template
from engine.errors import StartupError
from engine.grammar import GrammarError
from engine.step import Grammar
from gateway.ports import ToolCallGrammar
from tests.gateway.scripted_model import byte_grammars

BUILTIN = Path(__file__).parents[3] / "adapters" / "builtin"
COMPILER = byte_grammars()


@pytest.mark.parametrize(
    ("template", "style", "opened_by"),
    [
        ("", None, None),
        ("{{ messages }}", None, None),
        ("{% if tools %}<tool_call>{% endif %}", "hermes", None),
        ("<tool_call>", None, None),
        ("{% if tools %}<tool_call>\n<function=x>{% endif %}", "qwen-xml", None),
        ("{{ tools }}<|tool_call>call:<|channel>thought", "gemma4", "<|channel>"),
        ("{{ tools }}<function_calls>", "olmo3", None),
        ("{% if tools %}<tool_call>{% endif %}<think>", "hermes", "<think>"),
        ("{{ content.split('</think>') }}", None, "<think>"),
        ("{{ tools }}<|python_tag|>", "llama3", None),
        ("{{ tools }}[TOOL_CALLS]", "mistral", None),
        ("{{ tools }}<|tool_call|>", "granite", None),
        ("{{ tools }}<|tool_call|><think>", "granite", "<think>"),
        ("{% if 'tools' in message %}<|tool|>{{ message['tools'] }}<|/tool|>", "phi4", None),
        ("{{ tools }}<start_function_call>call:", "gemma", None),
        ("{% if xml_tools or tools %}<tool_call>{% endif %}<think>", "hermes", "<think>"),
        ("{{ tools }}[TOOL_CALLS][ARGS]", "mistral-args", None),
        ("{{ tools }}[TOOL_CALLS][THINK]", "mistral", "[THINK]"),
        ("{{ tools }}<|channel|>", "harmony", "<|channel|>analysis<|message|>"),
    ],
)
def test_the_template_determines_the_dialect(
    template: str, style: str | None, opened_by: str | None
) -> None:
    dialect = choose_dialect(template)
    assert dialect.has_tool_calls == (style is not None)
    assert dialect.tools == (TOOL_STYLES[style] if style else None)
    assert (dialect.reasoning.open if dialect.reasoning else None) == opened_by


def test_the_page_lists_every_dialect() -> None:
    page = (Path(__file__).parents[3] / "gateway" / "README.md").read_text()
    assert [name for name in TOOL_STYLES if f"`{name}`" not in page] == []
    assert [
        name for name in REASONING_MARKS if f"`{name}`" not in page.split("--reasoning-dialect")[1]
    ] == []


def test_the_builtin_model_uses_the_hermes_dialect() -> None:
    template = load_chat_template(BUILTIN)
    assert template is not None
    assert choose_dialect(template.source) == choose_dialect("", tools="hermes")


def test_a_name_overrides_the_template() -> None:
    template = "{% if tools %}<tool_call>{% endif %}<think>"
    assert choose_dialect(template, "none", "none") == choose_dialect("")
    assert choose_dialect(template, "llama3").tools == TOOL_STYLES["llama3"]


@pytest.mark.parametrize("flag", ["tools", "reasoning"])
def test_the_error_for_an_unknown_name_lists_the_known_ones(flag: str) -> None:
    with pytest.raises(StartupError, match=r"must be one of auto, none, .*not 'x'"):
        choose_dialect("", **{flag: "x"})


TREE: Mapping[str, Any] = {
    "type": "object",
    "properties": {"child": {"$ref": "#/$defs/node"}},
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}},
            "additionalProperties": False,
        }
    },
}
GOOD, BAD = '{"child": {"next": {}}}', '{"child": 1}'
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "llama3": '{"name": "%s", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "%s", "arguments": %s}]',
    "mistral-args": "[TOOL_CALLS]%s[ARGS]%s",
    "harmony": "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s",
    "granite": '<|tool_call|>[{"name": "%s", "arguments": %s}]',
    "phi4": '<|tool_call|>[{"name": "%s", "arguments": %s}]<|/tool_call|>',
}
MARKED = sorted(WRITTEN.keys() - {"llama3", "harmony"})


def grammar_of(style: str, calls: ToolCallGrammar) -> Grammar:
    grammar = choose_dialect("", style).call_grammar(calls)
    assert grammar is not None
    return grammar


def allows(grammar: Grammar, text: str) -> bool:
    """Whether the text is a complete output."""
    matcher = COMPILER.compile(grammar)
    try:
        matcher.feed(list(text.encode()))
        return matcher.mask().accepts
    except GrammarError:
        return False


@pytest.mark.parametrize("names", [("f",), ("f", "g")])
@pytest.mark.parametrize("style", sorted(WRITTEN))
def test_a_required_call_is_the_only_output(style: str, names: tuple[str, ...]) -> None:
    grammar = grammar_of(
        style, ToolCallGrammar(dict.fromkeys(names, TREE), must_call=True, max_calls=1)
    )
    call = WRITTEN[style]
    for name in names:
        assert allows(grammar, call % (name, GOOD))
        assert not allows(grammar, call % (name, BAD))
    for text in ("", "Hello", call % ("h", GOOD), call % ("f", GOOD) * 2, "a" + call % ("f", GOOD)):
        assert not allows(grammar, text)


@pytest.mark.parametrize("style", MARKED)
def test_parallel_calls_are_allowed_without_a_maximum(style: str) -> None:
    grammar = grammar_of(style, ToolCallGrammar({"f": TREE}, must_call=True))
    assert allows(grammar, WRITTEN[style] % ("f", GOOD) * 2)


@pytest.mark.parametrize("style", MARKED)
def test_strict_calls_are_constrained_within_free_text(style: str) -> None:
    grammar = grammar_of(style, ToolCallGrammar({"f": TREE, "loose": None}))
    call = WRITTEN[style]
    for text in ("", "Hello", "So:" + call % ("f", GOOD) + "!", call % ("loose", '{"a": 1}')):
        assert allows(grammar, text)
    assert not allows(grammar, "So:" + call % ("f", BAD))


@pytest.mark.parametrize("style", sorted(WRITTEN))
def test_an_answer_schema_is_an_alternative_to_a_call(style: str) -> None:
    grammar = grammar_of(style, ToolCallGrammar({"f": TREE}, answer=TREE))
    assert allows(grammar, WRITTEN[style] % ("f", GOOD))
    assert allows(grammar, GOOD)
    assert not allows(grammar, "Hello")
    assert not allows(grammar, BAD)


@pytest.mark.parametrize("style", sorted(WRITTEN))
def test_a_function_without_parameters_takes_none(style: str) -> None:
    grammar = grammar_of(style, ToolCallGrammar({"f": {}}, must_call=True))
    assert allows(grammar, WRITTEN[style] % ("f", "{}"))
    assert not allows(grammar, WRITTEN[style] % ("f", '{"a": 1}'))


@pytest.mark.parametrize("style", sorted(WRITTEN))
def test_arguments_cannot_be_filled_with_whitespace(style: str) -> None:
    grammar = grammar_of(style, ToolCallGrammar({"f": TREE}, must_call=True))
    assert allows(grammar, WRITTEN[style] % ("f", '{\n    "child": {}\n}'))
    assert not allows(grammar, WRITTEN[style] % ("f", '{"child":\n\n\n\n{}}'))


@pytest.mark.parametrize("style", ["llama3", "harmony"])
def test_calls_without_a_mark_in_text_cannot_be_constrained_within_it(style: str) -> None:
    assert choose_dialect("", style).call_grammar(ToolCallGrammar({"f": TREE})) is None
