"""Renders chat completions: `chat.completion.chunk` events and the `chat.completion` body."""

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
    GenerationProgress,
    OutputToken,
    PromptReport,
    ResponseHeader,
    ToolCallText,
)

_TEXT_END = b'},"logprobs":null,"finish_reason":null}]'
_LEGACY_REASONS = {"tool_calls": "function_call"}


class ChatRenderer(Envelope):
    """The first chunk of a choice has its role, the last its finish reason.

    `is_legacy`: calls are rendered as `function_call`, because the request has `functions`.
    """

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self,
        header: ResponseHeader,
        usage_options: UsageOptions = UsageOptions(),  # noqa: B008 # frozen
        formatter: LogprobsFormatter | None = None,
        *,
        service_tier: str = DEFAULT_TIER,
        is_legacy: bool = False,
    ) -> None:
        super().__init__(header, usage_options, formatter, service_tier=service_tier)
        self._is_legacy = is_legacy
        self._begun: set[int] = set()
        # By choice: the constant bytes before the text of a chunk that has text only.
        self._plain_heads: dict[int, bytes] = {}
        self._tail = _TEXT_END + self._close

    def delta(self, index: int, parts: Delta, progress: GenerationProgress) -> bytes:
        """One event for each piece; the last event also has the tokens' log-probabilities."""
        head = self._plain_heads.get(index)
        if head is not None and len(parts) == 1 and isinstance(piece := parts[0], str):
            return head + orjson.dumps(piece) + self._tail
        if progress_chunk := self._progress_chunk(index, parts, delta={}):
            return progress_chunk
        pieces = [piece for piece in parts if not isinstance(piece, OutputToken | PromptReport)]
        events = [self._opening(index, parts, progress)]
        deltas = [_delta(piece, is_legacy=self._is_legacy) for piece in pieces] or [{}]
        events += [self._event(index, delta, progress) for delta in deltas[:-1]]
        events.append(self._event(index, deltas[-1], progress, tokens=output_tokens(parts)))
        return b"".join(events)

    def ending(self, index: int, end: ChoiceEnd, progress: GenerationProgress) -> bytes:
        """The finish reason."""
        return self._opening(index, (), progress) + self._event(index, {}, progress, end=end)

    def _opening(self, index: int, parts: Delta, progress: GenerationProgress) -> bytes:
        """The event with the role, once. Its content is "", or null before reasoning or calls."""
        if index in self._begun:
            return b""
        self._begun.add(index)
        if self._is_plain:
            self._plain_heads[index] = self._open + b'{"index":%d,"delta":{"content":' % index
        is_content = not isinstance(next(iter(parts), ""), Reasoning | CallBegin)
        delta = {"role": "assistant", "content": "" if is_content else None, "refusal": None}
        prompt = prompt_report(parts)
        more = {} if prompt is None else self._formatter.prompt_ids(prompt)
        return self._chunk(self._choice_chunk(index, delta, (), None), progress, **more)

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        progress: GenerationProgress,
        *,
        tokens: Sequence[OutputToken] = (),
        end: ChoiceEnd | None = None,
    ) -> bytes:
        return self._chunk(self._choice_chunk(index, delta, tokens, end), progress)

    def _choice_chunk(
        self,
        index: int,
        delta: dict[str, Any],
        tokens: Sequence[OutputToken],
        end: ChoiceEnd | None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._formatter.chat(tokens) if tokens else None,
            "finish_reason": None if end is None else self._reason(end),
        }
        if end is not None:
            choice |= stop_reason(end)
        if tokens:
            choice |= self._formatter.ids(tokens)
        return choice

    def whole(self, choices: Sequence[FinishedChoice], progress: GenerationProgress) -> bytes:
        """The body. Details of the prompt appear once, beside the choices."""
        prompt = choices[0].prompt
        return self._whole(
            [self._choice(index, choice) for index, choice in enumerate(choices)],
            progress,
            **self._formatter.prompt_logprobs(prompt),
            **self._formatter.prompt_ids(prompt),
        )

    def _choice(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        return {
            "index": index,
            "message": _message(choice, is_legacy=self._is_legacy),
            "logprobs": self._formatter.chat(choice.tokens),
            "finish_reason": self._reason(choice.end),
            **stop_reason(choice.end),
            **self._formatter.ids(choice.tokens),
        }

    def _reason(self, end: ChoiceEnd) -> str:
        return _LEGACY_REASONS.get(end.reason, end.reason) if self._is_legacy else end.reason


def _delta(piece: Piece, *, is_legacy: bool) -> dict[str, Any]:
    match piece:
        case str():
            return {"content": piece}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallBegin(_, _, name) if is_legacy:
            return {"function_call": {"name": name, "arguments": ""}}
        case CallArguments(_, text) if is_legacy:
            return {"function_call": {"arguments": text}}
        case CallBegin(place, call_id, name):
            call = _call(ToolCallText(call_id, name, ""))
            return {"tool_calls": [{"index": place, **call}]}
        case CallArguments(place, text):
            return {"tool_calls": [{"index": place, "function": {"arguments": text}}]}


def _message(choice: FinishedChoice, *, is_legacy: bool) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.content,
        "refusal": None,
        "annotations": [],
    }
    if choice.reasoning is not None:
        message |= {"reasoning_content": choice.reasoning, "reasoning": choice.reasoning}
    if choice.calls and is_legacy:
        message["function_call"] = _call(choice.calls[0])["function"]
    elif choice.calls:
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return message


def _call(call: ToolCallText) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
