"""Renders the Responses API: one answer as items, in events or as one body.

created, (queued,) in_progress, (item added, (part added, deltas, done)…, item done)…, completed
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import orjson

from engine.errors import RequestCancelled
from gateway.errors import message_of
from gateway.ports import Piece
from gateway.schema.openai.logprobs import LogprobsFormatter
from gateway.schema.rendering import (
    PING,
    ChoiceEnd,
    Delta,
    FinishedChoice,
    GenerationProgress,
    OutputToken,
    PromptReport,
    ResponseRenderer,
)
from gateway.schema.responses.diagnosis import CacheDiagnosis
from gateway.schema.responses.output_items import NumberedEvents, OutputItems
from gateway.schema.responses.tools import CalledTool

_INCOMPLETE = {"length": "max_output_tokens", "steered": "steered"}  # why, by finish reason


class ResponsesRenderer(ResponseRenderer):
    """Renders one response: its `status`, its `output`, and its end."""

    ping = PING

    def __init__(
        self,
        head: Mapping[str, Any],
        new_id: Callable[[str], str],
        now: Callable[[], int],
        formatter: LogprobsFormatter | None = None,
        tools: Mapping[str, CalledTool] = MappingProxyType({}),
    ) -> None:
        """`head` has the response's constant fields; `now` gives Unix seconds; `tools` are the
        tools that functions of the chat request stand for, by the functions' names."""
        self.events = NumberedEvents()
        self.output = OutputItems(self.events, new_id, formatter, tools)
        self.status = "in_progress"
        self.diagnosis: CacheDiagnosis | None = None  # the prompt compared with another one
        self._head = head
        self._now = now
        self._has_begun = self._is_created = False
        self._incomplete_details: dict[str, Any] | None = None
        self._end: dict[str, Any] = {}

    @property
    def response_id(self) -> str:
        return str(self._head["id"])

    def snapshot(self, status: str | None = None) -> dict[str, Any]:
        """The response object as it is now, with `status` if given."""
        items = self.output.items
        if status == "cancelled":  # what is open ends between two iterations
            items = [
                each | {"status": "incomplete"} if each.get("status") == "in_progress" else each
                for each in items
            ]
        return {
            **self._head,
            "completed_at": None,
            "usage": None,
            "error": None,
            "incomplete_details": None,
            **self._end,
            "status": status or self.status,
            "output": items,
        }

    def delta(self, index: int, parts: Delta, progress: GenerationProgress) -> bytes:
        events = [self._opening()]
        events += [self.output.add(piece, tokens) for piece, tokens in _with_tokens(parts)]
        return b"".join(events)

    def ending(self, index: int, end: ChoiceEnd, progress: GenerationProgress) -> bytes:
        events = self._opening()
        if reason := _INCOMPLETE.get(end.reason):
            self._incomplete_details = {"reason": reason}
        self.status = "incomplete" if reason else "completed"
        if not self.output.items and end.reason != "steered":
            events += self.output.open_text("message")  # an empty message
        return events + self.output.close(self.status)

    def closing(self, progress: GenerationProgress) -> bytes:
        self._conclude(progress)
        return self._state_events(self.status)

    def failure(self, error: BaseException) -> bytes:
        is_cancelled = isinstance(error, RequestCancelled)
        events = self._opening() + self.output.close("incomplete")
        if not is_cancelled:
            self._end = {"error": {"code": "server_error", "message": message_of(error)}}
        self.status = "cancelled" if is_cancelled else "failed"
        return events + self._state_events("failed")

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
        self._end = {"completed_at": self._now(), "usage": usage.as_response_json()}
        if self.diagnosis is not None:
            self._end["prompt_cache_diagnostics"] = self.diagnosis.as_json(usage)
        if self.status == "incomplete":
            self._end["incomplete_details"] = self._incomplete_details

    def accepted(self) -> bytes:
        """The first two events of a response in the background, which waits for its turn."""
        self.status, self._is_created = "queued", True
        return self._state_events("created", "queued")

    def _opening(self) -> bytes:
        """The events before the first item, once; sent with the first delta."""
        if self._has_begun:
            return b""
        self._has_begun = True
        if self._is_created:
            self.status = "in_progress"
            return self._state_events("in_progress")
        return self._state_events("created", "in_progress")

    def _state_events(self, *kinds: str) -> bytes:
        response = self.snapshot()
        events = [self.events.event(f"response.{kind}", response=response) for kind in kinds]
        return b"".join(events)


class PrefillRenderer(ResponsesRenderer):
    """Renders a response for which only the prompt was computed: it has no output."""

    def ending(self, index: int, end: ChoiceEnd, progress: GenerationProgress) -> bytes:
        self.status = "completed"
        return self._opening()


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
