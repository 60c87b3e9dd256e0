"""For templates that read tools from a system message and know no calls (Phi-4-mini).

Tools become the field `tools` of the system message; calls and their results become messages with
the marks that the model was trained on.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from adapters.dialects.tool_calls import PHI_CLOSE, PHI_OPEN

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
    shown = [_shown(message) for message in messages]
    if not tools:
        return shown
    text = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if not shown or shown[0].get("role") != "system":
        shown.insert(0, {"role": "system", "content": _DEFAULT_SYSTEM})
    shown[0] = {**shown[0], "tools": text}
    return shown


def _shown(message: Message) -> Message:
    if message.get("role") == "tool":
        return {**message, "role": _RESULT_ROLE}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in calls
    ]
    text = PHI_OPEN + json.dumps(written, ensure_ascii=False) + PHI_CLOSE
    return {**message, "content": (message.get("content") or "") + text}
