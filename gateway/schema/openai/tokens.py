"""`/tokenize` and `/detokenize` with vLLM's fields: a prompt or a conversation to token ids, and
token ids to text."""

from typing import Any

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.fields.sampling import Vocabulary, check_ids
from gateway.schema.openai.chat import ChatRequest, Message
from gateway.schema.openai.tools import Tool

_CHAT_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Either a `prompt`, or `messages` and the other fields that make a chat prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` unless exactly one of `prompt` and `messages` is given."""
        if self.prompt is None and self.messages is None:
            raise InvalidRequest("Send 'prompt' or 'messages'.", "prompt")
        if self.prompt is not None and self.messages is not None:
            raise InvalidRequest("Send either 'prompt' or 'messages', not both.", "prompt")
        for name in _CHAT_FIELDS:
            if self.messages is None and getattr(self, name) is not None:
                raise InvalidRequest(f"'{name}' is only allowed with 'messages'.", name)

    def as_chat(self, model: str) -> ChatRequest:
        """The chat request that has this prompt, checked."""
        fields = {name: getattr(self, name) for name in _CHAT_FIELDS}
        given = {name: value for name, value in fields.items() if value is not None}
        request = ChatRequest(model=model, messages=self.messages or [], **given)
        request.check()
        return request


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The token ids to convert to text."""

    tokens: list[int]
    model: str | None = None

    def check(self, vocabulary: Vocabulary) -> None:
        """Raise `InvalidRequest` for the first id that is not in the vocabulary."""
        if self.tokens:
            check_ids(self.tokens, "tokens", vocabulary)
