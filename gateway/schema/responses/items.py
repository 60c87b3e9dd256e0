"""Items of the Responses API: as requested, as stored, and as the chat messages they become.

Supported types are messages, calls of functions, custom tools, `shell` and `apply_patch`, their
outputs, and reasoning. An item of another type is rejected with an error that names the type.
Users' messages and outputs of functions may have images.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import orjson

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed, invalid, missing
from gateway.schema.fields.sampling import BREAKPOINT, check_breakpoint
from gateway.schema.images import NO_FILES, ImageUrl, Part, image_part
from gateway.schema.responses.client_tools import (
    CALLS,
    CLIENT_TOOLS,
    OUTPUTS,
    call_arguments,
    checked_call,
    checked_output,
    output_text,
)
from gateway.schema.responses.tools import INPUT, function_name

Item = dict[str, Any]

MARK = "prompt_cache_breakpoint"
MAX_ITEMS = 10_000
ROLES = ("user", "assistant", "system", "developer")
TYPES = (
    "message", "function_call", "function_call_output", "custom_tool_call",
    "custom_tool_call_output", "reasoning", *CALLS, *OUTPUTS,
)  # fmt: skip
_TEXT_PARTS = ("input_text", "output_text", "refusal")
IMAGE = "input_image"
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
    **{kind: CLIENT_TOOLS[name].prefix for kind, name in CALLS.items()},
    **{kind: f"{CLIENT_TOOLS[name].prefix}o_" for kind, name in OUTPUTS.items()},
}


class ContentItem(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content, or of a function's output."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: str | None = None
    file_id: str | None = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: str | None = None
    stdout: str | None = None  # a shell's output, with `stderr` and `outcome`
    stderr: str | None = None
    outcome: Any = None
    data: Any = None  # a part of JSON, which only decisions have
    prompt_cache_breakpoint: Any = None

    def as_stored(self, path: str, text_type: str, *, may_be_image: bool) -> Item:
        """The part as it is stored. Raises `InvalidRequest` for one of another type."""
        if self.type == "input_file":
            raise InvalidRequest(f"'{path}' cannot be of type 'input_file'. {NO_FILES}", path)
        if self.type != IMAGE or not may_be_image:
            types = (*_TEXT_PARTS, IMAGE) if may_be_image else _TEXT_PARTS
            return {"type": text_type, "text": self.read(path, types), **self.mark}
        check_breakpoint(self.prompt_cache_breakpoint, f"{path}.prompt_cache_breakpoint")
        ImageUrl(self.image_url, self.file_id, self.detail).check(path)
        source = {"image_url": self.image_url, "file_id": self.file_id}
        return {"type": IMAGE, **source, "detail": self.detail or "auto", **self.mark}

    def read(self, path: str, types: Sequence[str] = _TEXT_PARTS) -> str:
        """Its text. Raises `InvalidRequest`, which names `types`, for a part that is not text."""
        check_allowed(self.type, f"{path}.type", types)
        check_breakpoint(self.prompt_cache_breakpoint, f"{path}.prompt_cache_breakpoint")
        name = "refusal" if self.type == "refusal" else "text"
        text = self.refusal if self.type == "refusal" else self.text
        if text is None:
            raise missing(f"{path}.{name}")
        return text

    @property
    def mark(self) -> Item:
        """The field of a part behind which there is a cache breakpoint."""
        return {MARK: BREAKPOINT} if self.prompt_cache_breakpoint is not None else {}


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True):
    """A part of the model's reasoning, or of a summary of it."""

    type: str
    text: str


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """One item of any type; `as_stored` enforces which fields each type requires."""

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
    input: str | None = None
    namespace: str | None = None
    caller: Any = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    environment: Any = None
    max_output_length: int | None = None

    def as_stored(self, path: str, new_id: Callable[[str], str]) -> Item:
        """The item as it is stored and returned. Raises `InvalidRequest` for an invalid field."""
        check_allowed(self.type, f"{path}.type", TYPES)
        item_id = self.id or new_id(_PREFIXES[self.type])
        status = self.status or "completed"
        failed = ("failed",) if self.type == "apply_patch_call_output" else ()
        allowed = ("in_progress", "completed", "incomplete", *failed)
        check_allowed(status, f"{path}.status", allowed)
        match self.type:
            case "message":
                role = self._required("role", path)
                check_allowed(role, f"{path}.role", ROLES)
                parts = self._parts("content", path, is_output=_is_output(role))
                return {
                    "type": "message", "id": item_id, "status": status, "role": role,
                    "content": parts,
                }  # fmt: skip
            case "function_call" | "custom_tool_call":
                is_custom = self.type == "custom_tool_call"
                given = "input" if is_custom else "arguments"
                return {
                    "type": self.type,
                    "id": item_id,
                    "call_id": self._required("call_id", path),
                    "name": self._required("name", path),
                    **({} if self.namespace is None else {"namespace": self.namespace}),
                    given: self._required(given, path),
                    **({} if is_custom else {"status": status}),
                }
            case "function_call_output" | "custom_tool_call_output":
                parts = self._parts("output", path, is_output=False)
                return {
                    "type": self.type,
                    "id": item_id,
                    "call_id": self._required("call_id", path),
                    "output": parts if _has_mark(parts) or _has_image(parts) else _text(parts),
                    "status": status,
                }
        if self.type in CALLS or self.type in OUTPUTS:
            call_id = self._required("call_id", path)
            identity = {"type": self.type, "id": item_id, "call_id": call_id, "status": status}
            return {**identity, **self._of_client(path)}
        reasoning = [
            {"type": "reasoning_text", "text": part.text or ""}
            for part in (self.content if isinstance(self.content, list) else ())
        ]
        summary = [{"type": "summary_text", "text": part.text} for part in self.summary or ()]
        return {"type": "reasoning", "id": item_id, "summary": summary, "content": reasoning}

    def _of_client(self, path: str) -> Item:
        """The fields of a call of `shell` or `apply_patch`, or of its output."""
        if (tool := CALLS.get(self.type)) is not None:
            return checked_call(tool, getattr(self, CLIENT_TOOLS[tool].field), path)
        output: object = self.output
        if isinstance(self.output, list):
            names = ("stdout", "stderr", "outcome")
            output = [{name: getattr(part, name) for name in names} for part in self.output]
        return {"output": checked_output(OUTPUTS[self.type], output, path)}

    def _required(self, name: str, path: str) -> str:
        value: str | None = getattr(self, name)
        if value is None:
            raise missing(f"{path}.{name}")
        return value

    def _parts(self, name: str, path: str, *, is_output: bool) -> list[Item]:
        """The texts of a field as `output_text` or `input_text` parts, and its images."""
        content: str | list[ContentItem] | None = getattr(self, name)
        kind = "output_text" if is_output else "input_text"
        if content is None:
            raise missing(f"{path}.{name}")
        if isinstance(content, str):
            content = [ContentItem(kind, content)]
        extra: Item = {"annotations": [], "logprobs": []} if is_output else {}
        may_be_image = self.role == "user" or name == "output"
        return [
            {**part.as_stored(f"{path}.{name}[{i}]", kind, may_be_image=may_be_image), **extra}
            for i, part in enumerate(content)
        ]

    def image_fields(self, path: str) -> list[str]:
        """The paths of its images, in order."""
        name = "output" if self.type in _OUTPUTS else "content"
        parts: str | list[ContentItem] | None = getattr(self, name)
        return [
            f"{path}.{name}[{i}]"
            for i, part in enumerate(parts if isinstance(parts, list) else ())
            if part.type == IMAGE
        ]


def stored_items(
    items: str | Sequence[InputItem], new_id: Callable[[str], str], field: str = "input"
) -> list[Item]:
    """The items of an `input`, each with an id. Raises `InvalidRequest`, which names the field."""
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    if not 0 < len(items) <= MAX_ITEMS:
        raise invalid(field, f"expected 1 to {MAX_ITEMS} items.")
    return [item.as_stored(f"{field}[{i}]", new_id) for i, item in enumerate(items)]


def distinct(items: list[Item], known: set[str], new_id: Callable[[str], str]) -> list[Item]:
    """The items; one whose id is `known`, or that of an item before it, gets a new one."""
    known, result = set(known), list[Item]()
    for item in items:
        is_new = item["id"] not in known
        result.append(item if is_new else {**item, "id": new_id(_PREFIXES[item["type"]])})
        known.add(item["id"])
    return result


def check_outputs(before: Iterable[Item], items: Sequence[Item]) -> None:
    """Raise `InvalidRequest` for an output among `items` whose call is not in them or before."""
    outputs = [item for item in items if item["type"].endswith("_output")]
    if not outputs:
        return
    calls = {item["call_id"] for item in chain(before, items) if item["type"].endswith("_call")}
    for item in outputs:
        if item["call_id"] not in calls:
            kind = item["type"].replace("_", " ")
            found = f"No tool call found for {kind} with call_id {item['call_id'][:100]!r}."
            raise InvalidRequest(found, "input")


def as_messages(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items as chat messages. Consecutive assistant items (reasoning, text, calls) become one."""
    messages: list[dict[str, Any]] = []
    assistant: dict[str, Any] | None = None  # the last message, if it is the assistant's
    for item in items:
        if item["type"] == "message" and not _is_output(item["role"]):
            messages.append({"role": item["role"], "content": _content(item["content"])})
            assistant = None
        elif item["type"].endswith("_output"):
            call_id, output = item["call_id"], item["output"]
            if item["type"] in OUTPUTS:
                output = output_text(item)
            elif not isinstance(output, str):
                output = _content(output)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            assistant = None
        else:
            if assistant is None or not _continues(assistant, item):
                assistant = {"role": "assistant"}
                messages.append(assistant)
            _add(assistant, item)
    return [_with_content(message) for message in messages]


def _continues(message: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    """Whether an item belongs to the same message: reasoning comes first, then text, then calls."""
    match item["type"]:
        case "reasoning":
            return False
        case "message":
            return "content" not in message and "tool_calls" not in message
    return True


def _add(message: dict[str, Any], item: Mapping[str, Any]) -> None:
    match item["type"]:
        case "reasoning":
            message["reasoning_content"] = _text(item["content"])
        case "message":
            message["content"] = _content(item["content"])
        case kind:
            name = CALLS.get(kind) or function_name(item["name"], item.get("namespace"))
            if kind in CALLS:
                arguments = call_arguments(item)
            elif kind == "custom_tool_call":
                arguments = orjson.dumps({INPUT: item["input"]}).decode()
            else:
                arguments = item["arguments"]
            function = {"name": name, "arguments": arguments}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """An answer that ended during its reasoning has no content; a message needs one."""
    if not message.get("content") and not message.get("tool_calls"):
        message["content"] = message.get("content", "")
    return message


def _content(parts: Sequence[Mapping[str, Any]]) -> str | list[Item]:
    """The text of parts; the parts as chat has them if one is an image or has a breakpoint."""
    if not _has_mark(parts) and not _has_image(parts):
        return _text(parts)
    return [{**_chat_part(part), **({MARK: part[MARK]} if MARK in part else {})} for part in parts]


def _chat_part(part: Mapping[str, Any]) -> Part:
    if part["type"] == IMAGE:
        return image_part(part["image_url"], part["file_id"], part["detail"])
    return {"type": "text", "text": part["text"]}


def _has_image(parts: Iterable[Mapping[str, Any]]) -> bool:
    return any(part["type"] == IMAGE for part in parts)


def _has_mark(parts: Iterable[Mapping[str, Any]]) -> bool:
    return any(MARK in part for part in parts)


def _text(parts: Iterable[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)


def _is_output(role: str) -> bool:
    return role == "assistant"
