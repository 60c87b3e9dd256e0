"""`chat.completion.chunk` and `chat.completion`: pieces of a message as chat's deltas."""

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.ports import CallArguments, CallBegin, Piece, Reasoning
from gateway.schema.fields.scheduling import DEFAULT_TIER
from gateway.schema.openai.event_envelope import (
    Envelope,
    UsageOptions,
    output_tokens,
    prompt_report,
    stop_reason,
)
from gateway.schema.openai.logprobs import LogprobsFormatter
from gateway.schema.rendering import (
    ChoiceEnd,
    Delta,
    FinishedChoice,
    OutputToken,
    Progress,
    PromptReport,
    ResponseHeader,
    ToolCallText,
)

_TEXT_END = b'},"logprobs":null,"finish_reason":null}]'
_OLD_REASON = {"tool_calls": "function_call"}


class ChatRenderer(Envelope):
    """The first chunk of a choice has its role, the last its finish reason.

    `is_old`: calls are told as `function_call`, as to those who offered `functions`.
    """

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self,
        header: ResponseHeader,
        wish: UsageOptions = UsageOptions(),  # noqa: B008 # frozen
        spelling: LogprobsFormatter | None = None,
        *,
        service_tier: str = DEFAULT_TIER,
        is_old: bool = False,
    ) -> None:
        super().__init__(header, wish, spelling, service_tier=service_tier)
        self._is_old = is_old
        self._begun: set[int] = set()
        self._plain_heads: dict[int, bytes] = {}  # of begun choices whose text needs no more
        self._tail = _TEXT_END + self._close

    def delta(self, index: int, said: Delta, tally: Progress) -> bytes:
        """One event for each piece; tokens are told with the last of them."""
        head = self._plain_heads.get(index)
        if head is not None and len(said) == 1 and isinstance(piece := said[0], str):
            return head + orjson.dumps(piece) + self._tail
        pieces = [piece for piece in said if not isinstance(piece, OutputToken | PromptReport)]
        events = [self._opening(index, said, tally)]
        deltas = [_delta(piece, is_old=self._is_old) for piece in pieces] or [{}]
        events += [self._event(index, delta, tally) for delta in deltas[:-1]]
        events.append(self._event(index, deltas[-1], tally, drawn=output_tokens(said)))
        return b"".join(events)

    def ending(self, index: int, end: ChoiceEnd, tally: Progress) -> bytes:
        """The finish reason."""
        return self._opening(index, (), tally) + self._event(index, {}, tally, end=end)

    def _opening(self, index: int, said: Delta, tally: Progress) -> bytes:
        """The role, once. Content begins empty, or null where something else comes first."""
        if index in self._begun:
            return b""
        self._begun.add(index)
        if self._is_plain:
            self._plain_heads[index] = self._open + b'{"index":%d,"delta":{"content":' % index
        is_content = not isinstance(next(iter(said), ""), Reasoning | CallBegin)
        delta = {"role": "assistant", "content": "" if is_content else None, "refusal": None}
        more = self._spelling.prompt_ids(prompt_report(said))
        return self._chunk(self._choice_chunk(index, delta, (), None), tally, **more)

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        tally: Progress,
        *,
        drawn: Sequence[OutputToken] = (),
        end: ChoiceEnd | None = None,
    ) -> bytes:
        return self._chunk(self._choice_chunk(index, delta, drawn, end), tally)

    def _choice_chunk(
        self, index: int, delta: dict[str, Any], drawn: Sequence[OutputToken], end: ChoiceEnd | None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._spelling.chat(drawn),
            "finish_reason": None if end is None else self._reason(end),
        }
        if end is not None:
            choice |= stop_reason(end)
        if drawn:
            choice |= self._spelling.ids(drawn)
        return choice

    def whole(self, choices: Sequence[FinishedChoice], tally: Progress) -> bytes:
        """The body; what is told of the prompt is told once."""
        prompt = choices[0].prompt
        return self._whole(
            [self._choice(index, choice) for index, choice in enumerate(choices)],
            tally,
            **self._spelling.prompt_logprobs(prompt),
            **self._spelling.prompt_ids(prompt),
        )

    def _choice(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        return {
            "index": index,
            "message": _message(choice, is_old=self._is_old),
            "logprobs": self._spelling.chat(choice.drawn),
            "finish_reason": self._reason(choice.end),
            **stop_reason(choice.end),
            **self._spelling.ids(choice.drawn),
        }

    def _reason(self, end: ChoiceEnd) -> str:
        return _OLD_REASON.get(end.reason, end.reason) if self._is_old else end.reason


def _delta(piece: Piece, *, is_old: bool) -> dict[str, Any]:
    match piece:
        case str():
            return {"content": piece}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallBegin(_, _, name) if is_old:
            return {"function_call": {"name": name, "arguments": ""}}
        case CallArguments(_, text) if is_old:
            return {"function_call": {"arguments": text}}
        case CallBegin(place, call_id, name):
            call = _call(ToolCallText(call_id, name, ""))
            return {"tool_calls": [{"index": place, **call}]}
        case CallArguments(place, text):
            return {"tool_calls": [{"index": place, "function": {"arguments": text}}]}


def _message(choice: FinishedChoice, *, is_old: bool) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.content,
        "refusal": None,
        "annotations": [],
    }
    if choice.reasoning is not None:
        message |= {"reasoning_content": choice.reasoning, "reasoning": choice.reasoning}
    if choice.calls and is_old:
        message["function_call"] = _call(choice.calls[0])["function"]
    elif choice.calls:
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return message


def _call(call: ToolCallText) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
