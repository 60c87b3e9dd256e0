"""`POST /v1/chat/completions`: the request, and what it asks of the model's template and tools."""

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_word, converted, decode, refuse_unless
from gateway.schema.fields.generation import GenerationRequest
from gateway.schema.fields.output import OutputConstraint, ResponseFormat
from gateway.schema.openai.messages import ContentPart, Message
from gateway.schema.openai.tools import (
    FunctionDefinition,
    Tool,
    ToolPlan,
    plan_functions,
    plan_tools,
)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_TEMPLATE = 1 << 16  # characters
NEUTRAL: dict[str, tuple[object, ...]] = {
    "modalities": (["text"], []),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "moderation": (),
}
_NOT_VARIABLES = ("messages", "tools", "add_generation_prompt")


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """Text that the answer may repeat. It could only save time, and is not used."""

    type: str
    content: str | list[ContentPart]

    def check(self) -> None:
        """Raise `InvalidRequest` unless it is text."""
        check_word(self.type, "prediction.type", ("content",))
        if isinstance(self.content, list):
            for i, part in enumerate(self.content):
                part.check(f"prediction.content[{i}]")


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """The whole of OpenAI's chat completion request; see `NEUTRAL` for what is refused."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionDefinition] | None = None
    function_call: Any = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    prediction: Prediction | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    verbosity: str | None = None
    moderation: Any = None

    # Not OpenAI's; spelled as vLLM does.
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` for the first thing that is wrong or that we do not have."""
        GenerationRequest.check(self)
        for name, neutral in NEUTRAL.items():
            refuse_unless(self, name, *neutral)
        if not self.messages:
            raise InvalidRequest("Invalid 'messages': expected at least one message.", "messages")
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
                "'max_tokens' and 'max_completion_tokens' say different things; set one of them.",
                "max_tokens",
            )
        if self.max_tokens == 0:
            raise InvalidRequest("Invalid 'max_tokens': expected at least 1.", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                "'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs"
            )

    def _check_template(self) -> None:
        if self.reasoning_effort is not None:
            check_word(self.reasoning_effort, "reasoning_effort", EFFORTS)
        if len(self.chat_template or "") > MAX_TEMPLATE:
            raise InvalidRequest(
                f"Invalid 'chat_template': at most {MAX_TEMPLATE} characters.", "chat_template"
            )
        for name in _NOT_VARIABLES:
            if name in (self.chat_template_kwargs or ()):
                param = f"chat_template_kwargs.{name}"
                raise InvalidRequest(f"'{param}' is not allowed: it has its own field.", param)
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise InvalidRequest(
                "'continue_final_message' cannot be combined with 'add_generation_prompt'.",
                "continue_final_message",
            )
        last = self.messages[-1]
        if not last.as_mapping()["content"].strip():
            raise InvalidRequest(
                "'continue_final_message' needs a last message with content.",
                "continue_final_message",
            )

    @property
    def max_output(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def is_answer_due(self) -> bool:
        """Whether the prompt ends where an answer begins."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    @property
    def has_functions(self) -> bool:
        """Whether tools are told of by their old name."""
        return bool(self.functions)

    def tool_plan(self) -> ToolPlan:
        """What may be called. Raises `InvalidRequest` for a choice that is none."""
        if self.functions and self.tools:
            raise InvalidRequest("'functions' cannot be combined with 'tools'.", "functions")
        if self.functions or self.function_call is not None:
            return plan_functions(self.functions, self.function_call)
        return plan_tools(self.tools, self.tool_choice, is_parallel=self.parallel_tool_calls)

    def held(self) -> OutputConstraint | None:
        """The one grammar that the fields ask for, tools aside."""
        formatted = None if self.response_format is None else self.response_format.held()
        other = GenerationRequest.held(self)
        if formatted is not None and other is not None:
            message = f"'{other.param}' cannot be combined with 'response_format'."
            raise InvalidRequest(message, other.param)
        return formatted or other

    @property
    def variables(self) -> Mapping[str, Any]:
        """What the chat template may read besides messages and tools."""
        effort = self.reasoning_effort
        asked = {} if effort is None else {"reasoning_effort": effort}
        silent = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
        return {**asked, **silent, **(self.chat_template_kwargs or {})}


_DECODER = msgspec.json.Decoder(ChatRequest)


def chat_of(fields: Mapping[str, object]) -> ChatRequest:
    """A checked request of fields that another endpoint has read, or `InvalidRequest`."""
    request = converted(ChatRequest, fields)
    request.check()
    return request


def decode_chat(body: bytes) -> ChatRequest:
    """A checked request, or `InvalidRequest`."""
    request = decode(_DECODER, body)
    request.check()
    return request
