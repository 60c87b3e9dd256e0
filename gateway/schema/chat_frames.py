"""`chat.completion.chunk` and `chat.completion`: pieces of a message as chat's deltas."""

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.ports import CallArguments, CallBegin, Piece, Reasoning
from gateway.schema.envelope import Envelope, UsageWish
from gateway.schema.frames import Call, End, Finished, Header, Said, Tally
from gateway.schema.scheduling import DEFAULT_TIER

_TEXT_END = b'},"logprobs":null,"finish_reason":null}]'


class ChatFrames(Envelope):
    """The first chunk of a choice has its role, the last its finish reason."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self, header: Header, wish: UsageWish, *, service_tier: str = DEFAULT_TIER
    ) -> None:
        super().__init__(header, wish, service_tier=service_tier)
        self._begun: set[int] = set()
        self._plain_heads: dict[int, bytes] = {}  # of begun choices whose text needs no more
        self._tail = _TEXT_END + self._close

    def delta(self, index: int, said: Said, tally: Tally) -> bytes:
        head = self._plain_heads.get(index)
        if head is not None and len(said) == 1 and isinstance(said[0], str):
            return head + orjson.dumps(said[0]) + self._tail
        opening = self._opening(index, said, tally)
        return opening + b"".join([self._event(index, _delta(piece), tally) for piece in said])

    def ending(self, index: int, end: End, tally: Tally) -> bytes:
        opening = self._opening(index, (), tally)
        return opening + self._event(index, {}, tally, end.reason)

    def _opening(self, index: int, pieces: Sequence[Piece], tally: Tally) -> bytes:
        """The role, once. Content begins empty, or null where something else comes first."""
        if index in self._begun:
            return b""
        self._begun.add(index)
        if not self._wish.continuous:
            self._plain_heads[index] = self._open + b'{"index":%d,"delta":{"content":' % index
        content = "" if not pieces or isinstance(pieces[0], str) else None
        opening = {"role": "assistant", "content": content, "refusal": None}
        return self._event(index, opening, tally)

    def _event(
        self, index: int, delta: dict[str, Any], tally: Tally, reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._chunk(choice, tally)

    def whole(self, choices: Sequence[Finished], tally: Tally) -> bytes:
        return self._whole(
            [
                {
                    "index": index,
                    "message": _message(choice),
                    "logprobs": None,
                    "finish_reason": choice.end.reason,
                }
                for index, choice in enumerate(choices)
            ],
            tally,
        )


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case str():
            return {"content": piece}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallBegin(place, call_id, name):
            call = _call(Call(call_id, name, ""))
            return {"tool_calls": [{"index": place, **call}]}
        case CallArguments(place, text):
            return {"tool_calls": [{"index": place, "function": {"arguments": text}}]}


def _message(choice: Finished) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.content,
        "refusal": None,
        "annotations": [],
    }
    if choice.reasoning is not None:
        message |= {"reasoning_content": choice.reasoning, "reasoning": choice.reasoning}
    if choice.calls:
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return message


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
