from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from adapters.dialects.choosing import REASONING_MARKS, TOOL_STYLES, choose_dialect
from adapters.dialects.loading import load_chat_template
from engine.errors import StartupError
from gateway.ports import ToolCallGrammar
from tests.adapters.dialects.test_call_grammars import JSON_CALLS, allows, grammar_of

BUILTIN = Path(__file__).parents[3] / "adapters" / "builtin"


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


@pytest.mark.parametrize("names", [("f",), ("f", "g")])
@pytest.mark.parametrize("style", sorted(JSON_CALLS))
def test_a_required_call_is_the_only_output(style: str, names: tuple[str, ...]) -> None:
    grammar = grammar_of(
        style, ToolCallGrammar(dict.fromkeys(names, TREE), must_call=True, max_calls=1)
    )
    call = JSON_CALLS[style]
    for name in names:
        assert allows(grammar, call % (name, GOOD))
        assert not allows(grammar, call % (name, BAD))
    for text in ("", "Hello", call % ("h", GOOD), call % ("f", GOOD) * 2, "a" + call % ("f", GOOD)):
        assert not allows(grammar, text)


@pytest.mark.parametrize("style", sorted(JSON_CALLS))
def test_a_function_without_parameters_takes_none(style: str) -> None:
    grammar = grammar_of(style, ToolCallGrammar({"f": {}}, must_call=True))
    assert allows(grammar, JSON_CALLS[style] % ("f", "{}"))
    assert not allows(grammar, JSON_CALLS[style] % ("f", '{"a": 1}'))


@pytest.mark.parametrize("style", sorted(JSON_CALLS))
def test_arguments_cannot_be_filled_with_whitespace(style: str) -> None:
    grammar = grammar_of(style, ToolCallGrammar({"f": TREE}, must_call=True))
    assert allows(grammar, JSON_CALLS[style] % ("f", '{\n    "child": {}\n}'))
    assert not allows(grammar, JSON_CALLS[style] % ("f", '{"child":\n\n\n\n{}}'))


@pytest.mark.parametrize("style", ["llama3", "harmony"])
def test_calls_without_a_mark_in_text_cannot_be_constrained_within_it(style: str) -> None:
    assert choose_dialect("", style).call_grammar(ToolCallGrammar({"f": TREE})) is None
