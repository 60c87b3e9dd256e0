"""Anthropic's content blocks as messages of a chat. Only what a text model can read is served."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import orjson

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_word

ROLES = ("user", "assistant", "system")
TYPES = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
Json = dict[str, Any]


class TextBlock(msgspec.Struct, forbid_unknown_fields=True):
    """Plain text, where nothing else may stand."""

    type: str
    text: str
    cache_control: Any = None
    citations: Any = None


class ContentBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A block of any type; `check` knows what each needs."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Json | None = None
    tool_use_id: str | None = None
    content: "str | list[ContentBlock] | None" = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None
    source: Any = None
    title: Any = None
    context: Any = None

    def check(self, path: str, types: Sequence[str] = TYPES) -> None:
        """Raise `InvalidRequest` naming what is wrong or missing."""
        check_word(self.type, f"{path}.type", types)
        needed = {
            "text": ("text",),
            "tool_use": ("id", "name", "input"),
            "tool_result": ("tool_use_id",),
            "thinking": ("thinking",),
        }
        for name in needed.get(self.type, ()):
            if getattr(self, name) is None:
                param = f"{path}.{name}"
                raise InvalidRequest(f"Missing required parameter: '{param}'.", param)
        if isinstance(self.content, list):
            for i, block in enumerate(self.content):
                block.check(f"{path}.content[{i}]", ("text",))


class InMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message."""

    role: str
    content: str | list[ContentBlock]

    def check(self, path: str) -> None:
        """Raise `InvalidRequest` naming what is wrong."""
        check_word(self.role, f"{path}.role", ROLES)
        if isinstance(self.content, list):
            for i, block in enumerate(self.content):
                block.check(f"{path}.content[{i}]")


def as_messages(messages: Iterable[InMessage]) -> list[Json]:
    """What tools returned becomes messages of their own; what the assistant thought, said and
    called stays one."""
    made: list[Json] = []
    for message in messages:
        if message.role == "assistant":
            made.append(_turn(message))
        else:
            made += _asked(message)
    return made


def joined(content: "str | Sequence[ContentBlock] | Sequence[TextBlock]") -> str:
    """The text of blocks that are all text."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text or "" for block in content if block.type == "text")


def _asked(message: InMessage) -> list[Json]:
    """Results of tools in their places among the texts between them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    made: list[Json] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            made.append({"role": message.role, "content": "\n".join(texts)})
            texts.clear()

    for block in message.content:
        if block.type == "tool_result":
            flush()
            content = joined(block.content or "")
            shown = f"Error: {content}" if block.is_error else content
            made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": shown})
        elif block.type == "text":
            texts.append(block.text or "")
    flush()
    return made or [{"role": message.role, "content": ""}]


def _turn(message: InMessage) -> Json:
    turn: Json = {"role": "assistant", "content": joined(message.content)}
    blocks = [] if isinstance(message.content, str) else message.content
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    return {**turn, "tool_calls": calls} if calls else turn


def _call(block: ContentBlock) -> Json:
    function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}
