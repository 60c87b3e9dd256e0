"""A dialect is seen in the chat template, or asked for by name; forced calls have a schema."""

from pathlib import Path

import jsonschema_rs
import pytest

from adapters.dialects.choosing import choose_dialect
from adapters.dialects.loading import load_chat_template
from engine.errors import RefusedToStart

BUILTIN = Path(__file__).parents[3] / "adapters" / "builtin"


@pytest.mark.parametrize(
    ("template", "prefix", "opened_by"),
    [
        ("", None, None),
        ("{{ messages }}", None, None),
        ("{% if tools %}<tool_call>{% endif %}", "<tool_call>\n", None),
        ("{% if tools %}<tool_call>\n<function=x>{% endif %}", None, None),
        ("{% if tools %}<tool_call>{% endif %}<think>", "<tool_call>\n", "<think>"),
        ("{{ content.split('</think>') }}", None, "<think>"),
        ("{{ tools }}<|python_tag|>", "", None),
        ("{{ tools }}[TOOL_CALLS]", "[TOOL_CALLS]", None),
        ("{{ tools }}[TOOL_CALLS][THINK]", "[TOOL_CALLS]", "[THINK]"),
    ],
)
def test_the_template_says_which(template: str, prefix: str | None, opened_by: str | None) -> None:
    dialect = choose_dialect(template)
    assert dialect.reads_calls == (prefix is not None)
    if prefix is not None:
        assert dialect.force({"f": None}, is_parallel=True).prefix == prefix
    assert (dialect.reasoning.open if dialect.reasoning else None) == opened_by


def test_the_builtin_model_calls_as_hermes_does() -> None:
    template = load_chat_template(BUILTIN)
    assert template is not None
    assert choose_dialect(template.source) == choose_dialect("", tools="hermes")


def test_a_name_counts_more_than_the_template() -> None:
    template = "{% if tools %}<tool_call>{% endif %}<think>"
    assert choose_dialect(template, "none", "none") == choose_dialect("")
    assert choose_dialect(template, "llama3").force({"f": None}, is_parallel=True).prefix == ""


@pytest.mark.parametrize("flag", ["tools", "reasoning"])
def test_an_unknown_name_is_refused_with_those_that_exist(flag: str) -> None:
    with pytest.raises(RefusedToStart, match=r"must be one of auto, none, .*not 'x'"):
        choose_dialect("", **{flag: "x"})


TREE = {
    "type": "object",
    "properties": {"child": {"$ref": "#/$defs/node"}},
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
}


@pytest.mark.parametrize("names", [("f",), ("f", "g")])
@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral"])
def test_a_forced_calls_schema_takes_such_calls_only(style: str, names: tuple[str, ...]) -> None:
    forced = choose_dialect("", style).force(dict.fromkeys(names, TREE), is_parallel=False)
    key = "parameters" if style == "llama3" else "arguments"
    call = {"name": "f", key: {"child": {"next": {"next": {}}}}}
    wrong = [
        {"name": "h", key: {}},
        {"name": "f"},
        {"name": "f", key: {"child": {"next": 1}}},
        {**call, "x": 1},
    ]
    as_answer = (lambda call: [call]) if style == "mistral" else (lambda call: call)
    validator = jsonschema_rs.validator_for(dict(forced.schema))
    assert validator.is_valid(as_answer(call))
    assert not any(validator.is_valid(as_answer(call)) for call in wrong)


def test_only_an_array_has_room_for_parallel_calls() -> None:
    calls = [{"name": "f", "arguments": {}}] * 2
    for is_parallel in (True, False):
        forced = choose_dialect("", "mistral").force({"f": None}, is_parallel=is_parallel)
        validator = jsonschema_rs.validator_for(dict(forced.schema))
        assert validator.is_valid(calls) == is_parallel
