"""Items of the Responses API: as they come, as they are kept, and as messages of a chat.

Only what a text model can read is served: messages, function calls and their outputs, reasoning.
Everything else is refused by its type.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_word

Item = dict[str, Any]

MAX_ITEMS = 10_000
ROLES = ("user", "assistant", "system", "developer")
TYPES = ("message", "function_call", "function_call_output", "reasoning")
_TEXT_PARTS = ("input_text", "output_text", "refusal")
_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}


class ContentItem(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of a message, or of what a function returned."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None
    prompt_cache_breakpoint: Any = None

    def read(self, path: str) -> str:
        """Its text; raises `InvalidRequest` for what is none."""
        check_word(self.type, f"{path}.type", _TEXT_PARTS)
        name = "refusal" if self.type == "refusal" else "text"
        text = self.refusal if self.type == "refusal" else self.text
        if text is None:
            param = f"{path}.{name}"
            raise InvalidRequest(f"Missing required parameter: '{param}'.", param)
        return text


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of what the model thought, or of a summary of it."""

    type: str
    text: str


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """One item of any type; `check` knows what each needs."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: str | None = None
    phase: str | None = None
    content: str | list[ContentItem] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentItem] | None = None
    summary: list[ReasoningItem] | None = None
    encrypted_content: str | None = None
    namespace: Any = None
    caller: Any = None

    def kept(self, path: str, new_id: Callable[[str], str]) -> Item:
        """The item as it is kept and told; raises `InvalidRequest` naming what is wrong."""
        check_word(self.type, f"{path}.type", TYPES)
        item_id = self.id or new_id(_PREFIXES[self.type])
        status = self.status or "completed"
        check_word(status, f"{path}.status", ("in_progress", "completed", "incomplete"))
        match self.type:
            case "message":
                role = self._needed("role", path)
                check_word(role, f"{path}.role", ROLES)
                parts = self._parts("content", path, "output_text" if _is_own(role) else "")
                return {
                    "type": "message", "id": item_id, "status": status, "role": role,
                    "content": parts,
                }  # fmt: skip
            case "function_call":
                return {
                    "type": "function_call",
                    "id": item_id,
                    "call_id": self._needed("call_id", path),
                    "name": self._needed("name", path),
                    "arguments": self._needed("arguments", path),
                    "status": status,
                }
            case "function_call_output":
                texts = self._parts("output", path, "")
                return {
                    "type": "function_call_output",
                    "id": item_id,
                    "call_id": self._needed("call_id", path),
                    "output": "".join(part["text"] for part in texts),
                    "status": status,
                }
        thoughts = [
            {"type": "reasoning_text", "text": part.text or ""}
            for part in (self.content if isinstance(self.content, list) else ())
        ]
        summary = [{"type": "summary_text", "text": part.text} for part in self.summary or ()]
        return {"type": "reasoning", "id": item_id, "summary": summary, "content": thoughts}

    def _needed(self, name: str, path: str) -> str:
        value: str | None = getattr(self, name)
        if value is None:
            raise InvalidRequest(f"Missing required parameter: '{path}.{name}'.", f"{path}.{name}")
        return value

    def _parts(self, name: str, path: str, own_type: str) -> list[Item]:
        """Texts as parts, of the type that a text of this side has."""
        content: str | list[ContentItem] | None = getattr(self, name)
        kind = own_type or "input_text"
        if content is None:
            raise InvalidRequest(f"Missing required parameter: '{path}.{name}'.", f"{path}.{name}")
        texts = (
            [content]
            if isinstance(content, str)
            else [part.read(f"{path}.{name}[{i}]") for i, part in enumerate(content)]
        )
        extra: Item = {"annotations": [], "logprobs": []} if own_type else {}
        return [{"type": kind, "text": text, **extra} for text in texts]


def kept_items(items: str | Sequence[InputItem], new_id: Callable[[str], str]) -> list[Item]:
    """An `input` as items with ids. Raises `InvalidRequest`."""
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    if not 0 < len(items) <= MAX_ITEMS:
        raise InvalidRequest(f"Invalid 'input': expected 1 to {MAX_ITEMS} items.", "input")
    return [item.kept(f"input[{i}]", new_id) for i, item in enumerate(items)]


def as_messages(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages of a chat: what the assistant thought, said and called in one turn is
    one message there."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # of the assistant, the last message
    for item in items:
        if item["type"] == "message" and not _is_own(item["role"]):
            messages.append({"role": item["role"], "content": _text(item["content"])})
            turn = None
        elif item["type"] == "function_call_output":
            call_id, output = item["call_id"], item["output"]
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            turn = None
        else:
            if turn is None or not _continues(turn, item):
                turn = {"role": "assistant"}
                messages.append(turn)
            _add(turn, item)
    return [_complete(message) for message in messages]


def _continues(turn: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    """Whether an item can stand in the same message: thoughts, then text, then calls."""
    match item["type"]:
        case "reasoning":
            return False
        case "message":
            return "content" not in turn and "tool_calls" not in turn
    return True


def _add(turn: dict[str, Any], item: Mapping[str, Any]) -> None:
    match item["type"]:
        case "reasoning":
            turn["reasoning_content"] = _text(item["content"])
        case "message":
            turn["content"] = _text(item["content"])
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)


def _complete(message: dict[str, Any]) -> dict[str, Any]:
    """A turn that was broken off says nothing, but it is a message."""
    if not message.get("content") and not message.get("tool_calls"):
        message["content"] = message.get("content", "")
    return message


def _text(parts: Iterable[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)


def _is_own(role: str) -> bool:
    return role == "assistant"
