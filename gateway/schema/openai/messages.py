"""The messages of a conversation: the request's form, and the form that chat templates read."""

from itertools import accumulate
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed, quote
from gateway.schema.fields.caching import check_breakpoint

MAX_TOOL_CALLS = 1_024  # of one message
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_LEGACY_CALL_ID = "000000000"  # for calls without an id; Mistral's templates require nine digits
_OPTIONAL_FIELDS = (
    "name", "tool_call_id", "tool_calls", "function_call", "reasoning_content", "reasoning",
)  # fmt: skip


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content. Only text is supported; other types get an error."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    prompt_cache_breakpoint: Any = None

    def check(self, path: str) -> None:
        """Raise `InvalidRequest` unless it is text."""
        if self.type not in ("text", "refusal"):
            raise InvalidRequest(
                f"Invalid value: {quote(self.type)}. Only text input is supported; allowed values "
                f"for '{path}.type' are: 'text', 'refusal'.",
                f"{path}.type",
            )
        check_breakpoint(self.prompt_cache_breakpoint, f"{path}.prompt_cache_breakpoint")
        if (self.text if self.type == "text" else self.refusal) is None:
            name = f"{path}.{self.type}"
            raise InvalidRequest(f"Missing required parameter: '{name}'.", name)


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
            raise InvalidRequest(
                f"Missing required parameter: '{path}.content'.", f"{path}.content"
            )
        if self.role == "tool" and self.tool_call_id is None:
            name = f"{path}.tool_call_id"
            raise InvalidRequest(f"Missing required parameter: '{name}'.", name)
        if len(self.tool_calls or ()) > MAX_TOOL_CALLS:
            name = f"{path}.tool_calls"
            raise InvalidRequest(
                f"Invalid '{name}': at most {MAX_TOOL_CALLS} calls, but got "
                f"{len(self.tool_calls or ())}.",
                name,
            )
        for i, call in enumerate(self.tool_calls or ()):
            check_allowed(call.type, f"{path}.tool_calls[{i}].type", ("function",))
        if isinstance(self.content, list):
            for i, part in enumerate(self.content):
                part.check(f"{path}.content[{i}]")

    def as_mapping(self) -> dict[str, Any]:
        """The message as chat templates read it: one text as content, no field that is None.

        Templates have no legacy functions: a function call is written as a tool call.
        """
        mapping: dict[str, Any] = {"role": self.role, "content": self.text}
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
    def breakpoints(self) -> list[int]:
        """The numbers of characters of its text behind which there is a cache breakpoint."""
        if not isinstance(self.content, list):
            return []
        ends = accumulate(len(part.text or part.refusal or "") for part in self.content)
        rows = zip(self.content, ends, strict=True)
        return [end for part, end in rows if part.prompt_cache_breakpoint is not None]
