import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.dialects.choosing import TOOL_STYLES, choose_dialect
from adapters.dialects.dialect import ModelDialect
from gateway.ports import CallArguments, CallBegin, Piece, StreamParser, ToolChoice
from gateway.schema.rendering import ChoiceEnd, FinishedChoice, finished_choice

TOOLS = ("f", "weather")
DIALECTS = {
    name: choose_dialect("", name, name if name in ("mistral", "harmony", "gemma4") else "think")
    for name in TOOL_STYLES
}


class ParsedMessage(NamedTuple):
    """A message without the ids of its calls."""

    content: str | None
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()


def parser_of(
    name: str, prompt: str = "", tools: Sequence[str] = TOOLS, max_calls: int | None = None
) -> StreamParser:
    wanted = ToolChoice(dict.fromkeys(tools), max_calls=max_calls)
    parser = DIALECTS[name].parser(prompt, wanted, random.Random(1).getrandbits)
    assert parser is not None
    return parser


def read(
    name: str, parts: Sequence[str], prompt: str = "", tools: Sequence[str] = TOOLS
) -> ParsedMessage:
    """Parse a text that arrives in parts."""
    parser, pieces = parser_of(name, prompt, tools), list[Piece]()
    for part in parts:
        pieces += parser.feed(part)
    pieces += parser.finish()
    assert "" not in pieces
    whole: FinishedChoice = finished_choice(pieces, ChoiceEnd("stop"))
    calls = tuple((call.name, call.arguments) for call in whole.calls)
    return ParsedMessage(whole.content, whole.reasoning, calls)


def split(text: str, places: Sequence[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


HERMES = [
    ("Hello, world.", ParsedMessage("Hello, world.")),
    ("", ParsedMessage("")),
    (" a\n", ParsedMessage(" a\n")),
    (
        '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}<"]}}\n</tool_call>',
        ParsedMessage(None, None, (("f", '{"a": [1, "}<"]}'),)),
    ),
    (
        'Let me look.\n<tool_call>{"name":"weather","arguments":{}}</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"q": "\\"</tool_call>"}}\n</tool_call>\n',
        ParsedMessage(
            "Let me look.",
            None,
            (("weather", "{}"), ("f", '{"q": "\\"</tool_call>"}')),
        ),
    ),
    (
        '<tool_call>{"arguments": {"a": "é"}, "name": "f"}</tool_call> done',
        ParsedMessage(" done", None, (("f", '{"a": "é"}'),)),
    ),
    ('<tool_call>{"name": "f"}</tool_call>', ParsedMessage(None, None, (("f", "{}"),))),
    (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ParsedMessage(None, None, (("f", '{"a": 1}'),)),
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',  # a brace is missing
        ParsedMessage(None, None, (("f", '{"a": 1}'),)),
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x"}</tool_call>.',
        ParsedMessage(".", None, (("f", '{"a": 1}'),)),
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        ParsedMessage(None, None, (("f", '{"a": "b'),)),
    ),
    ("x <tool_call>\nnothing</tool_call> y", ParsedMessage("x <tool_call>\nnothing</tool_call> y")),
    ('<tool_call>{"name": 1}</tool_call>', ParsedMessage('<tool_call>{"name": 1}</tool_call>')),
    ('<tool_call>{"name": "f", "argu', ParsedMessage('<tool_call>{"name": "f", "argu')),
    ("a < b <tool <tool_cal", ParsedMessage("a < b <tool <tool_cal")),
    ("<think>\nhm, 1 < 2\n</think>\n\nYes.", ParsedMessage("Yes.", "hm, 1 < 2")),
    ("<think>\n\n</think>\n\nYes.", ParsedMessage("Yes.")),
    ("<think>cut", ParsedMessage(None, "cut")),
    ("Say <think>x</think>", ParsedMessage("Say <think>x</think>")),
    (
        '<think>a</think><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ParsedMessage(None, "a", (("f", "{}"),)),
    ),
    (
        '<think><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ParsedMessage(None, '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ),
]
LLAMA = [
    ("Hello", ParsedMessage("Hello")),
    ('{"name": "f", "parameters": {"a": 1}}', ParsedMessage(None, None, (("f", '{"a": 1}'),))),
    (
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "weather", "parameters": {}}',
        ParsedMessage(None, None, (("f", "{}"), ("weather", "{}"))),
    ),
    (
        '{"type": "function", "function": {"name": "f", "parameters": {"a": 2}}}',
        ParsedMessage(None, None, (("f", '{"a": 2}'),)),
    ),
    ('{"name": "Ann", "parameters": {}}', ParsedMessage('{"name": "Ann", "parameters": {}}')),
    ('{"answer": 3}', ParsedMessage('{"answer": 3}')),
    ('{"name": "Ann", "age": 3} ', ParsedMessage('{"name": "Ann", "age": 3} ')),
    (" {", ParsedMessage(" {")),
    ("<|python_tag|>print(1)", ParsedMessage("<|python_tag|>print(1)")),
    (
        '{"name": "f", "parameters": {}}; nothing',
        ParsedMessage("; nothing", None, (("f", "{}"),)),
    ),
]
MISTRAL = [
    ("Hello [there]", ParsedMessage("Hello [there]")),
    (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, '
        '{"name": "weather", "arguments": {}, "id": "123456789"}]',
        ParsedMessage(None, None, (("f", '{"a": [1]}'), ("weather", "{}"))),
    ),
    (
        'Well. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{}',
        ParsedMessage("Well.", None, (("f", '{"a": 1}'), ("weather", "{}"))),
    ),
    ('[TOOL_CALLS]f{"a": 1}', ParsedMessage(None, None, (("f", '{"a": 1}'),))),
    ("[TOOL_CALLS] what?", ParsedMessage("[TOOL_CALLS] what?")),
    ("[TOOL_CALLS][1, 2]", ParsedMessage("[TOOL_CALLS][1, 2]")),
    (
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, 2]',
        ParsedMessage(", 2]", None, (("f", "{}"),)),
    ),
    ("[THINK]so[/THINK]Yes", ParsedMessage("Yes", "so")),
]
SAMPLES = [
    *(("hermes", text, expected) for text, expected in HERMES),
    *(("llama3", text, expected) for text, expected in LLAMA),
    *(("mistral", text, expected) for text, expected in MISTRAL),
]


@pytest.mark.parametrize(("name", "text", "expected"), SAMPLES)
def test_an_output_is_parsed_whole_by_character_and_in_any_two_parts(
    name: str, text: str, expected: ParsedMessage
) -> None:
    assert read(name, [text]) == expected
    assert read(name, [*text]) == expected
    assert {read(name, [text[:at], text[at:]]) for at in range(len(text))} <= {expected}


FRAGMENTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[THINK]",
            "<|channel>thought\n",
            "<function_calls>",
        ),
        *("<channel|>", '<|tool_call>call:f{a:<|"|>x<|"|>}', "<tool_call|>", "</function_calls>"),
        *("<function=f>\n", "<parameter=a>\n", "\n</parameter>\n", "</function>\n", "f(a=1)"),
        *("[/THINK]", "<|python_tag|>", '{"name": "f", ', '"arguments": {', '"parameters": {', "}"),
        *('"a": "', '"', "\\", "}}", "}]", ", ", ";", " ", "\n", "[", "]", "{", "x", "é", "<", "f"),
        *('{"name": "f", "arguments": {}}', '{"arguments": {}, "name": "f"}', '{"b": 1}'),
    ]
)


@settings(deadline=None, max_examples=300)
@given(
    name=st.sampled_from(sorted(DIALECTS)),
    parts=st.lists(FRAGMENTS, max_size=10),
    places=st.lists(st.integers(0, 300), max_size=12),
    is_open=st.booleans(),
)
def test_any_split_gives_the_same_message(
    name: str, parts: list[str], places: list[int], is_open: bool
) -> None:
    text = "".join(parts)
    marks = DIALECTS[name].reasoning
    assert marks is not None
    prompt = f"{marks.open}{marks.label}\n" if is_open else ""
    whole = read(name, [text], prompt)
    assert read(name, split(text, places), prompt) == whole
    assert read(name, [*text], prompt) == whole


@settings(deadline=None)
@given(name=st.sampled_from(sorted(DIALECTS)), parts=st.lists(FRAGMENTS, max_size=8))
def test_text_without_calls_or_reasoning_is_unchanged(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    message = read(name, [*text])
    if (
        message.reasoning is None
        and not message.calls
        and not text.lstrip().startswith(("<think>", "[THINK]", "<|channel>thought"))
    ):
        assert message.content == text


def test_only_text_that_may_be_a_mark_is_withheld() -> None:
    parser = parser_of("hermes")
    parts = ["Hi", " you", " <b>", " <tool", "_call>", '{"name": "f", "arguments": {"a":', " 1"]
    pieces = [list(parser.feed(part)) for part in parts]
    assert pieces[:5] == [["Hi"], [" you"], [" <b>"], [], []]
    begin, *arguments = pieces[5]
    assert isinstance(begin, CallBegin)
    assert (begin.name, begin.call_id[:5]) == ("f", "call_")
    assert [*arguments, *pieces[6]] == [CallArguments(0, '{"a":'), CallArguments(0, " 1")]


def test_without_tools_a_call_is_content() -> None:
    assert read("hermes", ["<think>a</think> <tool_call>{}"], tools=()) == ParsedMessage(
        "<tool_call>{}", "a"
    )
    parser, parts = parser_of("hermes", tools=()), ["x ", "<think>", " "]
    assert [piece for part in parts for piece in parser.feed(part)] == parts


def test_reasoning_that_the_prompt_opens_is_recognised_and_can_be_closed() -> None:
    dialect = DIALECTS["hermes"]
    prompt = "<|im_start|>assistant\n<think>\n"
    assert read("hermes", ["why\n", "</think>\n\nso"], prompt) == ParsedMessage("so", "why")
    closed = prompt + dialect.without_reasoning(prompt, has_tools=False)
    assert read("hermes", ["so"], closed) == ParsedMessage("so")
    assert dialect.without_reasoning(closed, has_tools=False) == ""


def test_a_model_without_reasoning_and_calls_needs_no_parser() -> None:
    bits = random.Random(1).getrandbits
    assert ModelDialect().parser("", ToolChoice(dict.fromkeys(TOOLS)), bits) is None
    assert ModelDialect(tools=TOOL_STYLES["hermes"]).parser("", ToolChoice(), bits) is None


def test_mistral_call_ids_are_nine_letters_or_digits() -> None:
    (begin, _) = parser_of("mistral").feed("[TOOL_CALLS]f[ARGS]{")
    assert isinstance(begin, CallBegin)
    assert len(begin.call_id) == 9
    assert begin.call_id.isalnum()


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_beyond_the_maximum_completes_the_output(size: int) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"a{call}b{call}c"
    parser, pieces = parser_of("hermes", max_calls=1), list[Piece]()
    for part in split(text, range(0, len(text), size)):
        pieces += parser.feed(part)
    assert parser.is_complete
    message = finished_choice([*pieces, *parser.finish()], ChoiceEnd("stop"))
    assert message.content == "ab"
    assert [call.name for call in message.calls] == ["f"]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}, "name": "f"}</tool_call>'),
        ("llama3", '{"name": "f", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}"),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]'),
        ("qwen-xml", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        ("olmo3", "<function_calls>f()</function_calls>"),
        ("gemma", "<start_function_call>call:f{}<end_function_call>"),
    ],
)
def test_a_call_of_a_tool_that_was_not_offered_is_content(name: str, call: str) -> None:
    assert read(name, [call], tools=("f",)).calls == (("f", "{}"),)
    assert read(name, [call], tools=("weather",)) == ParsedMessage(call)
