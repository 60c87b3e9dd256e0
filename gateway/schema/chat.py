"""`POST /v1/chat/completions`: the request, and its messages as chat templates see them."""

from typing import Any

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_word, decode, shown
from gateway.schema.sampling import GenerationRequest, refuse_unless

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
NEUTRAL: dict[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"], []),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "moderation": (),
}


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of a message. Only text is served; the rest is here to be refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    prompt_cache_breakpoint: Any = None


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """What the model called; `arguments` is JSON in a string."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an earlier answer made."""

    id: str
    type: str
    function: FunctionCall


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

    def check(self, path: str) -> None:
        """Raise `InvalidRequest` naming the part of `path` that cannot be served."""
        check_word(self.role, f"{path}.role", ROLES)
        if self.audio is not None:
            raise InvalidRequest(f"'{path}.audio' is not supported.", f"{path}.audio")
        calls = self.role == "assistant" and (self.tool_calls or self.function_call or self.refusal)
        if self.content is None and not calls and self.role != "function":
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
                _check_part(part, f"{path}.content[{i}]")

    def as_mapping(self) -> dict[str, Any]:
        """The message for a chat template: parts joined to one text, absent fields absent."""
        mapping: dict[str, Any] = {"role": self.role, "content": self._text}
        for name in ("name", "tool_call_id", "tool_calls", "function_call"):
            if value := getattr(self, name):
                mapping[name] = msgspec.to_builtins(value)
        return mapping

    @property
    def _text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text or part.refusal or "" for part in self.content)
        return self.content or self.refusal or ""


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """The whole of OpenAI's chat completion request; see `NEUTRAL` for what is refused."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    parallel_tool_calls: bool | None = None

    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    moderation: Any = None

    def check(self) -> None:
        """Raise `InvalidRequest` for the first thing that is wrong or that we do not have."""
        GenerationRequest.check(self)
        for name, neutral in NEUTRAL.items():
            refuse_unless(self, name, *neutral)
        if not self.messages:
            raise InvalidRequest("Invalid 'messages': expected at least one message.", "messages")
        for i, message in enumerate(self.messages):
            message.check(f"messages[{i}]")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest(
                "'max_tokens' and 'max_completion_tokens' say different things; set one of them.",
                "max_tokens",
            )

    @property
    def max_output(self) -> int | None:
        """Tokens of answer at most; None: as many as the context leaves."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


_DECODER = msgspec.json.Decoder(ChatRequest)


def decode_chat(body: bytes) -> ChatRequest:
    """A checked request, or `InvalidRequest`."""
    request = decode(_DECODER, body)
    request.check()
    return request


def _check_part(part: ContentPart, path: str) -> None:
    if part.type not in ("text", "refusal"):
        raise InvalidRequest(
            f"Invalid value: {shown(part.type)}. This model reads text only; supported values for "
            f"'{path}.type' are: 'text', 'refusal'.",
            f"{path}.type",
        )
    if (part.text if part.type == "text" else part.refusal) is None:
        name = f"{path}.{part.type}"
        raise InvalidRequest(f"Missing required parameter: '{name}'.", name)
