"""Choice streams over token streams that a test has written, and how renderers show them."""

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
from gateway.schema.openai.logprobs import LogprobsFormatter
from gateway.schema.openai.renderers import ChatRenderer, CompletionRenderer
from gateway.schema.rendering import Delta, ResponseHeader, Usage, UsageOptions, finished_choice
from tests.gateway.serve.assembling import assembled, payloads

HEADER = ResponseHeader("chatcmpl-1", 1_700_000_000, "m", "fp")
PROMPT = (1, 2)


@dataclass(frozen=True, slots=True)
class Output:
    """An output: the bytes of its tokens and its end; the end token's id is their number."""

    tokens: Sequence[bytes]
    finish: FinishReason

    def feed(self, token_id: int) -> bytes:
        """The decoder of these tokens."""
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    def chunks(self, sizes: Sequence[int]) -> list[TokenChunk]:
        """Tokens in chunks of these sizes, then all that are left; the last has the end token."""
        left = iter(range(len(self.tokens)))
        chunks = [(tuple(islice(left, size)), None) for size in sizes]
        end = (len(self.tokens),) if self.finish is FinishReason.STOP else ()
        ends = [*chunks, ((*left, *end), self.finish)]
        return [
            TokenChunk(ids, finish, tuple(TokenLogprobs(-i / 8, 1, ((i, -i / 8),)) for i in ids))
            for ids, finish in ends
        ]


class ScriptedTokens:
    """An engine stream with the given chunks; `closed` is the reason it was closed with."""

    spec = SimpleNamespace(prompt=PROMPT)

    def __init__(self, chunks: Sequence[TokenChunk]) -> None:
        self._chunks = iter(chunks)
        self.closed: Abort | None = None

    async def next(self, relay: object = None) -> TokenChunk:
        return next(self._chunks)

    def close(self, reason: Abort) -> None:
        self.closed = reason


class ChoiceUsage:
    """The usage of one choice."""

    def __init__(self, choice: ChoiceStream) -> None:
        self._choice = choice

    @property
    def usage(self) -> Usage:
        return Usage(0, self._choice.num_tokens, reasoning_tokens=self._choice.num_reasoning_tokens)


class Rendered(NamedTuple):
    """A choice as a whole response shows it, as its events assemble, and its usage."""

    whole: dict[str, Any]
    streamed: dict[str, Any]
    usage: Usage


def all_deltas(choice: ChoiceStream) -> list[Delta]:
    """The deltas of a choice. Scripted tokens never wait, so this needs no event loop."""
    deltas: list[Delta] = []
    while choice.end is None:
        try:
            choice.next().send(None)
        except StopIteration as done:
            deltas.append(done.value)
    return deltas


def choice_of(output: Output, sizes: Sequence[int], options: ChoiceOptions) -> ChoiceStream:
    """A choice with this output, whose tokens come in chunks of these sizes."""
    tokens: Any = ScriptedTokens(output.chunks(sizes))
    return ChoiceStream(0, tokens, options)


def rendered_as_chat(choice: ChoiceStream, formatter: LogprobsFormatter | None = None) -> Rendered:
    """As chat completions show it."""
    whole, stream, usage = _rendered(choice, ChatRenderer(HEADER, UsageOptions(), formatter))
    del whole["message"]["annotations"]  # there is no such delta
    return Rendered(whole, assembled(payloads(stream)), usage)


def rendered_as_text(choice: ChoiceStream, formatter: LogprobsFormatter | None = None) -> Rendered:
    """As text completions show it."""
    whole, stream, usage = _rendered(choice, CompletionRenderer(HEADER, UsageOptions(), formatter))
    choices = [chunk["choices"][0] for chunk in payloads(stream)]
    columns: dict[str, list[Any]] = {}
    for each in choices:
        for name, values in (each["logprobs"] or {}).items():
            columns.setdefault(name, []).extend(values)
    streamed = {
        "text": "".join(each["text"] for each in choices),
        "logprobs": columns or None,
        "finish_reason": choices[-1]["finish_reason"],
        "token_ids": [i for each in choices for i in each.get("token_ids", ())],
    }
    return Rendered(whole, streamed, usage)


def _rendered(
    choice: ChoiceStream, renderer: ChatRenderer | CompletionRenderer
) -> tuple[dict[str, Any], bytes, Usage]:
    usage = ChoiceUsage(choice)
    deltas = all_deltas(choice)
    assert choice.end is not None
    events = [renderer.delta(0, delta, usage) for delta in deltas if delta]
    stream = b"".join((*events, renderer.ending(0, choice.end, usage), renderer.closing(usage)))
    parts: list[Any] = [part for delta in deltas for part in delta]
    assert "" not in parts
    (whole,) = json.loads(renderer.whole([finished_choice(parts, choice.end)], usage))["choices"]
    return whole, stream, usage.usage
