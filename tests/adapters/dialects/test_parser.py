"""Whatever a model writes and however it is cut, its pieces join to the same message."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.dialects.choosing import REASONING_MARKS, TOOL_STYLES
from adapters.dialects.dialect import ModelDialect
from gateway.ports import CallArguments, CallBegin, Piece, ToolChoice
from gateway.schema.rendering import ChoiceEnd, FinishedChoice, finished_choice

TOOLS = ("f", "weather")
DIALECTS = {
    name: ModelDialect(style, REASONING_MARKS["mistral" if name == "mistral" else "think"])
    for name, style in TOOL_STYLES.items()
}


class Read(NamedTuple):
    """A message without the ids of its calls."""

    content: str | None
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()


def read(name: str, parts: Sequence[str], prompt: str = "", tools: Sequence[str] = TOOLS) -> Read:
    """What a dialect makes of a text in parts."""
    parser = DIALECTS[name].parser(prompt, ToolChoice(tools), random.Random(1).getrandbits)
    assert parser is not None
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.feed(part)
    pieces += parser.finish()
    assert "" not in pieces
    whole: FinishedChoice = finished_choice(pieces, ChoiceEnd("stop"))
    calls = tuple((call.name, call.arguments) for call in whole.calls)
    return Read(whole.content, whole.reasoning, calls)


def cut(text: str, places: Sequence[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


HERMES = [
    ("Hello, world.", Read("Hello, world.")),
    ("", Read("")),
    (" a\n", Read(" a\n")),
    (
        '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}<"]}}\n</tool_call>',
        Read(None, None, (("f", '{"a": [1, "}<"]}'),)),
    ),
    (
        'Let me look.\n<tool_call>{"name":"weather","arguments":{}}</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"q": "\\"</tool_call>"}}\n</tool_call>\n',
        Read(
            "Let me look.",
            None,
            (("weather", "{}"), ("f", '{"q": "\\"</tool_call>"}')),
        ),
    ),
    (
        '<tool_call>{"arguments": {"a": "é"}, "name": "f"}</tool_call> done',
        Read(" done", None, (("f", '{"a": "é"}'),)),
    ),
    ('<tool_call>{"name": "f"}</tool_call>', Read(None, None, (("f", "{}"),))),
    (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Read(None, None, (("f", '{"a": 1}'),)),
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',  # a brace is missing
        Read(None, None, (("f", '{"a": 1}'),)),
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x"}</tool_call>.',
        Read(".", None, (("f", '{"a": 1}'),)),
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": "b', Read(None, None, (("f", '{"a": "b'),))),
    ("x <tool_call>\nnothing</tool_call> y", Read("x <tool_call>\nnothing</tool_call> y")),
    ('<tool_call>{"name": 1}</tool_call>', Read('<tool_call>{"name": 1}</tool_call>')),
    ('<tool_call>{"name": "f", "argu', Read('<tool_call>{"name": "f", "argu')),
    ("a < b <tool <tool_cal", Read("a < b <tool <tool_cal")),
    ("<think>\nhm, 1 < 2\n</think>\n\nYes.", Read("Yes.", "hm, 1 < 2")),
    ("<think>\n\n</think>\n\nYes.", Read("Yes.")),
    ("<think>cut", Read(None, "cut")),
    ("Say <think>x</think>", Read("Say <think>x</think>")),
    (
        '<think>a</think><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        Read(None, "a", (("f", "{}"),)),
    ),
    (
        '<think><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        Read(None, '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ),
]
LLAMA = [
    ("Hello", Read("Hello")),
    ('{"name": "f", "parameters": {"a": 1}}', Read(None, None, (("f", '{"a": 1}'),))),
    (
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "weather", "parameters": {}}',
        Read(None, None, (("f", "{}"), ("weather", "{}"))),
    ),
    (
        '{"type": "function", "function": {"name": "f", "parameters": {"a": 2}}}',
        Read(None, None, (("f", '{"a": 2}'),)),
    ),
    ('{"name": "Ann", "parameters": {}}', Read('{"name": "Ann", "parameters": {}}')),
    ('{"answer": 3}', Read('{"answer": 3}')),
    ('{"name": "Ann", "age": 3} ', Read('{"name": "Ann", "age": 3} ')),
    (" {", Read(" {")),
    ("<|python_tag|>print(1)", Read("<|python_tag|>print(1)")),
    (
        '{"name": "f", "parameters": {}}; nothing',
        Read("; nothing", None, (("f", "{}"),)),
    ),
]
MISTRAL = [
    ("Hello [there]", Read("Hello [there]")),
    (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, '
        '{"name": "weather", "arguments": {}, "id": "123456789"}]',
        Read(None, None, (("f", '{"a": [1]}'), ("weather", "{}"))),
    ),
    (
        'Well. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{}',
        Read("Well.", None, (("f", '{"a": 1}'), ("weather", "{}"))),
    ),
    ('[TOOL_CALLS]f{"a": 1}', Read(None, None, (("f", '{"a": 1}'),))),
    ("[TOOL_CALLS] what?", Read("[TOOL_CALLS] what?")),
    ("[TOOL_CALLS][1, 2]", Read("[TOOL_CALLS][1, 2]")),
    (
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, 2]',
        Read(", 2]", None, (("f", "{}"),)),
    ),
    ("[THINK]so[/THINK]Yes", Read("Yes", "so")),
]
SAMPLES = [
    *(("hermes", text, told) for text, told in HERMES),
    *(("llama3", text, told) for text, told in LLAMA),
    *(("mistral", text, told) for text, told in MISTRAL),
]


@pytest.mark.parametrize(("name", "text", "told"), SAMPLES)
def test_a_dialect_is_read_whole_and_letter_by_letter_and_in_any_two_parts(
    name: str, text: str, told: Read
) -> None:
    assert read(name, [text]) == told
    assert read(name, [*text]) == told
    assert {read(name, [text[:at], text[at:]]) for at in range(len(text))} <= {told}


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
        ),
        *("[/THINK]", "<|python_tag|>", '{"name": "f", ', '"arguments": {', '"parameters": {', "}"),
        *('"a": "', '"', "\\", "}}", "}]", ", ", ";", " ", "\n", "[", "]", "{", "x", "é", "<", "f"),
        *('{"name": "f", "arguments": {}}', '{"arguments": {}, "name": "f"}', '{"b": 1}'),
    ]
)


@settings(deadline=None, max_examples=600)
@given(
    name=st.sampled_from(sorted(DIALECTS)),
    parts=st.lists(FRAGMENTS, max_size=10),
    places=st.lists(st.integers(0, 300), max_size=12),
    is_open=st.booleans(),
)
def test_any_cutting_gives_the_same_message(
    name: str, parts: list[str], places: list[int], is_open: bool
) -> None:
    text = "".join(parts)
    marks = DIALECTS[name].reasoning
    assert marks is not None
    prompt = marks.open + "\n" if is_open else ""
    whole = read(name, [text], prompt)
    assert read(name, cut(text, places), prompt) == whole
    assert read(name, [*text], prompt) == whole


@settings(deadline=None)
@given(name=st.sampled_from(sorted(DIALECTS)), parts=st.lists(FRAGMENTS, max_size=8))
def test_where_nothing_is_a_call_or_reasoning_nothing_is_lost(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    message = read(name, [*text])
    if (
        message.reasoning is None
        and not message.calls
        and not text.lstrip().startswith(("<think>", "[THINK]"))
    ):
        assert message.content == text


def test_text_streams_as_it_comes_and_only_what_may_be_a_mark_is_held() -> None:
    parser = DIALECTS["hermes"].parser("", ToolChoice(TOOLS), random.Random(1).getrandbits)
    assert parser is not None
    parts = ["Hi", " you", " <b>", " <tool", "_call>", '{"name": "f", "arguments": {"a":', " 1"]
    pieces = [list(parser.feed(part)) for part in parts]
    assert pieces[:5] == [["Hi"], [" you"], [" <b>"], [], []]
    begin, *arguments = pieces[5]
    assert isinstance(begin, CallBegin)
    assert (begin.name, begin.call_id[:5]) == ("f", "call_")
    assert [*arguments, *pieces[6]] == [CallArguments(0, '{"a":'), CallArguments(0, " 1")]


def test_without_tools_calls_are_content_and_after_reasoning_text_passes_through() -> None:
    assert read("hermes", ["<think>a</think> <tool_call>{}"], tools=()) == Read(
        "<tool_call>{}", "a"
    )
    parser = DIALECTS["hermes"].parser("", ToolChoice(), random.Random(1).getrandbits)
    assert parser is not None
    assert [*parser.feed("x "), *parser.feed("<think>"), *parser.feed(" ")] == [
        "x ",
        "<think>",
        " ",
    ]


def test_a_prompt_that_opens_reasoning_is_heeded_and_can_be_closed() -> None:
    dialect = DIALECTS["hermes"]
    prompt = "<|im_start|>assistant\n<think>\n"
    assert read("hermes", ["why\n", "</think>\n\nso"], prompt) == Read("so", "why")
    closed = prompt + dialect.without_reasoning(prompt)
    assert read("hermes", ["so"], closed) == Read("so")
    assert dialect.without_reasoning(closed) == ""


def test_a_model_that_neither_thinks_nor_calls_needs_no_parser() -> None:
    bits = random.Random(1).getrandbits
    assert ModelDialect().parser("", ToolChoice(TOOLS), bits) is None
    assert ModelDialect(tools=TOOL_STYLES["hermes"]).parser("", ToolChoice(), bits) is None


def test_mistral_names_its_calls_with_nine_letters_or_digits() -> None:
    parser = DIALECTS["mistral"].parser("", ToolChoice(TOOLS), random.Random(1).getrandbits)
    assert parser is not None
    (begin, _) = parser.feed("[TOOL_CALLS]f[ARGS]{")
    assert isinstance(begin, CallBegin)
    assert len(begin.call_id) == 9
    assert begin.call_id.isalnum()


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_too_many_completes_the_answer(size: int) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"a{call}b{call}c"
    wanted = ToolChoice(TOOLS, max_calls=1)
    parser = DIALECTS["hermes"].parser("", wanted, random.Random(1).getrandbits)
    assert parser is not None
    pieces: list[Piece] = []
    for part in cut(text, range(0, len(text), size)):
        pieces += parser.feed(part)
    assert parser.is_complete
    message = finished_choice([*pieces, *parser.finish()], ChoiceEnd("stop"))
    assert message.content == "ab"
    assert [call.name for call in message.calls] == ["f"]
