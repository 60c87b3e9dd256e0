"""Renders the Responses API: one answer as items, in events or as one body.

    created, (queued,) in_progress, (item added, (part added, deltas, done)…, item done)…, completed

Reasoning, text and each function call are an item each. An item is complete when the next begins.
Every event has the next sequence number.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import orjson

from engine.errors import RequestCancelled
from gateway.errors import message_of
from gateway.ports import CallArguments, CallBegin, Piece, Reasoning
from gateway.schema.rendering import (
    PING,
    ChoiceEnd,
    Delta,
    FinishedChoice,
    GenerationProgress,
    OutputToken,
    PromptReport,
)
from gateway.schema.responses.client_tools import CALLS, call_fields, client_call
from gateway.schema.responses.tools import CalledTool, custom_input

if TYPE_CHECKING:
    from gateway.schema.openai.logprobs import LogprobsFormatter
    from gateway.schema.responses.diagnosis import CacheDiagnosis

Item = dict[str, Any]
_INCOMPLETE = {"length": "max_output_tokens", "steered": "steered"}  # why, by finish reason


class ResponsesRenderer:
    """Renders one response; `output` are its items so far."""

    ping = PING

    def __init__(
        self,
        head: Mapping[str, Any],
        new_id: Callable[[str], str],
        now: Callable[[], int],
        formatter: "LogprobsFormatter | None" = None,
        tools: Mapping[str, CalledTool] = MappingProxyType({}),
    ) -> None:
        """`head` has the response's constant fields; `now` gives Unix seconds; `tools` are the
        tools that functions of the chat request stand for, by the functions' names."""
        self._tools = tools
        self.output: list[Item] = []
        self._head = head
        self._new_id = new_id
        self._now = now
        self._formatter = formatter
        self._number = 0  # of the next event
        self._has_begun = self._is_created = False
        self._is_open = False  # the last item
        self._texts: list[str] = []  # of the open item
        self._tokens: list[OutputToken] = []  # of the open item
        self._pending: list[OutputToken] = []  # not yet in any event
        self._delta_head = b""  # constant bytes before a delta's number, for the open item
        self._status = "in_progress"
        self._incomplete_details: dict[str, Any] | None = None
        self._end: dict[str, Any] = {}
        self.diagnosis: CacheDiagnosis | None = None  # of the prompt, compared with another one

    @property
    def response_id(self) -> str:
        return str(self._head["id"])

    def snapshot(self, status: str | None = None) -> dict[str, Any]:
        """The response object as it is now, with `status` if given."""
        return {
            **self._head,
            "completed_at": None,
            "usage": None,
            "error": None,
            "incomplete_details": None,
            **self._end,
            "status": status or self._status,
            "output": self.output,
        }

    @property
    def status(self) -> str:
        return self._status

    def next_number(self) -> int:
        """The sequence number of an event that is rendered elsewhere."""
        number, self._number = self._number, self._number + 1
        return number

    def delta(self, index: int, parts: Delta, progress: GenerationProgress) -> bytes:
        events = [self._opening()]
        for piece, tokens in _with_tokens(parts):
            self._pending += tokens
            if piece is not None:
                events.append(self._piece_events(piece))
        return b"".join(events)

    def ending(self, index: int, end: ChoiceEnd, progress: GenerationProgress) -> bytes:
        events = self._opening()
        if reason := _INCOMPLETE.get(end.reason):
            self._incomplete_details = {"reason": reason}
        self._status = "incomplete" if reason else "completed"
        if not self.output and end.reason != "steered":
            events += self._open_text("message", "output_text")  # an empty message
        return events + self._close(self._status)

    def closing(self, progress: GenerationProgress) -> bytes:
        self._conclude(progress)
        return self._event(f"response.{self._status}", response=self.snapshot())

    def failure(self, error: BaseException) -> bytes:
        is_cancelled = isinstance(error, RequestCancelled)
        events = self._opening() + self._close("incomplete")
        if not is_cancelled:
            self._end = {"error": {"code": "server_error", "message": message_of(error)}}
        self._status = "cancelled" if is_cancelled else "failed"
        return events + self._event("response.failed", response=self.snapshot())

    def whole(self, choices: Sequence[FinishedChoice], progress: GenerationProgress) -> bytes:
        """The response object that the last event of a stream would carry."""
        (choice,) = choices
        self.delta(0, choice.parts, progress)
        self.ending(0, choice.end, progress)
        self._conclude(progress)
        return orjson.dumps(self.snapshot())

    def _conclude(self, progress: GenerationProgress) -> None:
        """Set the fields that are known when the answer is complete."""
        usage = progress.usage
        self._end = {
            "completed_at": self._now(),
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": usage.written_tokens,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        if self.diagnosis is not None:
            self._end["prompt_cache_diagnostics"] = self.diagnosis.as_json(usage)
        if self._status == "incomplete":
            self._end["incomplete_details"] = self._incomplete_details

    def _logprobs(self, tokens: Sequence[OutputToken]) -> list[Any]:
        logprobs = None if self._formatter is None else self._formatter.chat(tokens)
        return [] if logprobs is None else list(logprobs["content"])

    def accepted(self) -> bytes:
        """The first two events of a response in the background, which waits for its turn."""
        self._status, self._is_created = "queued", True
        return self._state_events("created", "queued")

    def _opening(self) -> bytes:
        """The events before the first item, once; sent with the first delta."""
        if self._has_begun:
            return b""
        self._has_begun = True
        if self._is_created:
            self._status = "in_progress"
            return self._state_events("in_progress")
        return self._state_events("created", "in_progress")

    def _state_events(self, *kinds: str) -> bytes:
        events = [self._event(f"response.{kind}", response=self.snapshot()) for kind in kinds]
        return b"".join(events)

    def _piece_events(self, piece: Piece) -> bytes:
        tokens, self._pending = self._pending, []
        match piece:
            case str():
                events = self._open_text("message", "output_text")
                self._tokens += tokens
                return events + self._delta(piece, tokens)
            case Reasoning(text):
                return self._open_text("reasoning", "reasoning_text") + self._delta(text)
            case CallBegin():
                return self._open_call(piece)
            case CallArguments(_, text) if self.output[-1]["type"] != "function_call":
                self._texts.append(text)  # JSON around the input, which is known at the end
                return b""
            case CallArguments(_, text):
                return self._delta(text)

    def _open_text(self, kind: str, part: str) -> bytes:
        """Begin an item of one part, unless the open item has this type."""
        if self._is_open and self.output[-1]["type"] == kind:
            return b""
        events = self._close("completed")
        if kind == "message":
            item = _message(self._new_id("msg_"), "", [], "in_progress")
        else:
            item = _reasoning(self._new_id("rs_"), "")
        full_part = item["content"].pop()
        events += self._open(item)
        events += self._event("response.content_part.added", **self._location, part=full_part)
        self._delta_head = self._head_of(f"response.{part}.delta", is_text=kind == "message")
        return events

    def _open_call(self, begin: CallBegin) -> bytes:
        events = self._close("completed")
        tool = self._tools.get(begin.name, CalledTool(begin.name))
        if tool.client_type:
            return events + self._open(client_call(tool.client_type, self._new_id, begin.call_id))
        if tool.is_custom:
            return events + self._open(_custom_call(self._new_id("ctc_"), begin, tool))
        events += self._open(_call(self._new_id("fc_"), begin, tool))
        self._delta_head = self._head_of("response.function_call_arguments.delta", is_call=True)
        return events

    def _open(self, item: Item) -> bytes:
        self.output.append(item)
        self._is_open = True
        self._texts, self._tokens = [], []
        return self._event("response.output_item.added", output_index=self._item_index, item=item)

    def _delta(self, text: str, tokens: Sequence[OutputToken] = ()) -> bytes:
        """One delta event, joined from constant bytes: this runs for every token."""
        self._texts.append(text)
        number, self._number = self._number, self._number + 1
        logprobs = b""
        if self.output[-1]["type"] == "message":
            logprobs = b',"logprobs":' + orjson.dumps(_without_bytes(self._logprobs(tokens)))
        return b'%b%d%b,"delta":%b}\n\n' % (self._delta_head, number, logprobs, orjson.dumps(text))

    def _head_of(self, kind: str, *, is_text: bool = False, is_call: bool = False) -> bytes:
        location = self._location
        if is_call:
            del location["content_index"]
        head = orjson.dumps({"type": kind, **location})[:-1]
        return b'event: %b\ndata: %b,"sequence_number":' % (kind.encode(), head)

    def _close(self, status: str) -> bytes:
        """End the open item, if any, with `status`."""
        if not self._is_open:
            return b""
        self._is_open = False
        item, text = self.output[-1], "".join(self._texts)
        tokens = self._tokens + self._pending
        match item["type"]:
            case "message":
                part = {**_text_part(text), "logprobs": self._logprobs(tokens)}
                item["status"] = status
                logprobs = {"logprobs": _without_bytes(part["logprobs"])}
                done = self._done_text("response.output_text.done", part, item, **logprobs)
            case "reasoning":
                part = {"type": "reasoning_text", "text": text}
                done = self._done_text("response.reasoning_text.done", part, item)
            case "custom_tool_call":
                done = self._done_custom(item, text)
            case kind if kind in CALLS:
                item |= {**call_fields(CALLS[kind], text), "status": status}
                done = b""
            case _:
                item |= {"arguments": text, "status": status}
                done = self._event(
                    "response.function_call_arguments.done",
                    item_id=item["id"],
                    output_index=self._item_index,
                    name=item["name"],
                    arguments=text,
                )
        event = self._event("response.output_item.done", output_index=self._item_index, item=item)
        return done + event

    def _done_custom(self, item: Item, arguments: str) -> bytes:
        item["input"] = custom_input(arguments)
        location = {"item_id": item["id"], "output_index": self._item_index}
        return self._event(
            "response.custom_tool_call_input.delta", **location, delta=item["input"]
        ) + self._event("response.custom_tool_call_input.done", **location, input=item["input"])

    def _done_text(self, kind: str, part: Item, item: Item, **more: Any) -> bytes:
        item["content"] = [part]
        location = self._location
        return self._event(kind, **location, text=part["text"], **more) + self._event(
            "response.content_part.done", **location, part=part
        )

    @property
    def _item_index(self) -> int:
        return len(self.output) - 1

    @property
    def _location(self) -> dict[str, Any]:
        """The ids and indexes of the open item's only part."""
        return {
            "item_id": self.output[-1]["id"],
            "output_index": self._item_index,
            "content_index": 0,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class PrefillRenderer(ResponsesRenderer):
    """Renders a response for which only the prompt was computed: it has no output."""

    def ending(self, index: int, end: ChoiceEnd, progress: GenerationProgress) -> bytes:
        self._status = "completed"
        return self._opening()


def _without_bytes(logprobs: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Log-probabilities in the form of events, which have no `bytes`."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]
            ],
        }
        for entry in logprobs
    ]


def _with_tokens(parts: Delta) -> Iterator[tuple[Piece | None, list[OutputToken]]]:
    """Each piece with its tokens, which follow it in the delta."""
    current: Piece | None = None
    tokens: list[OutputToken] = []
    for part in parts:
        if isinstance(part, OutputToken):
            tokens += () if part.is_end else (part,)
        elif not isinstance(part, PromptReport):
            yield current, tokens
            current, tokens = part, []
    yield current, tokens


def _text_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(item_id: str, text: str, logprobs: list[Any], status: str) -> Item:
    part = {**_text_part(text), "logprobs": logprobs}
    return {
        "type": "message",
        "id": item_id,
        "status": status,
        "role": "assistant",
        "content": [part],
    }


def _reasoning(item_id: str, text: str) -> Item:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": item_id, "summary": [], "content": [part]}


def _call(item_id: str, begin: CallBegin, tool: CalledTool) -> Item:
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": begin.call_id,
        **_tool_name(tool),
        "arguments": "",
        "status": "in_progress",
    }


def _custom_call(item_id: str, begin: CallBegin, tool: CalledTool) -> Item:
    identity = {"id": item_id, "call_id": begin.call_id}
    return {"type": "custom_tool_call", **identity, **_tool_name(tool), "input": ""}


def _tool_name(tool: CalledTool) -> Item:
    namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
    return {"name": tool.name, **namespace}
