"""What the gateway asks of tokenizers, chat templates and dialects; `adapters/` provides them.

An answer's text is cut into pieces of a message: content (a plain `str`), `Reasoning`, and tool
calls as a `CallBegin` and its `CallArguments`. Joined, the pieces are the same however the text
was cut into calls of `feed`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from engine.step import Grammar

Message = Mapping[str, Any]


class Reasoning(NamedTuple):
    """Text that the model thinks aloud and that is no part of its answer."""

    text: str


class CallBegin(NamedTuple):
    """The model calls a tool; `place` counts the calls of one answer from 0."""

    place: int
    call_id: str
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of the call at `place`: JSON, if the model wrote JSON."""

    place: int
    text: str


Piece = str | Reasoning | CallBegin | CallArguments  # a plain `str` is content, never empty


class StreamParser(Protocol):
    """Cuts the text of one answer into pieces. What it cannot read is content; nothing is lost."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text fed so far ends in reasoning."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing can be added: as many calls as were wanted have been made."""
        ...

    def feed(self, text: str) -> Sequence[Piece]:
        """The pieces that are certain now."""
        ...

    def finish(self) -> Sequence[Piece]:
        """The rest: what was held because it might have become something else."""
        ...


class ToolChoice(NamedTuple):
    """The tools whose calls are looked for, and how many calls there may be."""

    names: Collection[str] = ()
    max_calls: int | None = None


class ToolCallGrammar(NamedTuple):
    """Calls that match a grammar: the schema of the parameters by tool, or None for any object.

    `must_call`: no other answer will do. Else it is free text, or JSON that matches `answer`.
    """

    tools: Mapping[str, Mapping[str, Any] | None]
    must_call: bool = False
    max_calls: int | None = None
    answer: Mapping[str, Any] | None = None


class Dialect(Protocol):
    """How one model reasons and calls tools."""

    @property
    def reads_calls(self) -> bool:
        """Whether it can call tools at all."""
        ...

    @property
    def special_tokens(self) -> Collection[str]:
        """Its marks. Those that the vocabulary has as control tokens must be shown to parsers."""
        ...

    def parser(
        self, prompt: str, wanted: ToolChoice, bits: Callable[[int], int]
    ) -> StreamParser | None:
        """Who reads the answer to `prompt`; None: it is all content.

        `bits` makes random bits, for the ids of calls.
        """
        ...

    def without_reasoning(self, prompt: str) -> str:
        """What to add to a prompt that opens reasoning, so that the answer comes at once."""
        ...

    def hold_calls(self, held: ToolCallGrammar) -> "Grammar | None":
        """What answers match that call so; None: this dialect's answers cannot be held to it."""
        ...


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

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The same with their texts."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids as Hugging Face gives them; `add_special_tokens` adds BOS or what the model wants."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id inside a text; a control token has its own text, no token none."""
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

    def variant(self, source: str) -> "ChatTemplate":
        """The same with another Jinja source; `InvalidRequest` if it is none."""
        ...
