"""The Responses API on the wire: one answer as items, told in events or as a whole.

    created, in_progress, (item added, (part added, deltas, done)…, item done)…, completed

Items follow each other: what the model thinks is one, what it says, each function that it calls.
An item is complete when the next begins. Every event has the next sequence number.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    OutputToken,
    Progress,
    PromptReport,
)

if TYPE_CHECKING:
    from gateway.schema.openai.logprobs import LogprobsFormatter

Item = dict[str, Any]
_STATUS = {"length": "incomplete"}  # of an answer that ended so; all others are complete


class ResponsesRenderer:
    """One response. `snapshot` is the response object by now; `output` its items."""

    ping = PING

    def __init__(
        self,
        head: Mapping[str, Any],
        new_id: Callable[[str], str],
        now: Callable[[], int],
        spelling: "LogprobsFormatter | None" = None,
    ) -> None:
        """`head` is what is known of the response before it begins, without status and output."""
        self.output: list[Item] = []
        self._head = head
        self._new_id = new_id
        self._now = now
        self._spelling = spelling
        self._number = 0  # of the next event
        self._has_begun = False
        self._is_open = False  # the last item
        self._texts: list[str] = []  # of the open item
        self._drawn: list[OutputToken] = []  # of the open item
        self._pending: list[OutputToken] = []  # that no event has told
        self._delta_head = b""  # up to the number of a delta of the open item
        self._status = "in_progress"
        self._end: dict[str, Any] = {}

    @property
    def response_id(self) -> str:
        return str(self._head["id"])

    def snapshot(self, status: str | None = None) -> dict[str, Any]:
        """The response object by now."""
        return {
            **self._head,
            "error": None,
            "incomplete_details": None,
            **self._end,
            "status": status or self._status,
            "output": self.output,
        }

    # As events

    def delta(self, index: int, said: Delta, tally: Progress) -> bytes:
        events = [self._opening()]
        for piece, drawn in _with_tokens(said):
            self._pending += drawn
            if piece is not None:
                events.append(self._say(piece))
        return b"".join(events)

    def ending(self, index: int, end: ChoiceEnd, tally: Progress) -> bytes:
        self._status = _STATUS.get(end.reason, "completed")
        events = self._opening()
        if not self.output:
            events += self._open_text("message", "output_text")  # with nothing in it
        return events + self._close(self._status)

    def closing(self, tally: Progress) -> bytes:
        self._conclude(tally)
        return self._event(f"response.{self._status}", response=self.snapshot())

    def failure(self, error: BaseException) -> bytes:
        is_cancelled = isinstance(error, RequestCancelled)
        events = self._opening() + self._close("incomplete")
        if not is_cancelled:
            self._end = {"error": {"code": "server_error", "message": message_of(error)}}
        self._status = "cancelled" if is_cancelled else "failed"
        return events + self._event("response.failed", response=self.snapshot())

    # As a whole

    def whole(self, choices: Sequence[FinishedChoice], tally: Progress) -> bytes:
        """What the events come to."""
        (choice,) = choices
        self.delta(0, choice.said, tally)
        self.ending(0, choice.end, tally)
        self._conclude(tally)
        return orjson.dumps(self.snapshot())

    def _conclude(self, tally: Progress) -> None:
        """The answer is complete."""
        usage = tally.usage
        self._end = {
            "completed_at": self._now(),
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        if self._status == "incomplete":
            self._end["incomplete_details"] = {"reason": "max_output_tokens"}

    def _logprobs(self, drawn: Sequence[OutputToken]) -> list[Any]:
        told = None if self._spelling is None else self._spelling.chat(drawn)
        return [] if told is None else list(told["content"])

    # The events of items

    def _opening(self) -> bytes:
        """The response begins with its first news."""
        if self._has_begun:
            return b""
        self._has_begun = True
        return b"".join(
            self._event(kind, response=self.snapshot())
            for kind in ("response.created", "response.in_progress")
        )

    def _say(self, piece: Piece) -> bytes:
        drawn, self._pending = self._pending, []
        match piece:
            case str():
                events = self._open_text("message", "output_text")
                self._drawn += drawn
                return events + self._delta(piece, drawn)
            case Reasoning(text):
                return self._open_text("reasoning", "reasoning_text") + self._delta(text)
            case CallBegin():
                return self._open_call(piece)
            case CallArguments(_, text):
                return self._delta(text)

    def _open_text(self, kind: str, part: str) -> bytes:
        """Begin an item of one part, unless the open item is one."""
        if self._is_open and self.output[-1]["type"] == kind:
            return b""
        events = self._close("completed")
        if kind == "message":
            item = _message(self._new_id("msg_"), "", [], "in_progress")
        else:
            item = _reasoning(self._new_id("rs_"), "")
        full_part = item["content"].pop()
        events += self._open(item)
        events += self._event("response.content_part.added", **self._place, part=full_part)
        self._delta_head = self._head_of(f"response.{part}.delta", is_text=kind == "message")
        return events

    def _open_call(self, begin: CallBegin) -> bytes:
        events = self._close("completed")
        events += self._open(_call(self._new_id("fc_"), begin, "", "in_progress"))
        self._delta_head = self._head_of("response.function_call_arguments.delta", is_call=True)
        return events

    def _open(self, item: Item) -> bytes:
        self.output.append(item)
        self._is_open = True
        self._texts, self._drawn = [], []
        return self._event("response.output_item.added", output_index=self._at, item=item)

    def _delta(self, text: str, drawn: Sequence[OutputToken] = ()) -> bytes:
        """The hot path: a ready head, the number, the text."""
        self._texts.append(text)
        number, self._number = self._number, self._number + 1
        told = b""
        if self.output[-1]["type"] == "message":
            told = b',"logprobs":' + orjson.dumps(_without_bytes(self._logprobs(drawn)))
        return b'%b%d%b,"delta":%b}\n\n' % (self._delta_head, number, told, orjson.dumps(text))

    def _head_of(self, kind: str, *, is_text: bool = False, is_call: bool = False) -> bytes:
        place = self._place
        if is_call:
            del place["content_index"]
        head = orjson.dumps({"type": kind, **place})[:-1]
        return b'event: %b\ndata: %b,"sequence_number":' % (kind.encode(), head)

    def _close(self, status: str) -> bytes:
        """The open item is complete, or never will be."""
        if not self._is_open:
            return b""
        self._is_open = False
        item, text = self.output[-1], "".join(self._texts)
        drawn = self._drawn + self._pending
        match item["type"]:
            case "message":
                part = {**_text_part(text), "logprobs": self._logprobs(drawn)}
                item["status"] = status
                logprobs = {"logprobs": _without_bytes(part["logprobs"])}
                done = self._done_text("response.output_text.done", part, item, **logprobs)
            case "reasoning":
                part = {"type": "reasoning_text", "text": text}
                done = self._done_text("response.reasoning_text.done", part, item)
            case _:
                item |= {"arguments": text, "status": status}
                done = self._event(
                    "response.function_call_arguments.done",
                    item_id=item["id"],
                    output_index=self._at,
                    name=item["name"],
                    arguments=text,
                )
        event = self._event("response.output_item.done", output_index=self._at, item=item)
        return done + event

    def _done_text(self, kind: str, part: Item, item: Item, **more: Any) -> bytes:
        item["content"] = [part]
        place = self._place
        return self._event(kind, **place, text=part["text"], **more) + self._event(
            "response.content_part.done", **place, part=part
        )

    @property
    def _at(self) -> int:
        return len(self.output) - 1

    @property
    def _place(self) -> dict[str, Any]:
        """Where the only part of the open item is."""
        return {"item_id": self.output[-1]["id"], "output_index": self._at, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _without_bytes(logprobs: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Log-probabilities as events have them."""
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


def _with_tokens(said: Delta) -> Iterator[tuple[Piece | None, list[OutputToken]]]:
    """Each piece with the tokens that it is of; they are told after it."""
    current: Piece | None = None
    drawn: list[OutputToken] = []
    for told in said:
        if isinstance(told, OutputToken):
            drawn += () if told.is_end else (told,)
        elif not isinstance(told, PromptReport):
            yield current, drawn
            current, drawn = told, []
    yield current, drawn


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


def _call(item_id: str, begin: CallBegin, arguments: str, status: str) -> Item:
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": begin.call_id,
        "name": begin.name,
        "arguments": arguments,
        "status": status,
    }
