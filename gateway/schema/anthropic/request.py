"""`POST /v1/messages`: Anthropic's request, and its conversion to a chat request.

`cache_control` of a block marks a place behind which others will go on; that of the request and of
tools marks none, since shared prefixes are found without it. The longest `ttl` of all of them, five
minutes by default, is that of the prompt's cached blocks.
"""

from typing import Any

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.anthropic.blocks import AnthropicMessage, TextBlock, as_messages, marked
from gateway.schema.anthropic.tools import AnthropicTool, without_server_tools
from gateway.schema.decoding import (
    UnknownFields,
    check_allowed,
    check_minimum,
    check_range,
    check_unicode,
    decode,
    invalid,
    missing,
    reject_unless,
)
from gateway.schema.field_names import renamed_fields
from gateway.schema.fields.sampling import ANTHROPIC_TTLS, TTLS
from gateway.schema.openai.chat import ChatRequest, chat_of

NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "parameters": "input_schema",  # those of a tool
}
NO_EFFECT: dict[str, tuple[object, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "inference_geo": ("global",),
    "speed": ("standard",),
    "diagnostics": ({},),
}
OMITTED = "omitted"  # the model reasons, but the response does not show it
_DISPLAYS = ("summarized", "updates", OMITTED)
_THINKING = ("enabled", "disabled", "adaptive", "between_tools")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """The end user's id: accepted, and passed on as chat's `user`, which is ignored."""

    user_id: str | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the model reasons before it answers. `budget_tokens` is passed to the chat template
    as `thinking_budget`."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The format that the text must match."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """How much the model reasons, and the format that the text must match."""

    effort: str | None = None
    format: OutputFormat | None = None


class AnthropicToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The tools that must or may be called."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """All fields of Anthropic's request; those in `NO_EFFECT` are not supported."""

    model: str
    messages: list[AnthropicMessage]
    max_tokens: int | None = None
    system: str | list[TextBlock] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    cache_control: Any = None
    context_management: Any = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    inference_geo: str | None = None
    speed: str | None = None
    diagnostics: Any = None

    def check(self, *, is_count_only: bool = False) -> None:
        """Raise `InvalidRequest` for an invalid field, except those that `as_chat` checks.

        `is_count_only`: the request only counts prompt tokens and needs no `max_tokens`.
        """
        for name, no_effect in NO_EFFECT.items():
            reject_unless(self, name, *no_effect)
        if self.max_tokens is None and not is_count_only:
            raise missing("max_tokens")
        check_minimum(self.max_tokens, "max_tokens", 1)
        check_range(self.temperature, "temperature", 0, 1)
        if self.service_tier is not None:
            check_allowed(self.service_tier, "service_tier", ("auto", "standard_only"))
        self._check_thinking()
        self._check_output()
        if self.removes_context:
            raise InvalidRequest(
                "'context_management' is not supported, except edits with 'keep': 'all'.",
                "context_management",
            )
        for i, message in enumerate(self.messages):
            message.check(f"messages[{i}]")

    def _check_thinking(self) -> None:
        if self.thinking is None:
            return
        check_allowed(self.thinking.type, "thinking.type", _THINKING)
        if self.thinking.display is not None:
            check_allowed(self.thinking.display, "thinking.display", _DISPLAYS)
        budget, most = self.thinking.budget_tokens, self.max_tokens
        check_minimum(budget, "thinking.budget_tokens", 1)
        if most is not None and budget is not None and budget > most:
            raise invalid("thinking.budget_tokens", f"expected at most 'max_tokens' ({most}).")

    def _check_output(self) -> None:
        config = self.output_config or OutputConfig()
        if config.effort is not None:
            check_allowed(config.effort, "output_config.effort", _EFFORTS)
        if config.format is not None:
            check_allowed(config.format.type, "output_config.format.type", ("json_schema",))

    def as_chat(self) -> ChatRequest:
        """The checked chat request with the same prompt. Errors name fields of this request."""
        messages = as_messages(self.messages)
        if system := marked(self.system or ""):
            messages.insert(0, {"role": "system", "content": system})
        is_continued = bool(messages) and messages[-1]["role"] == "assistant"
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "continue_final_message": is_continued or None,
            "user": None if self.metadata is None else self.metadata.user_id,
            **self._tools(),
            **self._reasoning(),
        }
        if ttls := self._ttls():
            body["prompt_cache_options"] = {"ttl": max(ttls, key=TTLS.__getitem__)}
        config = self.output_config or OutputConfig()
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        given = {name: value for name, value in body.items() if value is not None}
        with renamed_fields(NAMES):
            return chat_of(given)

    @property
    def removes_context(self) -> bool:
        """Whether `context_management` has anything but edits that keep the whole context."""
        match self.context_management:
            case None:
                return False
            case {"edits": [*edits]}:
                return not all(isinstance(e, dict) and e.get("keep") == "all" for e in edits)
        return True

    @property
    def has_breakpoints(self) -> bool:
        """Whether any block has `cache_control`."""
        contents = [self.system or (), *[message.content for message in self.messages]]
        return any(
            block.cache_control is not None
            for content in contents
            if not isinstance(content, str)
            for block in content
        )

    @property
    def image_fields(self) -> list[str]:
        """The paths of its images, in the order of the chat request's."""
        return [
            field
            for i, message in enumerate(self.messages)
            for field in message.image_fields(f"messages[{i}]")
        ]

    @property
    def shows_reasoning(self) -> bool:
        return self.thinking is None or self.thinking.display != OMITTED

    def _ttls(self) -> list[str]:
        """The `ttl` of each `cache_control`. Raises `InvalidRequest` for an unknown one."""
        places: list[tuple[str, Any]] = [("cache_control", self.cache_control)]
        lists: dict[str, Any] = {
            f"messages[{i}].content": each.content for i, each in enumerate(self.messages)
        }
        for path, blocks in {**lists, "system": self.system, "tools": self.tools}.items():
            if blocks is not None and not isinstance(blocks, str):
                places += [
                    (f"{path}[{i}].cache_control", block.cache_control)
                    for i, block in enumerate(blocks)
                ]
        ttls: list[str] = []
        for path, control in places:
            if control is not None:
                if not isinstance(control, dict):
                    raise invalid(path, "expected an object.")
                check_allowed(str(control.get("type")), f"{path}.type", ("ephemeral",))
                ttl = control.get("ttl")
                ttls.append(ANTHROPIC_TTLS[0] if ttl is None else str(ttl))
                check_allowed(ttls[-1], f"{path}.ttl", ANTHROPIC_TTLS)
        return ttls

    def _tools(self) -> dict[str, Any]:
        if not self.tools:
            return {} if self.tool_choice is None else {"tool_choice": self._choice()}
        tools = [tool.as_chat(f"tools[{i}]") for i, tool in enumerate(self.tools)]
        return {
            "tools": tools,
            "tool_choice": self._choice(),
            "parallel_tool_calls": self._is_parallel,
        }

    @property
    def _is_parallel(self) -> bool:
        return not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)

    def _choice(self) -> Any:
        choice = self.tool_choice or AnthropicToolChoice("auto")
        check_allowed(choice.type, "tool_choice.type", ("auto", "any", "tool", "none"))
        if choice.type != "tool":
            return "required" if choice.type == "any" else choice.type
        if choice.name is None:
            raise missing("tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}

    def _reasoning(self) -> dict[str, Any]:
        """The chat fields for `thinking`; without it the model is asked not to reason."""
        thinking, config = self.thinking, self.output_config or OutputConfig()
        if thinking is None or thinking.type == "disabled":
            return {"reasoning_effort": "none"}
        variables: dict[str, Any] = {"enable_thinking": True}
        if thinking.budget_tokens is not None:
            variables["thinking_budget"] = thinking.budget_tokens
        return {"reasoning_effort": config.effort, "chat_template_kwargs": variables}


def decode_anthropic(
    body: bytes, unknown: UnknownFields | None = None, *, is_count_only: bool = False
) -> AnthropicRequest:
    """Decode and check the request. Raises `InvalidRequest`."""
    request = decode(AnthropicRequest, body, unknown)
    if request.tools and unknown is not None:
        request.tools = without_server_tools(request.tools, unknown)
    if request.removes_context and unknown is not None and unknown.ignore("context_management"):
        request.context_management = None  # nothing is removed from a prompt that fits
    check_unicode(body)
    request.check(is_count_only=is_count_only)
    return request
