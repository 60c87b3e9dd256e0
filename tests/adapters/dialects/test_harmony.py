import json
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapters.dialects.choosing import choose_dialect
from adapters.dialects.harmony import MARKS, HarmonyDialect
from adapters.dialects.jinja_template import JinjaTemplate
from gateway.ports import Piece, ToolChoice
from gateway.schema.rendering import ChoiceEnd, finished_choice

# In the style of gpt-oss' own template: the same headers, and the same limits of its messages.
TEMPLATE = """\
{{- '<|start|>system<|message|>Reasoning: ' ~ (reasoning_effort or 'medium') ~ '<|end|>' -}}
{%- if tools -%}
{{- '<|start|>developer<|message|># Tools\n\nnamespace functions {\n' -}}
{%- for tool in tools -%}
{{- 'type ' ~ tool.function.name ~ ' = (_: ' ~ (tool.function.parameters | tojson) ~ ') => any;' -}}
{%- endfor -%}{{- '\n}<|end|>' -}}
{%- endif -%}
{%- set last = namespace(name=none) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if "<|channel|>analysis<|message|>" in m.content -%}
{{- raise_exception('no tags in the content') -}}
{%- endif -%}
{%- if 'tool_calls' in m -%}
{%- if m.content and m.thinking -%}{{- raise_exception('not both') -}}{%- endif -%}
{%- if m.content or m.thinking -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ (m.content or m.thinking) ~ '<|end|>' -}}
{%- endif -%}
{%- set call = m.tool_calls[0].function -%}{%- set last.name = call.name -%}
{{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' -}}
{{- call.arguments | tojson -}}{{- '<|call|>' -}}
{%- else -%}
{%- if 'thinking' in m and loop.last and not add_generation_prompt -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content -}}
{{- '<|end|>' if add_generation_prompt or not loop.last else '<|return|>' -}}
{%- endif -%}
{%- elif m.role == 'tool' -%}
{{- '<|start|>functions.' ~ last.name ~ ' to=assistant<|channel|>commentary<|message|>' -}}
{{- m.content | tojson -}}{{- '<|end|>' -}}
{%- else -%}
{{- '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
PROMPT = "<|start|>user<|message|>Well?<|end|><|start|>assistant"
THINK = "<|channel|>analysis<|message|>Hm.\n\n2 < 3 |>.<|end|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
TOOLS = ToolChoice({"f": None, "g": None})


def parse(
    text: str, wanted: ToolChoice = TOOLS, prompt: str = PROMPT, size: int = 10_000
) -> list[Piece]:
    """The pieces of the output, fed in parts of `size` characters."""
    parser = choose_dialect(TEMPLATE).parser(prompt, wanted, random.Random(1).getrandbits)
    assert parser is not None
    pieces: list[Piece] = []
    for at in range(0, len(text), size):
        pieces += parser.feed(text[at : at + size])
    return [*pieces, *parser.finish()]


def message(pieces: list[Piece]) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    """Reasoning, content, and the calls."""
    found = finished_choice(pieces, ChoiceEnd("stop"))
    calls = [(call.name, call.arguments) for call in found.calls]
    return found.reasoning, found.content, calls


CASES: list[tuple[str, tuple[str | None, str | None, list[tuple[str, str]]]]] = [
    (
        THINK + "<|start|>assistant<|channel|>final<|message|>Yes, 2 < 3.\n<|return|>",
        ("Hm.\n\n2 < 3 |>.", "Yes, 2 < 3.\n", []),
    ),
    ("<|channel|>final<|message|>Yes.", (None, "Yes.", [])),
    ("<|channel|>analysis<|message|>cut off <|en", ("cut off <|en", None, [])),
    (THINK + CALL + '{"a": 1}<|call|>', ("Hm.\n\n2 < 3 |>.", None, [("f", '{"a": 1}')])),
    (
        " to=functions.g<|channel|>commentary json<|message|>{}<|call|>",
        (None, None, [("g", "{}")]),
    ),
    (
        "<|channel|>commentary<|message|>Let me see.<|end|>" + CALL + "{}",
        (None, "Let me see.", [("f", "{}")]),
    ),
    (THINK + "<|start|>assistant" + THINK, ("Hm.\n\n2 < 3 |>.\n\nHm.\n\n2 < 3 |>.", None, [])),
    ('{"answer": 1}', (None, '{"answer": 1}', [])),
    ("Plain to=nothing", (None, "Plain to=nothing", [])),
    ("<|channel|>!!<|message|>x", (None, "<|channel|>!!<|message|>x", [])),
    ("to=me, he said", (None, "to=me, he said", [])),
]


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
@pytest.mark.parametrize(("text", "expected"), CASES, ids=range(len(CASES)))
def test_channels_become_reasoning_content_and_calls(
    text: str, expected: tuple[str | None, str | None, list[tuple[str, str]]], size: int
) -> None:
    assert message(parse(text, size=size)) == expected


FRAGMENTS = st.sampled_from(
    [*MARKS, "assistant", "analysis", "final", "commentary", " to=functions.f", "json", " ", "\n"]
) | st.text(alphabet="a<|>{} ", max_size=4)


@settings(deadline=None, max_examples=200)
@given(parts=st.lists(FRAGMENTS, max_size=14), size=st.integers(1, 9))
@example([" to=functions.f", "<|message|>", "<|start|>"], 1)
@example(["<|constrain|>", "assistant", "<|message|>"], 1)
def test_any_split_gives_the_same_message(parts: list[str], size: int) -> None:
    text = "".join(parts)
    assert message(parse(text, size=size)) == message(parse(text))


def test_text_is_streamed_before_its_message_ends() -> None:
    parser = choose_dialect(TEMPLATE).parser(PROMPT, TOOLS, random.Random(1).getrandbits)
    assert parser is not None
    assert parser.feed("<|channel|>analysis<|message|>Let") == [("Let",)]
    assert parser.is_reasoning
    assert parser.feed(" me<|end") == [(" me",)]
    parser.feed("|><|start|>assistant<|channel|>commentary to=functions.f")
    assert not parser.is_reasoning
    begin, arguments = parser.feed('<|message|>{"a": ')
    assert (begin.name, arguments.text) == ("f", '{"a": ')


def test_calls_are_content_if_no_tools_are_offered() -> None:
    assert message(parse(CALL + '{"a": 1}<|call|>', ToolChoice())) == (None, '{"a": 1}', [])


def test_no_more_calls_than_the_maximum_are_returned() -> None:
    text = CALL + "{}<|call|>" + CALL + "{}<|call|>"
    assert message(parse(text, ToolChoice({"f": None}, 1)))[2] == [("f", "{}")]


def test_a_prompt_that_ends_within_a_message_is_continued() -> None:
    begun = f"{PROMPT}<|channel|>final<|message|>The answer"
    assert message(parse(" is 3.<|return|>", prompt=begun)) == (None, " is 3.", [])


def test_a_constrained_answer_follows_the_header_of_the_final_channel() -> None:
    dialect = choose_dialect(TEMPLATE)
    header = dialect.without_reasoning(PROMPT, has_tools=False)
    assert header == "<|channel|>final<|message|>"
    assert dialect.without_reasoning(PROMPT + header, has_tools=False) == ""
    assert dialect.without_reasoning(PROMPT, has_tools=True) == ""
    assert message(parse('{"a": 1}', prompt=PROMPT + header)) == (None, '{"a": 1}', [])


def called(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [
        {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    ]


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "Hello."},
        {"content": "Yes.\n\nReally <|so.", "reasoning_content": "Hm.\n"},
        {"content": "", "reasoning_content": "A tool.", "tool_calls": called("f", a='é "x" <b>')},
        {"content": "", "tool_calls": called("g")},
    ],
)
def test_a_message_is_parsed_as_the_template_wrote_it(answer: dict[str, Any]) -> None:
    template = JinjaTemplate({"default": TEMPLATE}, {})
    history = [{"role": "user", "content": "Well?"}]
    prompt = template.render(history)
    whole = template.render(
        [*history, {"role": "assistant", **answer}], add_generation_prompt=False
    )
    assert whole.startswith(prompt)
    reasoning, content, calls = message(parse(whole[len(prompt) :], prompt=prompt))
    assert (content or "", reasoning) == (answer["content"], answer.get("reasoning_content"))
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        (call["function"]["name"], call["function"]["arguments"])
        for call in answer.get("tool_calls", ())
    ]


def test_every_answer_can_be_sent_back() -> None:
    """The template rejects calls with both content and reasoning, which answers may have."""
    template = JinjaTemplate({"default": TEMPLATE}, {})
    answer = {"role": "assistant", "content": "Let me see.", "reasoning_content": "A tool."}
    calls = {**answer, "tool_calls": called("f", a=1)}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    prompt = template.render([{"role": "user", "content": "Well?"}, calls, result])
    assert "analysis<|message|>A tool.\n\nLet me see.<|end|>" in prompt
    assert '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"3"<|end|>' in prompt
    empty = {"role": "assistant", "content": None, "tool_calls": called("f", a=1)}
    assert 'json<|message|>{"a": 1}<|call|>' in template.render([empty, result])


def test_tools_and_the_effort_are_rendered_by_the_template() -> None:
    template = JinjaTemplate({"default": TEMPLATE}, {})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    prompt = template.render([], tools=tools, reasoning_effort="high")
    assert "Reasoning: high" in prompt
    assert 'type f = (_: {"type": "object"}) => any;' in prompt


@pytest.mark.parametrize(("tools", "reasoning"), [("harmony", "none"), ("none", "harmony")])
def test_harmony_is_chosen_by_either_name(tools: str, reasoning: str) -> None:
    dialect = choose_dialect("", tools, reasoning)
    assert isinstance(dialect, HarmonyDialect)
    assert dialect.has_tool_calls == (tools == "harmony")
    assert tuple(dialect.special_tokens) == MARKS
