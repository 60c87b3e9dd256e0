"""`POST /v1/responses`: the request, and its conversion to a chat request."""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.schema.decoding import (
    UnknownFields,
    check_allowed,
    check_unicode,
    decode,
    invalid,
    missing,
    reject_unless,
)
from gateway.schema.field_names import renamed_fields
from gateway.schema.fields.sampling import SamplingDefaults, SharedRequest
from gateway.schema.openai.batches import check_metadata
from gateway.schema.openai.chat import ChatRequest, chat_of
from gateway.schema.responses.client_tools import CLIENT_TOOLS
from gateway.schema.responses.conversations import conversation_id
from gateway.schema.responses.items import InputItem, Item, as_messages
from gateway.schema.responses.tools import ToolSet

INCLUDABLE = (
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs", "reasoning.encrypted_content",
    "message.output_text.logprobs",
)  # fmt: skip
LOGPROBS = "message.output_text.logprobs"  # the only one of these that a response here can have
NO_EFFECT: dict[str, tuple[object, ...]] = {
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
_SUMMARIES = ("auto", "concise", "detailed")
_SAME_IN_CHAT = (
    *(name for name in SharedRequest.__struct_fields__ if name != "prompt_cache_options"),
    "top_logprobs", "parallel_tool_calls", "chat_template_kwargs",
)  # fmt: skip
# Chat fields that have another name here, the longest first.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "messages": "input",
}


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The format that the text must match."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        """The chat request's `response_format`."""
        schema = self.given_fields
        kind = {"type": schema.pop("type")}
        return {**kind, "json_schema": schema} if self.type == "json_schema" else kind

    @property
    def given_fields(self) -> dict[str, Any]:
        """Its fields that are not null; only those of a schema have more than the type."""
        fields = msgspec.structs.asdict(self) if self.type == "json_schema" else {"type": self.type}
        return {name: value for name, value in fields.items() if value is not None}


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning`. The response has the full reasoning text, so summary options are ignored."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` for a value that is not allowed."""
        for name in ("summary", "generate_summary"):
            if (value := getattr(self, name)) is not None:
                check_allowed(value, f"reasoning.{name}", _SUMMARIES)
        reject_unless(self, "context", "auto", prefix="reasoning.")
        reject_unless(self, "mode", "standard", prefix="reasoning.")


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`. Obfuscation (events padded to equal length) is not supported."""

    include_obfuscation: bool | None = None


class ResponseRequest(SharedRequest, kw_only=True, forbid_unknown_fields=True):
    """All fields of OpenAI's request; those in `NO_EFFECT` are not supported."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # limits tools that the server runs; there are none
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    tool_choice: Any = None
    tools: list[msgspec.Raw] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: list[Any] | None = None
    moderation: Any = None
    chat_template_kwargs: dict[str, Any] | None = None  # not OpenAI's

    def check(self) -> None:
        """Raise `InvalidRequest` for an invalid field, except those that `as_chat` checks."""
        for name, no_effect in NO_EFFECT.items():
            reject_unless(self, name, *no_effect)
        for i, name in enumerate(self.include or ()):
            check_allowed(name, f"include[{i}]", INCLUDABLE)
        if self.truncation is not None:
            check_allowed(self.truncation, "truncation", ("auto", "disabled"))
        if self.reasoning is not None:
            self.reasoning.check()
        if self.prompt_cache_options is not None:
            self.prompt_cache_options.check(compares=True)
        if self.input is None:
            raise missing("input")
        if self.stream_options is not None:
            reject_unless(
                self.stream_options, "include_obfuscation", False, prefix="stream_options."
            )
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise invalid("max_output_tokens", "expected at least 1.")
        if self.background and self.store is False:
            raise invalid("store", "a response with 'background' is stored.")
        check_metadata(self.metadata)
        self._check_conversation()

    def _check_conversation(self) -> None:
        if self.conversation_id is not None and self.previous_response_id is not None:
            raise invalid("conversation", "it cannot be set together with 'previous_response_id'.")

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that it continues. Raises `InvalidRequest`."""
        return conversation_id(self.conversation)

    @property
    def image_fields(self) -> list[str]:
        """The paths of the images of its input, which are the last ones of the chat request."""
        items = self.input if isinstance(self.input, list) else ()
        return [field for i, item in enumerate(items) for field in item.image_fields(f"input[{i}]")]

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    def as_chat(self, items: Sequence[Item], tools: ToolSet) -> ChatRequest:
        """The checked chat request for these items. Errors name fields of this request."""
        body: dict[str, Any] = {
            "messages": messages_of(self.instructions, items),
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.has_logprobs or None,
            "tool_choice": _choice(self.tool_choice),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        if tools.functions:
            body["tools"] = tools.functions
        if self.text is not None:
            body["verbosity"] = self.text.verbosity
            body["response_format"] = self.text.format and self.text.format.as_chat()
        body |= {name: getattr(self, name) for name in _SAME_IN_CHAT}
        if (options := self.prompt_cache_options) is not None:
            body["prompt_cache_options"] = {
                name: getattr(options, name) for name in ("mode", "ttl", "prewarm")
            }
        given = {name: value for name, value in body.items() if value is not None}
        with renamed_fields(NAMES):
            return chat_of(given)


class ResponseCreate(ResponseRequest, kw_only=True, forbid_unknown_fields=True):
    """The message `response.create` of a WebSocket. Without `generate` the prompt is computed, so
    that the next response can continue it."""

    type: str
    stream_id: str | None = None
    generate: bool | None = None

    def check(self) -> None:
        """Raise as for a request. `input` may be left out where nothing is generated."""
        if self.input is None and self.generate is False:
            self.input = []
        reject_unless(self, "background", False)
        reject_unless(self, "stream", True)
        self.stream = True
        super().check()


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The chat messages of a response."""
    messages = as_messages(items)
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    return messages


def decode_response(
    body: bytes, unknown: UnknownFields | None = None, *, is_message: bool = False
) -> ResponseRequest:
    """Decode and check the request, or the message of a WebSocket. Raises `InvalidRequest`."""
    kind = ResponseCreate if is_message else ResponseRequest
    request: ResponseRequest = decode(kind, body, unknown)
    if request.context_management and unknown is not None and unknown.ignore("context_management"):
        request.context_management = None  # nothing is removed from a prompt that fits
    check_unicode(body)
    request.check()
    verbosity = request.text and request.text.verbosity
    if unknown is not None and verbosity not in (None, "medium"):
        unknown.ignore("text.verbosity")
    return request


def response_head(
    request: ResponseRequest,
    tools: ToolSet,
    response_id: str,
    now: int,
    defaults: SamplingDefaults,
) -> dict[str, Any]:
    """The response object's constant fields: those of its request, with OpenAI's defaults."""
    text, reasoning = request.text or TextOptions(), request.reasoning or ReasoningOptions()
    text_format = {"type": "text"} if text.format is None else text.format.given_fields
    head: dict[str, Any] = {
        "id": response_id,
        "object": "response",
        "created_at": now,
        "background": bool(request.background),
        "frequency_penalty": request.frequency_penalty or 0.0,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": request.model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": request.presence_penalty or 0.0,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": request.safety_identifier,
        "service_tier": request.tier,
        "store": request.is_stored,
        "temperature": defaults.temperature if request.temperature is None else request.temperature,
        "text": {"format": text_format, "verbosity": text.verbosity or "medium"},
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": [tool.as_response() for tool in tools.given],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": defaults.top_p if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
    }
    if (conversation := request.conversation_id) is not None:
        head["conversation"] = {"id": conversation}
    return head if request.user is None else {**head, "user": request.user}


def _choice(choice: Any) -> Any:
    """`tool_choice` in a chat request's form, where names are one level deeper."""
    match choice:
        case {"type": "function" | "custom", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": str(kind)} if kind in CLIENT_TOOLS:
            return {"type": "function", "function": {"name": kind}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": [_choice(tool) for tool in tools]},
            }
    return choice
