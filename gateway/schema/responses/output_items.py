"""The output items of a response, and the events that tell of them.

Reasoning, text and each function call are an item each. An item is complete when the next begins.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from gateway.ports import CallArguments, CallBegin, Piece, Reasoning
from gateway.schema.openai.logprobs import LogprobsFormatter
from gateway.schema.rendering import OutputToken
from gateway.schema.responses.client_tools import CALLS, call_fields, client_call
from gateway.schema.responses.tools import CalledTool, custom_input

Item = dict[str, Any]


class NumberedEvents:
    """The events of one response, each with the next sequence number."""

    def __init__(self) -> None:
        self._next = 0

    def next_number(self) -> int:
        """The number of an event that is rendered elsewhere."""
        number, self._next = self._next, self._next + 1
        return number

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event; its fields are JSON."""
        data = orjson.dumps({"type": kind, "sequence_number": self.next_number(), **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class OutputItems:
    """The `items` of one response so far, of which the last one may be open."""

    def __init__(
        self,
        events: NumberedEvents,
        new_id: Callable[[str], str],
        formatter: LogprobsFormatter | None,
        tools: Mapping[str, CalledTool],
    ) -> None:
        """`tools` are what functions of the chat request stand for, by the functions' names."""
        self.items: list[Item] = []
        self._events = events
        self._new_id = new_id
        self._formatter = formatter
        self._tools = tools
        self._is_open = False  # the last item
        self._texts: list[str] = []  # the texts of the open item
        self._tokens: list[OutputToken] = []  # the tokens of the open item
        self._pending: list[OutputToken] = []  # not yet in any event
        self._delta_head = b""  # constant bytes before a delta's number, for the open item

    def add(self, piece: Piece | None, tokens: Sequence[OutputToken]) -> bytes:
        """The events of a piece and of the tokens behind it."""
        tokens = [*self._pending, *tokens]
        self._pending = tokens if piece is None else []
        match piece:
            case None:
                return b""
            case CallArguments(_, text) if self.items[-1]["type"] != "function_call":
                self._texts.append(text)  # JSON around the input, which is known at the end
                return b""
            case CallArguments(_, text):
                return self._delta(text)
            case CallBegin():
                return self._open_call(piece)
            case Reasoning(text):
                return self.open_text("reasoning") + self._delta(text)
            case str():
                events = self.open_text("message")
                self._tokens += tokens
                return events + self._delta(piece, tokens)

    def open_text(self, kind: str) -> bytes:
        """Begin a message or reasoning, an item of one part, unless one is open."""
        if self._is_open and self.items[-1]["type"] == kind:
            return b""
        events = self.close("completed")
        fields: Item
        if kind == "message":
            fields = {"id": self._new_id("msg_"), "status": "in_progress", "role": "assistant"}
        else:
            fields = {"id": self._new_id("rs_"), "summary": []}
        events += self._open({"type": kind, **fields, "content": []})
        part, place = _part(kind, ""), {**self._place, "content_index": 0}
        self._delta_head = _delta_head(f"response.{part['type']}", place)
        return events + self._events.event("response.content_part.added", **place, part=part)

    def _open_call(self, begin: CallBegin) -> bytes:
        events = self.close("completed")
        tool = self._tools.get(begin.name, CalledTool(begin.name))
        if tool.client_type:
            return events + self._open(client_call(tool.client_type, self._new_id, begin.call_id))
        name = {"name": tool.name}
        if tool.namespace is not None:
            name["namespace"] = tool.namespace
        identity = {
            "id": self._new_id("ctc_" if tool.is_custom else "fc_"),
            "call_id": begin.call_id,
        }
        if tool.is_custom:
            return events + self._open(
                {"type": "custom_tool_call", **identity, **name, "input": ""}
            )
        state = {"arguments": "", "status": "in_progress"}
        events += self._open({"type": "function_call", **identity, **name, **state})
        self._delta_head = _delta_head("response.function_call_arguments", self._place)
        return events

    def _open(self, item: Item) -> bytes:
        self.items.append(item)
        self._is_open = True
        self._texts, self._tokens = [], []
        index = self._place["output_index"]
        return self._events.event("response.output_item.added", output_index=index, item=item)

    def _delta(self, text: str, tokens: Sequence[OutputToken] = ()) -> bytes:
        """One delta event, joined from constant bytes: this runs for every token."""
        self._texts.append(text)
        logprobs = b""
        if self.items[-1]["type"] == "message":
            logprobs = b',"logprobs":' + orjson.dumps(_without_bytes(self._logprobs(tokens)))
        number = self._events.next_number()
        return b'%b%d%b,"delta":%b}\n\n' % (self._delta_head, number, logprobs, orjson.dumps(text))

    def close(self, status: str) -> bytes:
        """End the open item, if any, with `status`."""
        if not self._is_open:
            return b""
        self._is_open = False
        item, text, place = self.items[-1], "".join(self._texts), self._place
        event = self._events.event
        match item["type"]:
            case "message":
                item["status"] = status
                done = self._done_text(item, text)
            case "reasoning":
                done = self._done_text(item, text)
            case "custom_tool_call":
                given = item["input"] = custom_input(text)
                done = event("response.custom_tool_call_input.delta", **place, delta=given)
                done += event("response.custom_tool_call_input.done", **place, input=given)
            case kind if kind in CALLS:
                item |= {**call_fields(CALLS[kind], text), "status": status}
                done = b""
            case _:
                item |= {"arguments": text, "status": status}
                fields = {**place, "name": item["name"], "arguments": text}
                done = event("response.function_call_arguments.done", **fields)
        index = place["output_index"]
        return done + event("response.output_item.done", output_index=index, item=item)

    def _done_text(self, item: Item, text: str) -> bytes:
        logprobs = self._logprobs(self._tokens + self._pending)
        part, place = _part(item["type"], text, logprobs), {**self._place, "content_index": 0}
        more = {"logprobs": _without_bytes(logprobs)} if item["type"] == "message" else {}
        item["content"] = [part]
        return self._events.event(
            f"response.{part['type']}.done", **place, text=text, **more
        ) + self._events.event("response.content_part.done", **place, part=part)

    def _logprobs(self, tokens: Sequence[OutputToken]) -> list[Any]:
        logprobs = None if self._formatter is None else self._formatter.chat(tokens)
        return [] if logprobs is None else list(logprobs["content"])

    @property
    def _place(self) -> dict[str, Any]:
        """The id and index of the last item."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _delta_head(kind: str, place: Mapping[str, Any]) -> bytes:
    head = orjson.dumps({"type": f"{kind}.delta", **place})[:-1]
    return b'event: %b.delta\ndata: %b,"sequence_number":' % (kind.encode(), head)


def _part(kind: str, text: str, logprobs: Sequence[Any] = ()) -> Item:
    """The part of a message or of reasoning."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


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
