import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapters.dialects.choosing import TOOL_STYLES, choose_dialect
from engine.request import Abort, FinishReason
from gateway.generation.choice_stream import ChoiceOptions
from gateway.ports import StreamParser, ToolChoice
from gateway.schema.openai.logprobs import LogprobsFormatter
from gateway.schema.rendering import ReportOptions, Usage
from tests.gateway.generation.choice_streams import (
    Output,
    ScriptedTokens,
    all_deltas,
    choice_of,
    rendered_as_chat,
    rendered_as_text,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é🙂"}}\n</tool_call>'
FRAGMENTS = st.sampled_from(
    [
        *("Hi", " there", "\n", " ", "é", "🙂", "\u200d", ".", "<", "\ufffd", "stop"),
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
        *('{"name": "f", "arguments": {', '"a": "', '"}', "}", "}}", "]", "[", ";", CALL),
        '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
        '{"name": "f", "parameters": {}}',
    ]
)
DATA = st.lists(st.one_of(FRAGMENTS.map(str.encode), st.binary(max_size=2)), max_size=8).map(
    b"".join
)
STOPS = st.lists(
    st.sampled_from(["stop", "é", "\n\n", "🙂.", "</think>", '"}', "<", " "]), max_size=2
)


def a_parser(style: str | None, max_calls: int | None = None) -> StreamParser | None:
    """A fresh parser whose calls are numbered alike each time."""
    dialect = choose_dialect("", style or "none", "think" if style else "none")
    choice = ToolChoice({"f": None}, max_calls)
    return dialect.parser("", choice, random.Random(1).getrandbits)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(borders)]


@settings(deadline=None, max_examples=250)
@given(
    data=DATA,
    places=st.lists(st.integers(0, 200), max_size=30),
    sizes=st.lists(st.integers(0, 4), max_size=20),
    style=st.sampled_from([None, *sorted(TOOL_STYLES)]),
    max_calls=st.sampled_from([None, 1]),
    stops=STOPS,
    report=st.builds(
        ReportOptions,
        logprobs=st.sampled_from([None, 1]),
        token_ids=st.booleans(),
        stop_string=st.booleans(),
        prompt_logprobs=st.none(),
        echo=st.just(False),
        special_tokens=st.just(False),
        progress=st.just(False),
    ),
    finish=st.sampled_from(FinishReason),
)
@example(
    data=CALL.encode() * 2,
    places=list(range(200)),
    sizes=[],
    style="hermes",
    max_calls=1,
    stops=[],
    report=ReportOptions(logprobs=1),
    finish=STOP,
)
@example(
    data=b"a\xf0\x9f\x99stop",
    places=[1, 2, 3],
    sizes=[1, 1],
    style=None,
    max_calls=None,
    stops=["stop"],
    report=ReportOptions(logprobs=1),
    finish=LENGTH,
)
def test_any_split_of_the_tokens_gives_the_same_message(
    data: bytes, places: list[int], sizes: list[int], style: str | None, **more: Any
) -> None:
    output = Output(cut(data, places), more["finish"])
    report: ReportOptions = more["report"]
    formatter = (
        LogprobsFormatter(output.feed, report.logprobs, report.token_ids)
        if report != ReportOptions()
        else None
    )

    def options() -> ChoiceOptions:
        parser = a_parser(style, more["max_calls"])
        return ChoiceOptions(output, tuple(more["stops"]), parser, report)

    at_once = rendered_as_chat(choice_of(output, [], options()), formatter)
    for split in (sizes, [1] * len(output.tokens)):
        chat = rendered_as_chat(choice_of(output, split, options()), formatter)
        assert (chat.whole, chat.usage) == (at_once.whole, at_once.usage)
        assert chat.streamed["message"] == chat.whole["message"]
        assert chat.streamed["finish_reason"] == chat.whole["finish_reason"]
        assert chat.streamed["logprobs"] == (chat.whole["logprobs"] or {"content": []})["content"]
        if style is None:
            text = rendered_as_text(choice_of(output, split, options()), formatter)
            assert text.streamed["token_ids"] == text.whole.get("token_ids", [])
            assert {**text.whole, **text.streamed} == {"token_ids": [], **text.whole}
            assert text.whole["text"] == chat.whole["message"]["content"]
            assert text.usage == chat.usage


@pytest.mark.parametrize("text", ["<think>Hm.</think>\n\nLook: " + CALL, "é🙂 <b>stop</b>"])
def test_every_split_in_two_gives_the_same_message(text: str) -> None:
    data = text.encode()
    output = Output([bytes([byte]) for byte in data], STOP)
    whole = rendered_as_chat(
        choice_of(output, [], ChoiceOptions(output, ("stop",), a_parser("hermes")))
    )
    for at in range(len(data)):
        rendered = rendered_as_chat(
            choice_of(output, [at], ChoiceOptions(output, ("stop",), a_parser("hermes")))
        )
        assert rendered.whole == whole.whole
        assert rendered.usage == whole.usage
        assert rendered.streamed["message"] == whole.whole["message"]


def test_a_message_with_a_call_has_null_content_and_ends_with_tool_calls() -> None:
    output = Output([b"<think>", b"hm", b"</think>", b"\n", CALL.encode()], STOP)
    rendered = rendered_as_chat(
        choice_of(output, [1] * 5, ChoiceOptions(output, parser=a_parser("hermes")))
    )
    message = rendered.whole["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == message["reasoning"] == "hm"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": "é🙂"}'}
    assert rendered.whole["finish_reason"] == rendered.streamed["finish_reason"] == "tool_calls"
    assert rendered.usage == Usage(0, 6, reasoning_tokens=3)


def test_a_call_cut_by_the_limit_ends_with_length() -> None:
    output = Output([b'<tool_call>{"name": "f", "arguments": {"a'], LENGTH)
    rendered = rendered_as_chat(
        choice_of(output, [], ChoiceOptions(output, parser=a_parser("hermes")))
    )
    assert rendered.streamed["finish_reason"] == "length"
    assert rendered.streamed["message"]["tool_calls"][0]["function"]["arguments"] == '{"a'


def test_an_empty_output_is_an_empty_text_after_its_role() -> None:
    output = Output([], STOP)
    rendered = rendered_as_chat(choice_of(output, [], ChoiceOptions(output)))
    assert rendered.streamed["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert rendered.whole["message"]["content"] == ""


def test_a_stop_string_closes_the_engine_stream_and_is_reported() -> None:
    output = Output([b"a", b"b", b"c", b"d"], STOP)
    tokens: Any = ScriptedTokens(output.chunks([]))
    choice = choice_of(output, [], ChoiceOptions(output, ("c",)))
    choice._tokens = tokens
    assert all_deltas(choice) == [["a", "b"]]
    assert choice.end == ("stop", "c")
    assert tokens.closed is Abort.STOP_STRING
    assert choice.num_tokens == 3
