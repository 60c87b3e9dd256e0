"""`POST /v1/chat/completions`: the request, and its messages as chat templates read them."""

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from engine.errors import InvalidRequest
from gateway.schema.decoding import (
    UnknownFields,
    check_allowed,
    check_minimum,
    convert,
    decode_checked,
    invalid,
    missing,
    quote,
    reject_unless,
)
from gateway.schema.fields.generation import GenerationRequest
from gateway.schema.fields.sampling import check_breakpoint
from gateway.schema.images import NO_FILES, ImageUrl, RequestedImage, template_content
from gateway.schema.openai.tools import (
    NO_TOOLS,
    FunctionDefinition,
    Tool,
    ToolPlan,
    plan_functions,
    plan_tools,
)

VERBOSITIES = ("low", "medium", "high")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_TEMPLATE = 1 << 16  # characters
MAX_MESSAGES = 16_384  # each takes about 2 us of the event loop to check
NO_EFFECT: dict[str, tuple[object, ...]] = {
    "modalities": (["text"], []),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
}
_RESERVED_VARIABLES = ("self", "messages", "tools", "add_generation_prompt")
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


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """Text that the output is expected to repeat, used to propose tokens (speculation)."""

    type: str
    content: str | list[ContentPart]

    def check(self) -> None:
        """Raise `InvalidRequest` unless it is text."""
        check_allowed(self.type, "prediction.type", ("content",))
        if isinstance(self.content, list):
            for i, part in enumerate(self.content):
                part.check(f"prediction.content[{i}]")

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join([part.text or part.refusal or "" for part in self.content])


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """All fields of OpenAI's chat completion request; those in `NO_EFFECT` are not supported."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionDefinition] | None = None
    function_call: Any = None
    reasoning_effort: str | None = None
    prediction: Prediction | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    verbosity: str | None = None
    moderation: Any = None

    # Not OpenAI's; named as in vLLM.
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` for the first value that is invalid or not supported."""
        check_minimum(self.max_tokens, "max_tokens", 1)
        GenerationRequest.check(self)
        for name, no_effect in NO_EFFECT.items():
            reject_unless(self, name, *no_effect)
        if not self.messages:
            raise invalid("messages", "expected at least one message.")
        if len(self.messages) > MAX_MESSAGES:
            raise invalid(
                "messages",
                f"expected at most {MAX_MESSAGES} messages, but got {len(self.messages)}.",
            )
        for i, message in enumerate(self.messages):
            message.check(f"messages[{i}]")
        if self.prediction is not None:
            self.prediction.check()
        self._check_lengths()
        self._check_template()

    def _check_lengths(self) -> None:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest(
                "'max_tokens' and 'max_completion_tokens' have different values; set one of them.",
                "max_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                "'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs"
            )

    def _check_template(self) -> None:
        if self.verbosity is not None:
            check_allowed(self.verbosity, "verbosity", VERBOSITIES)
        if self.reasoning_effort is not None:
            check_allowed(self.reasoning_effort, "reasoning_effort", EFFORTS)
        if len(self.chat_template or "") > MAX_TEMPLATE:
            raise invalid("chat_template", f"at most {MAX_TEMPLATE} characters.")
        for name in _RESERVED_VARIABLES:
            if name in (self.chat_template_kwargs or ()):
                param = f"chat_template_kwargs.{name}"
                hint = "the name is reserved" if name == "self" else f"use the field '{name}'"
                raise InvalidRequest(f"'{param}' is not allowed; {hint}.", param)
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise InvalidRequest(
                "'continue_final_message' cannot be combined with 'add_generation_prompt'.",
                "continue_final_message",
            )
        content = self.messages[-1].as_mapping()["content"]
        if not isinstance(content, str) or not content.strip():
            raise InvalidRequest(
                "'continue_final_message' requires a last message with text and no image.",
                "continue_final_message",
            )

    @property
    def max_output(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def images(self) -> list[RequestedImage]:
        """The images of its messages in order."""
        return [
            image
            for i, message in enumerate(self.messages)
            if isinstance(message.content, list)
            for image in message.images(f"messages[{i}]")
        ]

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the chat template ends the prompt with the start of an assistant message."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    @property
    def uses_legacy_functions(self) -> bool:
        """Whether tools are given in the deprecated field `functions`."""
        return bool(self.functions)

    def tool_plan(self) -> ToolPlan:
        """The functions that the model may call. Raises `InvalidRequest` for an invalid choice."""
        if self.functions and self.tools:
            raise InvalidRequest("'functions' cannot be combined with 'tools'.", "functions")
        if self.functions or self.function_call is not None:
            return plan_functions(self.functions, self.function_call)
        if self.tools is None and self.tool_choice is None:
            return NO_TOOLS
        return plan_tools(self.tools, self.tool_choice, is_parallel=self.parallel_tool_calls)

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Variables of the chat template besides messages and tools."""
        effort = self.reasoning_effort
        reasoning = {} if effort is None else {"reasoning_effort": effort}
        switches = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
        return {**reasoning, **switches, **(self.chat_template_kwargs or {})}


def chat_of(fields: Mapping[str, object]) -> ChatRequest:
    """A checked chat request from the fields of another endpoint. Raises `InvalidRequest`."""
    request = convert(ChatRequest, fields)
    request.check()
    return request


def decode_chat(body: bytes, unknown: UnknownFields | None = None) -> ChatRequest:
    """Decode and check the request. Raises `InvalidRequest`."""
    request = decode_checked(ChatRequest, body, unknown)
    if unknown is not None and request.verbosity not in (None, "medium"):
        unknown.ignore("verbosity")  # a hint, which chat templates have no place for
    return request
