"""The messages of a conversation: as they come, and as chat templates see them."""

from typing import Any

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_word, shown

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OLD_CALL = "000000000"  # the id of calls that have none; nine digits, as Mistral wants
_ALSO_SEEN = (
    "name", "tool_call_id", "tool_calls", "function_call", "reasoning_content", "reasoning",
)  # fmt: skip


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of a message. Only text is served; the rest is here to be refused by name."""

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
                f"Invalid value: {shown(self.type)}. This model reads text only; supported values "
                f"for '{path}.type' are: 'text', 'refusal'.",
                f"{path}.type",
            )
        if (self.text if self.type == "text" else self.refusal) is None:
            name = f"{path}.{self.type}"
            raise InvalidRequest(f"Missing required parameter: '{name}'.", name)


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """What the model called; `arguments` is JSON in a string."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an earlier answer made. (Some clients send back the `index` of its deltas.)"""

    id: str
    type: str
    function: FunctionCall
    index: int | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of any role; `check` knows what each role needs."""

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
        """Raise `InvalidRequest` naming the part of `path` that cannot be served."""
        check_word(self.role, f"{path}.role", ROLES)
        if self.audio is not None:
            raise InvalidRequest(f"'{path}.audio' is not supported.", f"{path}.audio")
        said = self.tool_calls or self.function_call or self.refusal or self.reasoning_content
        is_said = self.role == "assistant" and (said or self.reasoning)
        if self.content is None and not is_said and self.role != "function":
            raise InvalidRequest(
                f"Missing required parameter: '{path}.content'.", f"{path}.content"
            )
        if self.role == "tool" and self.tool_call_id is None:
            name = f"{path}.tool_call_id"
            raise InvalidRequest(f"Missing required parameter: '{name}'.", name)
        for i, call in enumerate(self.tool_calls or ()):
            check_word(call.type, f"{path}.tool_calls[{i}].type", ("function",))
        if isinstance(self.content, list):
            for i, part in enumerate(self.content):
                part.check(f"{path}.content[{i}]")

    def as_mapping(self) -> dict[str, Any]:
        """The message for a chat template: parts joined to one text, absent fields absent.

        Templates know no functions: these are shown as tools.
        """
        mapping: dict[str, Any] = {"role": self.role, "content": self._text}
        for name in _ALSO_SEEN:
            if value := getattr(self, name):
                mapping[name] = msgspec.to_builtins(value)
        if self.role == "function":
            mapping |= {"role": "tool", "tool_call_id": _OLD_CALL}
        if self.function_call is not None and not self.tool_calls:
            call = {"id": _OLD_CALL, "type": "function", "function": mapping.pop("function_call")}
            mapping["tool_calls"] = [call]
        return mapping

    @property
    def _text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text or part.refusal or "" for part in self.content)
        return self.content or self.refusal or ""
