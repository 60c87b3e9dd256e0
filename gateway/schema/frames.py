"""Answers on the wire: server-sent events rendered once as bytes, and whole bodies.

Everything but the delta is known before the first token, so an event is a ready prefix, the
JSON-escaped text, and a ready suffix. `Frames` is the port; chat and text completions fill it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import orjson

from gateway.schema.scheduling import DEFAULT_TIER

DONE = b"data: [DONE]\n\n"
_NULL_USAGE = b',"usage":null'
_TEXT_END = b'},"logprobs":null,"finish_reason":null}]'


class Usage(NamedTuple):
    """Token counts of a whole response: each prompt once, all choices' output."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompts, found in the prefix cache

    def as_json(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Finished(NamedTuple):
    """One choice of a response that was not streamed."""

    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Header:
    """What all chunks of one response say: `created` is Unix seconds."""

    response_id: str
    created: int
    model: str
    fingerprint: str


class Frames(Protocol):
    """How one response looks on the wire."""

    def opening(self, index: int) -> bytes:
        """What a choice sends before its first text; may be empty."""
        ...

    def delta(self, index: int, text: str) -> bytes: ...

    def ending(self, index: int, finish_reason: str) -> bytes: ...

    def usage(self, usage: Usage) -> bytes:
        """The extra chunk that `include_usage` asks for."""
        ...

    def whole(self, choices: list[Finished], usage: Usage) -> bytes:
        """The body of a response that is not streamed."""
        ...


def error_event(body: bytes) -> bytes:
    """What a stream says when it fails half-way; `body` is the usual JSON error."""
    return b"data: " + body + b"\n\n"


class _Wire:
    """What both kinds share: the envelope around `choices`."""

    chunk_object: str
    whole_object: str

    def __init__(self, header: Header, *, with_usage: bool, **extra: str) -> None:
        self._header = header
        self._extra = extra
        open_json = orjson.dumps(self._envelope(self.chunk_object))[:-1]
        self._open = b"data: " + open_json + b',"choices":['
        self._close = (_NULL_USAGE if with_usage else b"") + b"}\n\n"
        self._heads: dict[int, bytes] = {}
        self._tail = _TEXT_END + self._close

    def _envelope(self, kind: str) -> dict[str, Any]:
        header = self._header
        return {
            "id": header.response_id,
            "object": kind,
            "created": header.created,
            "model": header.model,
            "system_fingerprint": header.fingerprint,
            **self._extra,
        }

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._open + orjson.dumps(choice) + b"]" + self._close

    def usage(self, usage: Usage) -> bytes:
        return self._open + b'],"usage":' + orjson.dumps(usage.as_json()) + b"}\n\n"

    def _whole(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        envelope = self._envelope(self.whole_object)
        return orjson.dumps({**envelope, "choices": choices, "usage": usage.as_json()})


class ChatFrames(_Wire):
    """`chat.completion.chunk` and `chat.completion`."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self, header: Header, *, with_usage: bool, service_tier: str = DEFAULT_TIER
    ) -> None:
        super().__init__(header, with_usage=with_usage, service_tier=service_tier)

    def opening(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk(
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        )

    def delta(self, index: int, text: str) -> bytes:
        head = self._heads.get(index)
        if head is None:
            head = self._open + b'{"index":%d,"delta":{"content":' % index
            self._heads[index] = head
        return head + orjson.dumps(text) + self._tail

    def ending(self, index: int, finish_reason: str) -> bytes:
        return self._chunk(
            {"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason}
        )

    def whole(self, choices: list[Finished], usage: Usage) -> bytes:
        return self._whole(
            [
                {
                    "index": index,
                    "message": {
                        "role": "assistant",
                        "content": choice.text,
                        "refusal": None,
                        "annotations": [],
                    },
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(choices)
            ],
            usage,
        )


class CompletionFrames(_Wire):
    """`text_completion`, the same object name in chunks and whole."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def opening(self, index: int) -> bytes:
        return b""

    def delta(self, index: int, text: str) -> bytes:
        head = self._heads.get(index)
        if head is None:
            head = self._open + b'{"index":%d,"text":' % index
            self._heads[index] = head
        return head + orjson.dumps(text) + self._tail[1:]

    def ending(self, index: int, finish_reason: str) -> bytes:
        return self._chunk(
            {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}
        )

    def whole(self, choices: list[Finished], usage: Usage) -> bytes:
        return self._whole(
            [
                {
                    "index": index,
                    "text": choice.text,
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(choices)
            ],
            usage,
        )
