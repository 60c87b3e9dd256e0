"""Anthropic's messages and content blocks, and the chat messages they become.

Supported block types are text, images, documents of plain text, thinking, tool use and tool result.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import orjson

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed, missing
from gateway.schema.fields.sampling import BREAKPOINT
from gateway.schema.images import NO_FILES, Part, image_part

ROLES = ("user", "assistant", "system")
TYPES = ("text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking")
TEXT_TYPES = ("text", "document")
RESULT_TYPES = (*TEXT_TYPES, "image")  # in a tool's result
MARK = "prompt_cache_breakpoint"  # the key of a chat message's part
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
            "image": ("source",),
            "tool_use": ("id", "name", "input"),
            "tool_result": ("tool_use_id",),
            "thinking": ("thinking",),
        }
        for name in required.get(self.type, ()):
            if getattr(self, name) is None:
                raise missing(f"{path}.{name}")
        if self.type == "document":
            self._check_document(f"{path}.source")
        if self.type == "image":
            self._check_image(f"{path}.source")
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
            '{"type": "text", "media_type": "text/plain", "data": "…"}, or content of text blocks. '
            + NO_FILES,
            path,
        )

    def _check_image(self, path: str) -> None:
        match self.source:
            case (
                {"type": "base64", "media_type": str(), "data": str()}
                | {"type": "url", "url": str()}
                | {"type": "file", "file_id": str()}
            ):
                return
        raise InvalidRequest(
            f"Invalid '{path}': expected "
            '{"type": "base64", "media_type": "image/png", "data": "…"}, '
            '{"type": "url", "url": "…"} or {"type": "file", "file_id": "…"}.',
            path,
        )

    @property
    def image(self) -> Part:
        """The image as a part of a chat message."""
        source = self.source
        if source["type"] == "base64":
            return image_part(f"data:{source['media_type']};base64,{source['data']}")
        return image_part(source.get("url"), source.get("file_id"))

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
                if block.type == "image" and self.role != "user":
                    raise InvalidRequest(
                        f"Invalid '{path}.content[{i}]': only messages of the role 'user' may have "
                        "images.",
                        f"{path}.content[{i}].type",
                    )

    def image_fields(self, path: str) -> list[str]:
        """The paths of its images, in order; `path` is the message's path."""
        blocks = [] if isinstance(self.content, str) else self.content
        return [
            f"{each}.source"
            for i, block in enumerate(blocks)
            for each, inner in _with_path(block, f"{path}.content[{i}]")
            if inner.type == "image"
        ]


def _with_path(block: ContentBlock, path: str) -> list[tuple[str, ContentBlock]]:
    """The block, or the blocks of a tool's result, with their paths."""
    if block.type == "tool_result" and isinstance(block.content, list):
        return [(f"{path}.content[{i}]", inner) for i, inner in enumerate(block.content)]
    return [(path, block)]


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
    """The text of `joined`; in parts if a block is an image, or has `cache_control`, which is a
    breakpoint."""
    if isinstance(content, str) or not (
        has_image(content) or any(block.cache_control is not None for block in content)
    ):
        return joined(content)
    parts: list[Json] = []
    for block in content:
        if block.type not in RESULT_TYPES:
            continue
        if isinstance(block, ContentBlock) and block.type == "image":
            part = dict(block.image)
        else:
            gap = "\n" if parts and parts[-1]["type"] == "text" else ""
            part = {"type": "text", "text": f"{gap}{block.all_text}"}
        parts.append(part if block.cache_control is None else {**part, MARK: BREAKPOINT})
    return parts


def has_image(content: "str | Sequence[ContentBlock] | Sequence[TextBlock]") -> bool:
    """Whether a block is an image."""
    return not isinstance(content, str) and any(block.type == "image" for block in content)


def joined(content: "str | Sequence[ContentBlock] | Sequence[TextBlock]") -> str:
    """The texts of the blocks of text and of the documents, joined by newlines."""
    if isinstance(content, str):
        return content
    return "\n".join(block.all_text for block in content if block.type in TEXT_TYPES)


def _user_messages(message: AnthropicMessage) -> list[Json]:
    """A user message as chat messages: tool results and what is between them, in order."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    converted: list[Json] = []
    blocks: list[ContentBlock] = []

    def flush() -> None:
        if blocks:
            converted.append({"role": message.role, "content": marked(blocks)})
            blocks.clear()

    for block in message.content:
        if block.type == "tool_result":
            flush()
            converted.append(_tool_message(block))
        elif block.type in RESULT_TYPES:
            blocks.append(block)
    flush()
    return converted or [{"role": message.role, "content": ""}]


def _tool_message(block: ContentBlock) -> Json:
    """The message of a tool's result."""
    inner = block.content or ""
    content = marked(inner) if has_image(inner) else joined(inner)
    if block.is_error:
        error: Json = {"type": "text", "text": "Error: "}
        content = f"Error: {content}" if isinstance(content, str) else [error, *content]
    if block.cache_control is not None:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        content = [*parts[:-1], {**parts[-1], MARK: BREAKPOINT}]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


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
