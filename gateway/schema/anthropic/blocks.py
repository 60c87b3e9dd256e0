"""Anthropic's messages and content blocks, and the chat messages they become.

Supported block types are text, documents of plain text, thinking, tool use and tool result.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import orjson

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed
from gateway.schema.fields.caching import BREAKPOINT

ROLES = ("user", "assistant", "system")
TYPES = ("text", "document", "tool_use", "tool_result", "thinking", "redacted_thinking")
RESULT_TYPES = ("text", "document")  # in a tool's result
MARK = "prompt_cache_breakpoint"  # of a part of a chat message
Json = dict[str, Any]


class TextBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A block of `system`, which may have text only."""

    type: str
    text: str
    cache_control: Any = None
    citations: Any = None

    @property
    def all_text(self) -> str:
        return self.text


class ContentBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A block of any type; `check` enforces which fields each type requires."""

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
        """Raise `InvalidRequest` for the first invalid or missing field; `path` is the block's."""
        check_allowed(self.type, f"{path}.type", types)
        required = {
            "text": ("text",),
            "document": ("source",),
            "tool_use": ("id", "name", "input"),
            "tool_result": ("tool_use_id",),
            "thinking": ("thinking",),
        }
        for name in required.get(self.type, ()):
            if getattr(self, name) is None:
                param = f"{path}.{name}"
                raise InvalidRequest(f"Missing required parameter: '{param}'.", param)
        if self.type == "document":
            self._check_document(f"{path}.source")
        if isinstance(self.content, list):
            for i, block in enumerate(self.content):
                block.check(f"{path}.content[{i}]", RESULT_TYPES)

    def _check_document(self, path: str) -> None:
        match self.source:
            case {"type": "text", "data": str()} | {"type": "content", "content": str()}:
                return
            case {"type": "content", "content": [*parts]} if all(map(_is_text, parts)):
                return
        raise InvalidRequest(
            f"Invalid '{path}': only plain text is supported: "
            '{"type": "text", "media_type": "text/plain", "data": "…"}, or content of text blocks.',
            path,
        )

    @property
    def all_text(self) -> str:
        """The text of a block of text, or a document's title, context and text."""
        if self.type != "document":
            return self.text or ""
        source = self.source
        text = source["data"] if source["type"] == "text" else source["content"]
        if not isinstance(text, str):
            text = "\n".join(part["text"] for part in text)
        heads = [head for head in (self.title, self.context) if isinstance(head, str)]
        return "\n".join([*heads, text])


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


class AnthropicMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message."""

    role: str
    content: str | list[ContentBlock]

    def check(self, path: str) -> None:
        """Raise `InvalidRequest` for the first invalid field; `path` is the message's path."""
        check_allowed(self.role, f"{path}.role", ROLES)
        if isinstance(self.content, list):
            for i, block in enumerate(self.content):
                block.check(f"{path}.content[{i}]")


def as_messages(messages: Iterable[AnthropicMessage]) -> list[Json]:
    """The chat messages. Each tool result becomes a message of its own; the reasoning, text and
    calls of an assistant message stay one message."""
    converted: list[Json] = []
    for message in messages:
        if message.role == "assistant":
            converted.append(_assistant_message(message))
        else:
            converted += _user_messages(message)
    return converted


def marked(content: "str | Sequence[ContentBlock] | Sequence[TextBlock]") -> str | list[Json]:
    """The text of `joined`; in parts if a block has `cache_control`, which is a breakpoint."""
    if isinstance(content, str) or all(block.cache_control is None for block in content):
        return joined(content)
    blocks = [block for block in content if block.type in RESULT_TYPES]
    return [
        {
            "type": "text",
            "text": f"\n{block.all_text}" if place else block.all_text,
            **({MARK: BREAKPOINT} if block.cache_control is not None else {}),
        }
        for place, block in enumerate(blocks)
    ]


def joined(content: "str | Sequence[ContentBlock] | Sequence[TextBlock]") -> str:
    """The texts of the blocks of text and of the documents, joined by newlines."""
    if isinstance(content, str):
        return content
    return "\n".join(block.all_text for block in content if block.type in RESULT_TYPES)


def _user_messages(message: AnthropicMessage) -> list[Json]:
    """A user message as chat messages: tool results and the texts between them, in order."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    converted: list[Json] = []
    texts: list[ContentBlock] = []

    def flush() -> None:
        if texts:
            converted.append({"role": message.role, "content": marked(texts)})
            texts.clear()

    for block in message.content:
        if block.type == "tool_result":
            flush()
            converted.append(_tool_message(block))
        elif block.type in RESULT_TYPES:
            texts.append(block)
    flush()
    return converted or [{"role": message.role, "content": ""}]


def _tool_message(block: ContentBlock) -> Json:
    """The message of a tool's result."""
    content = joined(block.content or "")
    text: str | list[Json] = f"Error: {content}" if block.is_error else content
    if block.cache_control is not None:
        text = [{"type": "text", "text": text, MARK: BREAKPOINT}]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _assistant_message(message: AnthropicMessage) -> Json:
    converted: Json = {"role": "assistant", "content": marked(message.content)}
    blocks = [] if isinstance(message.content, str) else message.content
    thinking = [block.thinking or "" for block in blocks if block.type == "thinking"]
    if thinking:
        converted["reasoning_content"] = "".join(thinking)
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    return {**converted, "tool_calls": calls} if calls else converted


def _call(block: ContentBlock) -> Json:
    function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}
