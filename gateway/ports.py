"""What the gateway asks of tokenizers and chat templates; `adapters/` provides both."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Message = Mapping[str, Any]


class TokenDecoder(Protocol):
    """Turns the ids of one answer into bytes, one after the other."""

    def feed(self, token_id: int) -> bytes:
        """The bytes that this id adds; they may end in the middle of a UTF-8 character."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back. Stateless after loading; `encode` may run in a thread."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which are not shown in answers."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids as Hugging Face gives them; `add_special_tokens` adds BOS or what the model wants."""
        ...

    def decoder(self) -> TokenDecoder:
        """A fresh decoder for one answer; special tokens yield no bytes."""
        ...


class ChatTemplate(Protocol):
    """Messages to the prompt text of one model."""

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt. Raises `engine.errors.InvalidRequest` with the template's own words."""
        ...
