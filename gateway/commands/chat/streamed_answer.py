"""One streamed answer: the text to print, and the message for the conversation's history.

Reasoning is dim on a terminal and omitted in a pipe; a tool call is printed on its own line.
"""

from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.commands.http_client import ServerError, error_text

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_CALL = "→ "


@dataclass(slots=True)
class StreamedAnswer:
    """Collects an answer's events; `feed` returns the text to print."""

    is_tty: bool = False
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    has_output: bool = False
    _is_dim: bool = False

    def feed(self, data: bytes) -> str:
        """The text that one event adds. Raises `ServerError` for an error event."""
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise ServerError("the server sent an event that is not JSON") from error
        if "error" in event:
            raise ServerError(error_text(event["error"]))
        deltas = (choice.get("delta") or {} for choice in event.get("choices") or ())
        text = "".join(map(self._add, deltas))
        self.has_output |= bool(text)
        return text

    def finish(self) -> str:
        """The escape sequence that ends dim text, if any is open."""
        text, self._is_dim = _PLAIN * self._is_dim, False
        return text

    @property
    def message(self) -> dict[str, Any]:
        """The message for the history, without the reasoning."""
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.content, **calls}

    def _add(self, delta: dict[str, Any]) -> str:
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or ""
        self.reasoning += reasoning
        self.content += text
        output = self._dim(printable(reasoning)) if reasoning and self.is_tty else ""
        if text:
            output += self._bright(printable(text))
        for part in delta.get("tool_calls") or ():
            output += self._bright(self._add_call(part))
        return output

    def _dim(self, text: str) -> str:
        output = text if self._is_dim else _DIM + text
        self._is_dim = True
        return output

    def _bright(self, text: str) -> str:
        output = f"{_PLAIN}\n\n{text}" if self._is_dim else text
        self._is_dim = False
        return output

    def _add_call(self, part: dict[str, Any]) -> str:
        function = part.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        output = printable(arguments)
        if part.get("index", len(self.calls)) >= len(self.calls):
            called = {"name": name, "arguments": ""}
            self.calls.append({"id": part.get("id") or "", "type": "function", "function": called})
            newline = "\n" if self.has_output or self.content or len(self.calls) > 1 else ""
            output = f"{newline}{_CALL}{printable(name)} {output}"
        self.calls[-1]["function"]["arguments"] += arguments
        return output


def printable(text: str) -> str:
    """The text without control characters, which could move the cursor."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")
