"""`ResponseRenderer`: how one response looks on the wire, and the words in which it is told.

A surface (chat, text completions, …) fills the port with its own events and bodies; who streams
or gathers the answer knows none of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gateway.ports import CallArguments, CallBegin, Piece, Reasoning

if TYPE_CHECKING:
    from engine.step import TokenLogprobs

PING = b": ping\n\n"


class Usage(NamedTuple):
    """Token counts of a whole response: each prompt once, all choices' output."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompts, found in the prefix cache
    reasoning_tokens: int = 0  # of the output

    def as_json(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class OutputToken(NamedTuple):
    """A token of a choice whose text was told just now, where tokens are told at all.

    `offset` is the number of characters of the choice before it. An end token shows nothing.
    """

    token_id: int
    offset: int
    logprobs: "TokenLogprobs | None" = None
    is_end: bool = False


class PromptReport(NamedTuple):
    """The prompt of a choice, where it is told; `logprobs` of all tokens or of none."""

    token_ids: Sequence[int]
    logprobs: "Sequence[TokenLogprobs | None]" = ()


Delta = Sequence[
    Piece | OutputToken | PromptReport
]  # what a choice adds at one moment; may be empty


class ChoiceEnd(NamedTuple):
    """How a choice ended: OpenAI's reason, and the caller's stop string or end token if that."""

    reason: str
    stopped_by: str | int | None = None


@dataclass(frozen=True, slots=True)
class ToolCallText:
    """A tool call; `arguments` is what the model wrote, JSON in the good case."""

    call_id: str
    name: str
    arguments: str


class FinishedChoice(NamedTuple):
    """One choice of a response that was not streamed."""

    content: str | None
    reasoning: str | None
    calls: tuple[ToolCallText, ...]
    end: ChoiceEnd
    drawn: tuple[OutputToken, ...] = ()
    prompt: PromptReport | None = None
    said: Delta = ()  # all of it, in order

    @property
    def num_told(self) -> int:
        """Tokens that are told one by one."""
        return len(self.drawn) + len(self.prompt.logprobs if self.prompt else ())


def finished(said: Delta, end: ChoiceEnd) -> FinishedChoice:
    """The whole message. Content is None only where reasoning or calls stand in its place."""
    content: list[str] = []
    reasoning: list[str] = []
    begun: list[CallBegin] = []
    arguments: list[list[str]] = []
    for piece in said:
        match piece:
            case str():
                content.append(piece)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegin():
                begun.append(piece)
                arguments.append([])
            case CallArguments(place, text):
                arguments[place].append(text)
            case _:
                pass
    is_silent = not content and bool(reasoning or begun)
    return FinishedChoice(
        content=None if is_silent else "".join(content),
        reasoning="".join(reasoning) if reasoning else None,
        calls=tuple(
            ToolCallText(call.call_id, call.name, "".join(texts))
            for call, texts in zip(begun, arguments, strict=True)
        ),
        end=end,
        drawn=tuple(piece for piece in said if isinstance(piece, OutputToken)),
        prompt=next((piece for piece in said if isinstance(piece, PromptReport)), None),
        said=said,
    )


class ReportOptions(NamedTuple):
    """What is told besides the answer's text. `logprobs` and `prompt_logprobs` count the
    likeliest tokens that come with each."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    echo: bool = False  # the prompt, before the answer
    stop_string: bool = False
    special_tokens: bool = False

    @property
    def has_tokens(self) -> bool:
        """Whether tokens are told one by one."""
        return self.token_ids or self.logprobs is not None


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """What all chunks of one response say: `created` is Unix seconds."""

    response_id: str
    created: int
    model: str
    fingerprint: str


class Progress(Protocol):
    """Who counts a response's tokens."""

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        ...


class ResponseRenderer(Protocol):
    """How one response looks on the wire; it lives as long as the response, and is fed in order.

    A choice sends any number of deltas, then its ending. Nothing needs to precede its first
    delta, which is the place to announce it.
    """

    @property
    def ping(self) -> bytes:
        """What keeps a silent stream warm."""
        ...

    def delta(self, index: int, said: Delta, tally: Progress) -> bytes:
        """The events of a choice that has something to say."""
        ...

    def ending(self, index: int, end: ChoiceEnd, tally: Progress) -> bytes:
        """A choice has said everything."""
        ...

    def closing(self, tally: Progress) -> bytes:
        """All choices have ended: the last bytes of the stream."""
        ...

    def failure(self, error: BaseException) -> bytes:
        """The last bytes of a stream that fails half-way."""
        ...

    def whole(self, choices: Sequence[FinishedChoice], tally: Progress) -> bytes:
        """The body of a response that is not streamed."""
        ...
