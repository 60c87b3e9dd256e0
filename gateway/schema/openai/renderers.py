"""Renders chat and text completions as server-sent events and bodies.

Everything except the delta is known before the first token, so an event is a constant prefix, the
JSON-escaped text, and a constant suffix.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.ports import CallArguments, CallBegin, Piece, Reasoning, Tokenizer
from gateway.schema.fields.sampling import DEFAULT_TIER
from gateway.schema.openai.dialect import OpenAIDialect
from gateway.schema.openai.logprobs import LogprobsFormatter
from gateway.schema.rendering import (
    PING,
    ChoiceEnd,
    Delta,
    FinishedChoice,
    GenerationProgress,
    OutputToken,
    PromptReport,
    ReportOptions,
    ResponseHeader,
    TextFrame,
    ToolCallText,
    UsageOptions,
)

DONE = b"data: [DONE]\n\n"
_NULL_USAGE = b',"usage":null'
_NO_DETAILS = LogprobsFormatter(lambda token_id: b"")
_LEGACY_REASONS = {"tool_calls": "function_call"}


class Envelope:
    """The envelope around `choices`."""

    chunk_object: str
    whole_object: str
    text_end: bytes  # ends a chunk that has text only
    ping = PING

    def __init__(
        self,
        header: ResponseHeader,
        usage_options: UsageOptions = UsageOptions(),  # noqa: B008 # frozen
        formatter: LogprobsFormatter | None = None,
        **extra: str,
    ) -> None:
        self._header = header
        self._extra = extra
        self._usage_options = usage_options
        self._formatter = formatter or _NO_DETAILS
        self._is_plain = formatter is None and not usage_options.continuous
        open_json = orjson.dumps(self._envelope(self.chunk_object))[:-1]
        self._open = b"data: " + open_json + b',"choices":['
        self._close = (_NULL_USAGE if usage_options.at_the_end else b"") + b"}\n\n"
        self._frames: dict[int, TextFrame] = {}  # by choice: what is around a text

    def text_frame(self, index: int) -> TextFrame | None:
        return self._frames.get(index)

    def _set_frame(self, index: int, field: bytes) -> None:
        if self._is_plain:
            head = self._open + b'{"index":%d,%b' % (index, field)
            self._frames[index] = head, self.text_end + self._close

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

    def _chunk(self, choice: dict[str, Any], progress: GenerationProgress, **more: Any) -> bytes:
        rest = b"".join(b',"%s":%s' % (k.encode(), orjson.dumps(v)) for k, v in more.items())
        close = self._close
        if self._usage_options.continuous:
            close = b',"usage":' + orjson.dumps(progress.usage.as_json()) + b"}\n\n"
        return self._open + orjson.dumps(choice) + b"]" + rest + close

    def _progress_chunk(self, index: int, parts: Delta, **choice: Any) -> bytes:
        """A chunk without output, in llama.cpp's form, for the progress of a prompt; else empty."""
        report = parts[0]
        if not isinstance(report, PromptReport) or (part := report.progress) is None:
            return b""
        progress = {
            "total": part.total,
            "cache": part.cached,
            "processed": part.processed,
            "time_ms": round(part.seconds * 1e3),
        }
        fields = {"index": index, **choice, "logprobs": None, "finish_reason": None}
        more = b'],"prompt_progress":' + orjson.dumps(progress)
        return self._open + orjson.dumps(fields) + more + self._close

    def closing(self, progress: GenerationProgress) -> bytes:
        """The usage chunk, if the request has `include_usage`, and `[DONE]`."""
        if not self._usage_options.at_the_end:
            return DONE
        usage = orjson.dumps(progress.usage.as_json())
        return self._open + b'],"usage":' + usage + b"}\n\n" + DONE

    def failure(self, error: BaseException) -> bytes:
        """One event with the JSON error body; no `[DONE]` follows."""
        return OpenAIDialect().error_event(error)

    def _whole(
        self, choices: list[dict[str, Any]], progress: GenerationProgress, **more: Any
    ) -> bytes:
        envelope = self._envelope(self.whole_object)
        body = {**envelope, "choices": choices, "usage": progress.usage.as_json(), **more}
        return orjson.dumps(body)


def token_formatter(report: ReportOptions, tokenizer: Tokenizer) -> LogprobsFormatter | None:
    """The formatter of the requested token details; None if none are requested."""
    if not report.has_tokens and report.prompt_logprobs is None:
        return None
    return LogprobsFormatter(tokenizer.token_bytes, report.logprobs, report.token_ids)


def output_tokens(parts: Delta) -> Sequence[OutputToken]:
    """The tokens of a delta."""
    return [piece for piece in parts if isinstance(piece, OutputToken)]


def prompt_report(parts: Delta) -> PromptReport | None:
    """The prompt report of a delta, if it has one."""
    return next((piece for piece in parts if isinstance(piece, PromptReport)), None)


def stop_reason(end: ChoiceEnd) -> dict[str, str | int]:
    """vLLM's `stop_reason`: the request's stop string or stop token id that ended the choice."""
    return {} if end.stopped_by is None else {"stop_reason": end.stopped_by}


class ChatRenderer(Envelope):
    """`chat.completion`. The first chunk of a choice has its role, the last its finish reason.

    `is_legacy`: calls are rendered as `function_call`, because the request has `functions`.
    """

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    text_end = b'},"logprobs":null,"finish_reason":null}]'

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

    def delta(self, index: int, parts: Delta, progress: GenerationProgress) -> bytes:
        """One event for each piece; the last event also has the tokens' log-probabilities."""
        frame = self._frames.get(index)
        if frame is not None and len(parts) == 1 and isinstance(piece := parts[0], str):
            return frame[0] + orjson.dumps(piece) + frame[1]
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
        self._set_frame(index, b'"delta":{"content":')
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


class CompletionRenderer(Envelope):
    """`text_completion`. The first chunk of a choice is its first text: every piece is content,
    because there is no reasoning and there are no tool calls."""

    chunk_object = "text_completion"
    whole_object = "text_completion"
    text_end = b',"logprobs":null,"finish_reason":null}]'

    def delta(self, index: int, parts: Delta, progress: GenerationProgress) -> bytes:
        """One event with the text and its tokens."""
        frame = self._frames.get(index)
        if frame is not None and len(parts) == 1:
            return frame[0] + orjson.dumps(parts[0]) + frame[1]
        if progress_chunk := self._progress_chunk(index, parts, text=""):
            return progress_chunk
        self._set_frame(index, b'"text":')
        text = "".join([piece for piece in parts if isinstance(piece, str)])
        tokens = output_tokens(parts)
        choice = self._choice(index, text, None, tokens)
        choice |= self._formatter.prompt_ids(prompt_report(parts))
        return self._chunk(choice | (self._formatter.ids(tokens) if tokens else {}), progress)

    def ending(self, index: int, end: ChoiceEnd, progress: GenerationProgress) -> bytes:
        """The finish reason."""
        return self._chunk(self._choice(index, "", end, ()), progress)

    def whole(self, choices: Sequence[FinishedChoice], progress: GenerationProgress) -> bytes:
        """The body. Details of a prompt are repeated in each of its choices."""
        return self._whole(
            [
                {
                    **self._choice(index, choice.content or "", choice.end, choice.tokens),
                    **self._formatter.ids(choice.tokens),
                    **self._formatter.prompt_ids(choice.prompt),
                    **self._formatter.prompt_logprobs(choice.prompt),
                }
                for index, choice in enumerate(choices)
            ],
            progress,
        )

    def _choice(
        self, index: int, text: str, end: ChoiceEnd | None, tokens: Sequence[OutputToken]
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._formatter.completion(tokens),
            "finish_reason": None if end is None else end.reason,
            **({} if end is None else stop_reason(end)),
        }
