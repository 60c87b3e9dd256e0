"""A voice's message is the same however its tokens came; streamed, it assembles to the whole."""

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapters.dialects.choosing import REASONING_MARKS, TOOL_STYLES
from adapters.dialects.dialect import ModelDialect
from engine.request import Abort, FinishReason
from gateway.generation.choice_stream import ChoiceOptions
from gateway.ports import StreamParser, ToolChoice
from gateway.schema.openai.logprobs import LogprobsFormatter
from gateway.schema.rendering import ReportOptions, Usage
from tests.gateway.generation.choice_streams import (
    Answer,
    Lease,
    a_voice,
    heard_as_text,
    heard_in_chat,
    listen,
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
    tools = TOOL_STYLES[style] if style else None
    dialect = ModelDialect(tools, REASONING_MARKS["think"] if style else None)
    wanted = ToolChoice(("f",), max_calls)
    return dialect.parser("", wanted, random.Random(1).getrandbits)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(borders)]


@settings(deadline=None, max_examples=500)
@given(
    data=DATA,
    places=st.lists(st.integers(0, 200), max_size=30),
    sizes=st.lists(st.integers(0, 4), max_size=20),
    style=st.sampled_from([None, *sorted(TOOL_STYLES)]),
    max_calls=st.sampled_from([None, 1]),
    stops=STOPS,
    told=st.builds(
        ReportOptions,
        logprobs=st.sampled_from([None, 1]),
        token_ids=st.booleans(),
        stop_string=st.booleans(),
        prompt_logprobs=st.none(),
        echo=st.just(False),
        special_tokens=st.just(False),
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
    told=ReportOptions(logprobs=1),
    finish=STOP,
)
@example(
    data=b"a\xf0\x9f\x99stop",
    places=[1, 2, 3],
    sizes=[1, 1],
    style=None,
    max_calls=None,
    stops=["stop"],
    told=ReportOptions(logprobs=1),
    finish=LENGTH,
)
def test_any_split_of_the_tokens_gives_the_same_message(
    data: bytes, places: list[int], sizes: list[int], style: str | None, **more: Any
) -> None:
    answer = Answer(cut(data, places), more["finish"])
    told: ReportOptions = more["told"]
    spelling = (
        LogprobsFormatter(answer.feed, told.logprobs, told.token_ids)
        if told != ReportOptions()
        else None
    )

    def ear() -> ChoiceOptions:
        parser = a_parser(style, more["max_calls"])
        return ChoiceOptions(answer, tuple(more["stops"]), parser, told)

    at_once = heard_in_chat(a_voice(answer, [], ear()), spelling)
    for split in (sizes, [1] * len(answer.tokens)):
        chat = heard_in_chat(a_voice(answer, split, ear()), spelling)
        assert (chat.whole, chat.usage) == (at_once.whole, at_once.usage)
        assert chat.streamed["message"] == chat.whole["message"]
        assert chat.streamed["finish_reason"] == chat.whole["finish_reason"]
        assert chat.streamed["logprobs"] == (chat.whole["logprobs"] or {"content": []})["content"]
        if style is None:
            text = heard_as_text(a_voice(answer, split, ear()), spelling)
            assert text.streamed["token_ids"] == text.whole.get("token_ids", [])
            assert {**text.whole, **text.streamed} == {"token_ids": [], **text.whole}
            assert text.whole["text"] == chat.whole["message"]["content"]
            assert text.usage == chat.usage


@pytest.mark.parametrize("text", ["<think>Hm.</think>\n\nLook: " + CALL, "é🙂 <b>stop</b>"])
def test_every_split_in_two_gives_the_same_message(text: str) -> None:
    data = text.encode()
    answer = Answer([bytes([byte]) for byte in data], STOP)
    whole = heard_in_chat(a_voice(answer, [], ChoiceOptions(answer, ("stop",), a_parser("hermes"))))
    for at in range(len(data)):
        heard = heard_in_chat(
            a_voice(answer, [at], ChoiceOptions(answer, ("stop",), a_parser("hermes")))
        )
        assert heard.whole == whole.whole
        assert heard.usage == whole.usage
        assert heard.streamed["message"] == whole.whole["message"]


def test_a_message_with_a_call_has_null_content_and_ends_with_tool_calls() -> None:
    answer = Answer([b"<think>", b"hm", b"</think>", b"\n", CALL.encode()], STOP)
    heard = heard_in_chat(
        a_voice(answer, [1] * 5, ChoiceOptions(answer, parser=a_parser("hermes")))
    )
    message = heard.whole["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == message["reasoning"] == "hm"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": "é🙂"}'}
    assert heard.whole["finish_reason"] == heard.streamed["finish_reason"] == "tool_calls"
    assert heard.usage == Usage(0, 6, reasoning_tokens=3)


def test_a_call_cut_by_the_limit_ends_with_length() -> None:
    answer = Answer([b'<tool_call>{"name": "f", "arguments": {"a'], LENGTH)
    heard = heard_in_chat(a_voice(answer, [], ChoiceOptions(answer, parser=a_parser("hermes"))))
    assert heard.streamed["finish_reason"] == "length"
    assert heard.streamed["message"]["tool_calls"][0]["function"]["arguments"] == '{"a'


def test_an_empty_answer_is_an_empty_text_and_its_role_comes_first() -> None:
    answer = Answer([], STOP)
    heard = heard_in_chat(a_voice(answer, [], ChoiceOptions(answer)))
    assert heard.streamed["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert heard.whole["message"]["content"] == ""


def test_a_stop_string_gives_the_lease_back_and_is_named() -> None:
    answer = Answer([b"a", b"b", b"c", b"d"], STOP)
    lease: Any = Lease(answer.chunks([]))
    voice = a_voice(answer, [], ChoiceOptions(answer, ("c",)))
    voice._tokens = lease
    assert listen(voice) == [["a", "b"]]
    assert voice.end == ("stop", "c")
    assert lease.closed is Abort.STOP_STRING
    assert voice.num_tokens == 3
