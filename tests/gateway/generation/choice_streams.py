"""Voices over leases that a test has written, and what surfaces make of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple

from engine.request import Abort, FinishReason
from engine.step import TokenLogprobs
from engine.stream import TokenChunk
from gateway.generation.choice_stream import ChoiceOptions, ChoiceStream
from gateway.schema.openai.chat_renderer import ChatRenderer
from gateway.schema.openai.completion_renderer import CompletionRenderer
from gateway.schema.openai.event_envelope import UsageOptions
from gateway.schema.openai.logprobs import LogprobsFormatter
from gateway.schema.rendering import Delta, ResponseHeader, Usage, finished_choice
from tests.gateway.serve.assembling import assembled, payloads

HEADER = ResponseHeader("chatcmpl-1", 1_700_000_000, "m", "fp")
PROMPT = (1, 2)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: the bytes of its tokens, and the end; the end token's id is their number."""

    tokens: Sequence[bytes]
    finish: FinishReason

    def feed(self, token_id: int) -> bytes:
        """As a decoder."""
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    def chunks(self, sizes: Sequence[int]) -> list[TokenChunk]:
        """Tokens in chunks of these sizes, then all that are left; the last has the end token."""
        left = iter(range(len(self.tokens)))
        chunks = [(tuple(islice(left, size)), None) for size in sizes]
        end = (len(self.tokens),) if self.finish is FinishReason.STOP else ()
        told = [*chunks, ((*left, *end), self.finish)]
        return [
            TokenChunk(ids, finish, tuple(TokenLogprobs(-i / 8, 1, ((i, -i / 8),)) for i in ids))
            for ids, finish in told
        ]


class Lease:
    """A lease whose tokens come in the given chunks; `closed` says why it was given back."""

    spec = SimpleNamespace(prompt=PROMPT)

    def __init__(self, chunks: Sequence[TokenChunk]) -> None:
        self._chunks = iter(chunks)
        self.closed: Abort | None = None

    async def next(self) -> TokenChunk:
        return next(self._chunks)

    def close(self, reason: Abort) -> None:
        self.closed = reason


class Count:
    """Counts of one voice."""

    def __init__(self, voice: ChoiceStream) -> None:
        self._voice = voice

    @property
    def usage(self) -> Usage:
        return Usage(0, self._voice.num_tokens, reasoning_tokens=self._voice.num_reasoning)


class Heard(NamedTuple):
    """One voice as a whole reply (a choice), as a stream that was assembled, and its counts."""

    whole: dict[str, Any]
    streamed: dict[str, Any]
    usage: Usage


def listen(voice: ChoiceStream) -> list[Delta]:
    """All that it says. Nothing is waited for, so this needs no loop."""
    said: list[Delta] = []
    while voice.end is None:
        try:
            voice.next().send(None)
        except StopIteration as done:
            said.append(done.value)
    return said


def a_voice(answer: Answer, sizes: Sequence[int], ear: ChoiceOptions) -> ChoiceStream:
    """A voice that will say the answer, its tokens gathered in chunks of these sizes."""
    lease: Any = Lease(answer.chunks(sizes))
    return ChoiceStream(0, lease, ear)


def heard_in_chat(voice: ChoiceStream, spelling: LogprobsFormatter | None = None) -> Heard:
    """As chat tells it."""
    whole, stream, usage = _told(voice, ChatRenderer(HEADER, UsageOptions(), spelling))
    del whole["message"]["annotations"]  # there is no such delta
    return Heard(whole, assembled(payloads(stream)), usage)


def heard_as_text(voice: ChoiceStream, spelling: LogprobsFormatter | None = None) -> Heard:
    """As text completions tell it."""
    whole, stream, usage = _told(voice, CompletionRenderer(HEADER, UsageOptions(), spelling))
    choices = [chunk["choices"][0] for chunk in payloads(stream)]
    columns: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            columns.setdefault(name, []).extend(values)
    streamed = {
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": columns or None,
        "finish_reason": choices[-1]["finish_reason"],
        "token_ids": [i for choice in choices for i in choice.get("token_ids", ())],
    }
    return Heard(whole, streamed, usage)


def _told(
    voice: ChoiceStream, frames: ChatRenderer | CompletionRenderer
) -> tuple[dict[str, Any], bytes, Usage]:
    tally = Count(voice)
    said = listen(voice)
    assert voice.end is not None
    events = [frames.delta(0, some, tally) for some in said if some]
    stream = b"".join((*events, frames.ending(0, voice.end, tally), frames.closing(tally)))
    pieces: list[Any] = [piece for some in said for piece in some]
    assert "" not in pieces
    (whole,) = json.loads(frames.whole([finished_choice(pieces, voice.end)], tally))["choices"]
    return whole, stream, tally.usage
