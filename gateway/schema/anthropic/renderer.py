"""Renders Anthropic's Messages API: one answer as content blocks, in events or as one body.

    message_start, ping, (block start, deltas, block stop)…, message_delta, message_stop

Blocks come in order: thinking, text, tool use. A block ends when the next one begins.
"""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from engine.errors import ContextTooLong
from gateway.errors import PromptTooLong, http_error, message_of
from gateway.ports import CallArguments, CallBegin, Piece, Reasoning
from gateway.schema.openai.chat import parsed_arguments
from gateway.schema.rendering import (
    ChoiceEnd,
    Delta,
    FinishedChoice,
    GenerationProgress,
    OutputToken,
    PromptReport,
    ResponseRenderer,
    Usage,
    error_event,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}  # by status


class AnthropicDialect:
    """The dialect of `/v1/messages`; clients read the id of a request from `request-id`."""

    request_id_header: str | None = "request-id"

    def error_body(self, error: BaseException, request_id: str) -> bytes:
        status = http_error(error).status
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        detail = {"type": kind, "message": _length_message(error) or message_of(error)}
        return orjson.dumps({"type": "error", "error": detail, "request_id": request_id})

    def error_event(self, error: BaseException, request_id: str) -> bytes:
        return error_event(self.error_body(error, request_id))


def _length_message(error: BaseException) -> str:
    """The words from which clients of Anthropic's API read that they must compact the conversation
    or ask for fewer tokens, and how many; empty for other errors."""
    match error:
        case PromptTooLong(min_tokens=num_tokens, limit=limit):
            return f"prompt is too long: {num_tokens} tokens > {limit} maximum"
        case ContextTooLong(prompt_len=num_tokens, limit=limit) if error.is_prompt_too_long:
            return f"prompt is too long: {num_tokens} tokens > {limit} maximum"
        case ContextTooLong(prompt_len=num_tokens, max_tokens=max_tokens, limit=limit):
            return (
                f"input length and `max_tokens` exceed context limit: {num_tokens} + {max_tokens} "
                f"> {limit}, decrease input length or `max_tokens` and try again"
            )
    return ""


Json = dict[str, Any]
SIGNATURE = "podway"  # thinking is not signed here, but clients require a signature to send back
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesRenderer(ResponseRenderer):
    """Renders one message. With `shows_reasoning` false, thinking blocks are empty."""

    def __init__(
        self,
        model: str,
        new_id: Callable[[str], str],
        request_id: str,
        *,
        shows_reasoning: bool = True,
        counts_writes: bool = False,
    ) -> None:
        """With `counts_writes` the usage has the tokens that were added to the cache."""
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}
        self._request_id = request_id
        self._shows_reasoning = shows_reasoning
        self._counts_writes = counts_writes
        self._has_begun = False
        self._num_blocks = 0
        self._kind = ""  # the kind of the open block, "" if none is open
        self._delta_head = b""
        self._end = ChoiceEnd("stop")

    @property
    def ping(self) -> bytes:
        """A `ping` event, or a comment before `message_start`, which must be the first event."""
        return _event("ping") if self._has_begun else b": ping\n\n"

    def delta(self, index: int, parts: Delta, progress: GenerationProgress) -> bytes:
        events = [self._opening(progress)]
        events += (
            self._piece_events(p) for p in parts if not isinstance(p, OutputToken | PromptReport)
        )
        return b"".join(events)

    def ending(self, index: int, end: ChoiceEnd, progress: GenerationProgress) -> bytes:
        self._end = end
        return self._opening(progress) + self._close()

    def closing(self, progress: GenerationProgress) -> bytes:
        return _event(
            "message_delta", delta=_stop(self._end), usage=self._usage(progress.usage)
        ) + _event("message_stop")

    def failure(self, error: BaseException) -> bytes:
        """One `error` event; no other event follows."""
        return AnthropicDialect().error_event(error, self._request_id)

    def whole(self, choices: Sequence[FinishedChoice], progress: GenerationProgress) -> bytes:
        (choice,) = choices
        content: list[Json] = []
        for piece in choice.parts:
            if not isinstance(piece, OutputToken | PromptReport):
                self._gather(piece, content)
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = parsed_arguments(block["input"])
        message: Json = {**self._head, "content": content, **_stop(choice.end)}
        return orjson.dumps({**message, "usage": self._usage(progress.usage)})

    def _gather(self, piece: Piece, content: list[Json]) -> None:
        """Add a piece to the last block or begin the next. A call's `input` is text at first."""
        match piece:
            case str():
                _extend(content, "text", piece)
            case Reasoning(text):
                _extend(content, "thinking", self._visible(text))
            case CallBegin(_, call_id, name):
                content.append({"type": "tool_use", "id": call_id, "name": name, "input": ""})
            case CallArguments(_, text):
                content[-1]["input"] += text

    def _opening(self, progress: GenerationProgress) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        stop = {"stop_reason": None, "stop_sequence": None}
        usage = {**self._usage(progress.usage), "output_tokens": 0}
        message: Json = {**self._head, "content": [], **stop, "usage": usage}
        return _event("message_start", message=message) + _event("ping")

    def _piece_events(self, piece: Piece) -> bytes:
        match piece:
            case str():
                return self._open_text("text") + self._delta(piece)
            case Reasoning(text):
                return self._open_text("thinking") + self._delta(self._visible(text))
            case CallBegin(_, call_id, name):
                call = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self._open(call, "input_json_delta", "partial_json")
            case CallArguments(_, text):
                return self._delta(text)

    def _open_text(self, kind: str) -> bytes:
        """Begin a block, unless the open one has this type."""
        if self._kind == kind:
            return b""
        block = {"type": kind, kind: ""}
        return self._open(
            {**block, "signature": ""} if kind == "thinking" else block, f"{kind}_delta", kind
        )

    def _open(self, block: Json, delta: str, field: str) -> bytes:
        events = self._close()
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
        self._kind = block["type"]
        self._delta_head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":' % (index, delta.encode(), field.encode())
        )
        return events + _event("content_block_start", index=index, content_block=block)

    def _usage(self, usage: Usage) -> Json:
        """Anthropic's `usage`, where `input_tokens` excludes tokens found in or added to the
        cache."""
        num_written = usage.written_tokens if self._counts_writes else 0
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - num_written,
            "cache_creation_input_tokens": num_written,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }

    def _visible(self, reasoning: str) -> str:
        return reasoning if self._shows_reasoning else ""

    def _delta(self, text: str) -> bytes:
        if not text:
            return b""
        return self._delta_head + orjson.dumps(text) + b"}}\n\n"

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        index, events = self._num_blocks - 1, b""
        if self._kind == "thinking":
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            events = _event("content_block_delta", index=index, delta=signed)
        self._kind = ""
        return events + _event("content_block_stop", index=index)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def _extend(content: list[Json], kind: str, text: str) -> None:
    if not content or content[-1]["type"] != kind:
        signed = {"signature": SIGNATURE} if kind == "thinking" else {}
        content.append({"type": kind, kind: "", **signed})
    content[-1][kind] += text


def _stop(end: ChoiceEnd) -> Json:
    if isinstance(end.stopped_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stopped_by}
    return {"stop_reason": _REASONS[end.reason], "stop_sequence": None}
