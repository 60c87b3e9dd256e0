"""For templates that render no tool calls: calls become text with the marks of the model.

Granite 3's template renders tools, but only the content of messages. Phi-4-mini's reads tools from
the field `tools` of the system message too, and its results have a role of their own.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from adapters.dialects.calls.tool_calls import GRANITE_CALLS, PHI_CLOSE, PHI_OPEN

Message = Mapping[str, Any]

_READS_MESSAGE = ("'tools' in message", '"tools" in message')
_DEFAULT_SYSTEM = "You are a helpful assistant with some tools."
_RESULT_ROLE = "tool_response"


def reads_tools_of_messages(template: str) -> bool:
    """Whether a chat template looks for tools in a message."""
    return any(text in template for text in _READS_MESSAGE)


def with_message_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> list[Message]:
    """The messages with tools, calls and results in the form that such templates render."""
    written = with_written_calls(messages, PHI_OPEN, PHI_CLOSE)
    shown = [
        {**each, "role": _RESULT_ROLE} if each.get("role") == "tool" else each for each in written
    ]
    if not tools:
        return shown
    text = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if not shown or shown[0].get("role") != "system":
        shown.insert(0, {"role": "system", "content": _DEFAULT_SYSTEM})
    shown[0] = {**shown[0], "tools": text}
    return shown


def lacks_calls(template: str) -> bool:
    """Whether a chat template with Granite's mark of calls renders no calls of messages."""
    return GRANITE_CALLS in template and "tool_calls" not in template


def with_written_calls(
    messages: Sequence[Message], opening: str = GRANITE_CALLS, closing: str = ""
) -> list[Message]:
    """The messages with their calls as a JSON array between the marks, behind the content."""
    return [_with_calls(message, opening, closing) for message in messages]


def _with_calls(message: Message, opening: str, closing: str) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in calls
    ]
    text = opening + json.dumps(written, ensure_ascii=False) + closing
    return {**message, "content": (message.get("content") or "") + text}
