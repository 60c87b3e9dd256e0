"""One streamed answer as the terminal shows it and as the conversation remembers it.

Reasoning is dim on a terminal and left out of a pipe; a tool call is a line of its own.
"""

from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.commands.http_client import ServerError, error_text

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_CALL = "→ "


@dataclass(slots=True)
class StreamedAnswer:
    """Fed with events, it says what to show."""

    is_tty: bool = False
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    has_shown: bool = False
    _is_dim: bool = False

    def feed(self, data: bytes) -> str:
        """What one event adds to the screen; raises `ServerError` for an error event."""
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise ServerError("the server sent an event that is not JSON") from error
        if "error" in event:
            raise ServerError(error_text(event["error"]))
        deltas = (choice.get("delta") or {} for choice in event.get("choices") or ())
        shown = "".join(map(self._add, deltas))
        self.has_shown |= bool(shown)
        return shown

    def finish(self) -> str:
        """What puts the screen right again."""
        shown, self._is_dim = _PLAIN * self._is_dim, False
        return shown

    @property
    def message(self) -> dict[str, Any]:
        """For the next turn; the model's own reasoning is no part of it."""
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.content, **calls}

    def _add(self, delta: dict[str, Any]) -> str:
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or ""
        self.reasoning += thought
        self.content += text
        shown = self._dim(printable(thought)) if thought and self.is_tty else ""
        if text:
            shown += self._bright(printable(text))
        for part in delta.get("tool_calls") or ():
            shown += self._bright(self._add_call(part))
        return shown

    def _dim(self, text: str) -> str:
        shown = text if self._is_dim else _DIM + text
        self._is_dim = True
        return shown

    def _bright(self, text: str) -> str:
        shown = f"{_PLAIN}\n\n{text}" if self._is_dim else text
        self._is_dim = False
        return shown

    def _add_call(self, part: dict[str, Any]) -> str:
        function = part.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        shown = printable(arguments)
        if part.get("index", len(self.calls)) >= len(self.calls):
            called = {"name": name, "arguments": ""}
            self.calls.append({"id": part.get("id") or "", "type": "function", "function": called})
            newline = "\n" if self.has_shown or self.content or len(self.calls) > 1 else ""
            shown = f"{newline}{_CALL}{printable(name)} {shown}"
        self.calls[-1]["function"]["arguments"] += arguments
        return shown


def printable(text: str) -> str:
    """The text without control characters that could move the cursor."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")
