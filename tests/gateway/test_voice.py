"""A voice's pieces are the same however its tokens came; streamed, they assemble to the whole."""

import asyncio
import json
from collections.abc import Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Abort, FinishReason
from engine.stream import TokenChunk
from gateway.ports import CallArguments, CallBegin, Piece, Reasoning
from gateway.schema.chat_frames import ChatFrames
from gateway.schema.envelope import UsageWish
from gateway.schema.frames import Header, Said, Usage, finished
from gateway.voice import Ear, Voice
from tests.gateway.assembling import assembled, payloads
from tests.gateway.rig import END, ByteDecoder

HEADER = Header("chatcmpl-1", 1_700_000_000, "m", "fp")


class Brackets:
    """A toy dialect: `(thought)`, `<x` calls tool x, `=y` adds to its arguments, `>` ends it."""

    is_complete = False

    def __init__(self) -> None:
        self.is_reasoning = False
        self._num_calls = 0
        self._mode = ""

    def feed(self, text: str) -> Sequence[Piece]:
        return [piece for char in text for piece in self._feed(char)]

    def _feed(self, char: str) -> list[Piece]:
        mode, self._mode = self._mode, ""
        if mode:
            return self._in_call(mode, char)
        if char in "()":
            self.is_reasoning = char == "("
            return []
        if char in "<=":
            self._mode = char
            return []
        return [Reasoning(char) if self.is_reasoning else char]

    def _in_call(self, mode: str, char: str) -> list[Piece]:
        if mode == "<":
            self._num_calls += 1
            return [CallBegin(self._num_calls - 1, f"call_{self._num_calls}", char)]
        return [CallArguments(self._num_calls - 1, char)] if self._num_calls else [mode, char]

    def finish(self) -> Sequence[Piece]:
        return [self._mode] if self._mode else []


class Chunks:
    """A lease whose tokens come in the given chunks; `closed` says why it was given back."""

    ask = SimpleNamespace(prompt=(1, 2))

    def __init__(self, chunks: Sequence[TokenChunk]) -> None:
        self._chunks = iter(chunks)
        self.closed: Abort | None = None

    async def next(self) -> TokenChunk:
        return next(self._chunks)

    def close(self, reason: Abort) -> None:
        self.closed = reason


class Count:
    """Counts of one voice."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice

    @property
    def usage(self) -> Usage:
        return Usage(0, self._voice.num_tokens, reasoning_tokens=self._voice.num_reasoning)


def chunked(tokens: Sequence[int], sizes: Sequence[int], finish: FinishReason) -> list[TokenChunk]:
    """The tokens in chunks of these sizes, then all that are left; the last has the end token."""
    left = iter(tokens)
    chunks = [TokenChunk(tuple(islice(left, size)), None) for size in sizes]
    end = (END,) if finish is FinishReason.STOP else ()
    return [*chunks, TokenChunk((*left, *end), finish)]


def heard(voice: Voice) -> list[Said]:
    """All that it says."""

    async def listen() -> list[Said]:
        said = []
        while voice.end is None:
            said.append(await voice.next())
        return said

    return asyncio.run(listen())


def a_voice(text: bytes, sizes: Sequence[int], stops: Sequence[str], finish: FinishReason) -> Voice:
    lease: Any = Chunks(chunked(text, sizes, finish))
    return Voice(0, lease, Ear(ByteDecoder(), stops, Brackets()))


def told(voice: Voice) -> tuple[dict[str, Any], dict[str, Any], Usage]:
    """One voice as a stream that was assembled, and as a whole reply; and its counts."""
    frames, tally = ChatFrames(HEADER, UsageWish()), Count(voice)
    said = heard(voice)
    assert voice.end is not None
    events = [frames.delta(0, some, tally) for some in said if some]
    streamed = b"".join((*events, frames.ending(0, voice.end, tally), frames.closing(tally)))
    pieces = [piece for some in said for piece in some]
    (whole,) = json.loads(frames.whole([finished(pieces, voice.end)], tally))["choices"]
    return assembled(payloads(streamed)), whole, tally.usage


@settings(deadline=None, max_examples=300)
@given(
    text=st.text("ab(<=>)é🙂", max_size=16),
    sizes=st.lists(st.integers(0, 4), max_size=12),
    stops=st.lists(st.text("ab(<=", min_size=1, max_size=2), max_size=2),
    finish=st.sampled_from(FinishReason),
)
def test_deltas_assemble_to_the_whole_message_for_any_chunking(
    text: str, sizes: list[int], stops: list[str], finish: FinishReason
) -> None:
    streamed, whole, usage = told(a_voice(text.encode(), sizes, stops, finish))
    message = whole["message"]
    del message["annotations"]  # there is no such delta
    assert streamed["message"] == message
    assert streamed["finish_reason"] == whole["finish_reason"]
    _, at_once, usage_at_once = told(a_voice(text.encode(), [], stops, finish))
    del at_once["message"]["annotations"]
    assert (at_once, usage_at_once) == (whole, usage)


def test_a_message_with_a_call_has_null_content_and_ends_with_tool_calls() -> None:
    streamed, whole, usage = told(a_voice(b"(hm)<f=1=2>"[:-1], [1] * 20, (), FinishReason.STOP))
    assert whole["message"]["content"] is None
    assert whole["message"]["reasoning_content"] == whole["message"]["reasoning"] == "hm"
    assert whole["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "12"}}
    ]
    assert whole["finish_reason"] == streamed["finish_reason"] == "tool_calls"
    assert usage == Usage(0, 11, reasoning_tokens=4)


def test_a_call_cut_by_the_limit_ends_with_length() -> None:
    streamed, _, _ = told(a_voice(b"<f=1", [], (), FinishReason.LENGTH))
    assert streamed["finish_reason"] == "length"
    assert streamed["message"]["tool_calls"][0]["function"]["arguments"] == "1"


def test_an_empty_answer_is_an_empty_text_and_its_role_comes_first() -> None:
    streamed, whole, _ = told(a_voice(b"", [], (), FinishReason.STOP))
    assert streamed["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert whole["message"]["content"] == ""


def test_a_stop_string_gives_the_lease_back_and_is_named() -> None:
    lease: Any = Chunks([TokenChunk(tuple(b"abcd"), None)])
    voice = Voice(0, lease, Ear(ByteDecoder(), ("c",)))
    assert heard(voice) == [["a", "b"]]
    assert voice.end == ("stop", "c")
    assert lease.closed is Abort.STOP_STRING
    assert voice.num_tokens == 3
