"""The messages of a conversation: the request's form, and the form that chat templates read."""

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed, invalid, missing, quote
from gateway.schema.fields.sampling import check_breakpoint
from gateway.schema.images import NO_FILES, ImageUrl, RequestedImage, template_content

MAX_TOOL_CALLS = 1_024  # calls in one message
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ROLES_WITH_IMAGES = ("user", "tool")
_TEXT_TYPES = ("text", "refusal")
_IMAGE = "image_url"
_LEGACY_CALL_ID = "000000000"  # for calls without an id; Mistral's templates require nine digits
_OPTIONAL_FIELDS = (
    "name", "tool_call_id", "tool_calls", "function_call", "reasoning_content", "reasoning",
)  # fmt: skip


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content: text or an image; other types get an error."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None
    input_audio: Any = None
    file: Any = None
    prompt_cache_breakpoint: Any = None

    def check(self, path: str, types: tuple[str, ...] = _TEXT_TYPES) -> None:
        """Raise `InvalidRequest` unless it is of one of these types."""
        if self.type not in types:
            allowed = ", ".join(f"'{name}'" for name in types)
            what = "text and images are" if _IMAGE in types else "text input is"
            hint = f" {NO_FILES}" if self.type == "file" else ""
            raise InvalidRequest(
                f"Invalid value: {quote(self.type)}. Only {what} supported; allowed values "
                f"for '{path}.type' are: {allowed}.{hint}",
                f"{path}.type",
            )
        check_breakpoint(self.prompt_cache_breakpoint, f"{path}.prompt_cache_breakpoint")
        if getattr(self, self.type) is None:
            raise missing(f"{path}.{self.type}")
        if self.type == _IMAGE and self.image_url is not None:
            self.image_url.check(f"{path}.{_IMAGE}")


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """A function's name and its `arguments`, a string of JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call of an earlier answer. (Some clients send back the `index` of its deltas.)"""

    id: str
    type: str
    function: FunctionCall
    index: int | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of any role; `check` enforces which fields each role requires."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def check(self, path: str) -> None:
        """Raise `InvalidRequest` for the first invalid field; `path` is the message's path."""
        check_allowed(self.role, f"{path}.role", ROLES)
        if self.audio is not None:
            raise InvalidRequest(f"'{path}.audio' is not supported.", f"{path}.audio")
        other = self.tool_calls or self.function_call or self.refusal or self.reasoning_content
        needs_no_content = self.role == "assistant" and (other or self.reasoning)
        if self.content is None and not needs_no_content and self.role != "function":
            raise missing(f"{path}.content")
        if self.role == "tool" and self.tool_call_id is None:
            raise missing(f"{path}.tool_call_id")
        if len(self.tool_calls or ()) > MAX_TOOL_CALLS:
            name = f"{path}.tool_calls"
            raise invalid(
                name, f"at most {MAX_TOOL_CALLS} calls, but got {len(self.tool_calls or ())}."
            )
        for i, call in enumerate(self.tool_calls or ()):
            check_allowed(call.type, f"{path}.tool_calls[{i}].type", ("function",))
        if isinstance(self.content, list):
            has_images = self.role in _ROLES_WITH_IMAGES
            types = (*_TEXT_TYPES, _IMAGE) if has_images else _TEXT_TYPES
            for i, part in enumerate(self.content):
                part.check(f"{path}.content[{i}]", types)

    def images(self, path: str) -> list[RequestedImage]:
        """Its images in order; `path` is the message's path."""
        return [
            part.image_url.requested(f"{path}.content[{i}].{_IMAGE}")
            for i, part in enumerate(self.content if isinstance(self.content, list) else ())
            if part.type == _IMAGE and part.image_url is not None
        ]

    def as_mapping(self) -> dict[str, Any]:
        """The message as chat templates read it: one text as content, or parts if there are images,
        and no field that is None.

        Templates have no legacy functions: a function call is written as a tool call.
        """
        mapping: dict[str, Any] = {"role": self.role, "content": self._content}
        for name in _OPTIONAL_FIELDS:
            if value := getattr(self, name):
                mapping[name] = msgspec.to_builtins(value)
        if self.role == "function":
            mapping |= {"role": "tool", "tool_call_id": _LEGACY_CALL_ID}
        if self.function_call is not None and not self.tool_calls:
            call = {
                "id": _LEGACY_CALL_ID,
                "type": "function",
                "function": mapping.pop("function_call"),
            }
            mapping["tool_calls"] = [call]
        return mapping

    @property
    def text(self) -> str:
        """The texts of its parts, joined."""
        if isinstance(self.content, list):
            return "".join([part.text or part.refusal or "" for part in self.content])
        return self.content or self.refusal or ""

    @property
    def _content(self) -> str | list[Any]:
        if not self.has_images or not isinstance(self.content, list):
            return self.text
        return template_content(
            None if part.type == _IMAGE else part.text or part.refusal or ""
            for part in self.content
        )

    @property
    def has_images(self) -> bool:
        """Whether a part is an image."""
        parts = self.content if isinstance(self.content, list) else ()
        return any(part.type == _IMAGE for part in parts)

    @property
    def texts(self) -> list[tuple[str, list[int]]]:
        """Its text, or the texts between its images, each with the numbers of characters behind
        which there is a cache breakpoint."""
        if not isinstance(self.content, list):
            return [(self.text, [])]
        texts: list[tuple[str, list[int]]] = [("", [])]
        for part in self.content:
            text, offsets = texts[-1]
            text += part.text or part.refusal or ""
            if part.prompt_cache_breakpoint is not None:
                offsets.append(len(text))
            texts[-1] = (text, offsets)
            if part.type == _IMAGE:
                texts.append(("", []))
        return texts


def parsed_arguments(arguments: str) -> Mapping[str, Any]:
    """The arguments of a call as an object. Text that is none, such as arguments cut off by
    `max_tokens`, is kept under `unparsed`, so that every message that was generated can be sent
    back."""
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"unparsed": arguments}
