"""Ports for tokenizers, chat templates and dialects; `adapters/` implements them.

A parser splits an output's text into pieces of a message: content (a plain `str`), `Reasoning`,
and tool calls as a `CallBegin` and its `CallArguments`. The joined pieces do not depend on how
the text was split into calls of `feed`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from engine.media import Pixels
    from engine.step import Grammar

Message = Mapping[str, Any]


class Reasoning(NamedTuple):
    """Reasoning text, which is not part of the content."""

    text: str


class CallBegin(NamedTuple):
    """The start of a tool call; `place` counts the calls of one message from 0."""

    place: int
    call_id: str
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of call number `place`: JSON, if the model wrote JSON."""

    place: int
    text: str


Piece = str | Reasoning | CallBegin | CallArguments  # a plain `str` is content, never empty


class StreamParser(Protocol):
    """Splits one output into pieces. Text that it cannot parse is content; none is lost."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text fed so far ends in reasoning."""

    @property
    def is_complete(self) -> bool:
        """Whether no more text can belong to the message: it has `max_calls` calls."""

    def feed(self, text: str) -> Sequence[Piece]:
        """The pieces that later text cannot change."""

    def finish(self) -> Sequence[Piece]:
        """The buffered rest, which could have become something else."""


class ToolChoice(NamedTuple):
    """The tools whose calls are parsed, each with the JSON schema of its parameters (None: not
    known), and the most calls; None is no limit."""

    tools: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({})
    max_calls: int | None = None


class ToolCallGrammar(NamedTuple):
    """A grammar for tool calls: by tool, the JSON schema of its arguments, or None for any object.

    With `must_call` every output is a call. Else it may be free text, or JSON that matches the
    schema `answer`.
    """

    tools: Mapping[str, Mapping[str, Any] | None]
    must_call: bool = False
    max_calls: int | None = None
    answer: Mapping[str, Any] | None = None


class Dialect(Protocol):
    """The format in which one model writes reasoning and tool calls."""

    @property
    def has_tool_calls(self) -> bool:
        """Whether it has tool calls."""

    @property
    def special_tokens(self) -> Collection[str]:
        """The texts of its marks. Parsers must see them, also if they are control tokens."""

    def parser(
        self, prompt: str, wanted: ToolChoice, bits: Callable[[int], int]
    ) -> StreamParser | None:
        """A parser for one output of `prompt`; None if all of it is content.

        `bits(n)` makes random bits, for the ids of tool calls.
        """

    def without_reasoning(self, prompt: str, *, has_tools: bool) -> str:
        """What to append to `prompt` so that an answer follows without reasoning; "" if nothing.

        With `has_tools` the answer may be a tool call.
        """

    @property
    def call_mark(self) -> str:
        """The text with which every call begins and nothing else does; "" if there is none."""

    def call_grammar(self, calls: ToolCallGrammar) -> "Grammar | None":
        """The grammar of outputs with such calls; None if this format has no grammar."""


class GrammarChecker(Protocol):
    """Compiles grammars for the model's vocabulary, within limits of time and memory."""

    async def check(self, grammar: "Grammar", seconds: float | None = None) -> str | None:
        """Why outputs cannot be constrained to the grammar; None if they can. `seconds` is for a
        short try: `TimeoutError` if it takes longer to compile.

        Raises `Unavailable` if no grammar can be checked now.
        """

    async def close(self) -> None:
        """Release what it uses. Idempotent."""


class EncodedImage(NamedTuple):
    """The bytes of an image file, or their base64 text."""

    data: bytes | str
    is_base64: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.data) * 3 // 4 if self.is_base64 else len(self.data)


class ImageTile(NamedTuple):
    """An image, or a part of it, that the encoder reads at once; as in `engine.media.Media`."""

    num_tokens: int
    digest: bytes
    pixels: "Pixels"
    grid: tuple[int, int, int]


class PreparedImage(NamedTuple):
    """What replaces the placeholder of an image in a prompt: texts, and tiles between them."""

    pieces: tuple[str | ImageTile, ...]

    @property
    def tiles(self) -> list[ImageTile]:
        return [piece for piece in self.pieces if not isinstance(piece, str)]

    @property
    def num_tokens(self) -> int:
        """Tokens of its tiles; those of its texts are few."""
        return sum(tile.num_tokens for tile in self.tiles)

    @property
    def num_bytes(self) -> int:
        """Bytes of its pixels."""
        return sum(tile.pixels.levels.nbytes for tile in self.tiles)


class UnreadableImage(Exception):
    """An image that cannot be read. The text says why and ends a sentence about the image."""


class ImageDecoder(Protocol):
    """Decodes images and prepares them for the model's encoder, within limits of time and memory.

    The chat template writes `placeholder` where an image is; each tile is as many `soft_token`.
    `reserved` are the tokens around images, which the text of a message must not become.
    """

    @property
    def placeholder(self) -> str: ...

    @property
    def soft_token(self) -> str: ...

    @property
    def reserved(self) -> Sequence[str]: ...

    async def prepare(self, image: EncodedImage, max_tokens: int) -> PreparedImage:
        """The image in at most `max_tokens` tokens, if it has such a form.

        Raises `UnreadableImage`, and `Unavailable` if no image can be decoded now.
        """

    async def close(self) -> None:
        """Release what it uses. Idempotent."""


class TokenDecoder(Protocol):
    """Decodes the token ids of one output to bytes, one after the other."""

    def feed(self, token_id: int) -> bytes:
        """The bytes of the next id; they may end in the middle of a UTF-8 character."""


class Tokenizer(Protocol):
    """Text to ids and back. Stateless after loading; `encode` may run in a thread."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of control tokens, which are left out of the text."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The control tokens by their texts."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids as in Hugging Face; `add_special_tokens` adds BOS, or what the model requires."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id inside a text; of a control token its text; empty for unused ids."""

    def decoder(self) -> TokenDecoder:
        """A fresh decoder for one output; control tokens decode to no bytes."""


@runtime_checkable
class EncodesInPieces(Protocol):
    """A tokenizer that can divide long texts."""

    def encode_pieces(self, text: str, *, add_special_tokens: bool) -> Iterator[list[int]]:
        """The ids of `encode`, in consecutive lists. Each list takes a few milliseconds, except
        where the text cannot be divided."""


@runtime_checkable
class EncodesPairs(Protocol):
    """A tokenizer of a model that reads two texts at once, as all tokenizers of checkpoints are."""

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """The ids of two texts with the special tokens around them, and the number of leading ones
        that belong to the first text; all of them if the model does not tell texts apart."""


class ChatTemplate(Protocol):
    """Renders messages to the prompt text of one model."""

    def render(
        self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt. Raises `InvalidRequest` with the message of the template's error."""

    async def render_source(
        self,
        source: str,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt by another Jinja template, which came with a request and is not trusted.

        Rendering it must not block the caller's threads and must end within limits of time and
        memory. Raises `InvalidRequest`.
        """
