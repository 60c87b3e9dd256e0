"""`ResponseRenderer`: the port through which a response becomes JSON bodies and events.

Each endpoint (chat, text completions, …) implements it with its own shapes. The code that streams
or collects a response knows only the port and the types here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import orjson
from sse_starlette import ServerSentEvent

from engine.step import TokenLogprobs
from gateway.ports import CallArguments, CallBegin, Piece, Reasoning

END = b"\n\n"  # ends an event; JSON in an event has no line feed
TextFrame = tuple[bytes, bytes]  # what is before and after the JSON of a text in an event
PING = ServerSentEvent(comment="ping", sep="\n").encode()


def error_event(body: bytes, name: str | None = "error") -> bytes:
    """A JSON body as a server-sent event."""
    return ServerSentEvent(body.decode(), event=name, sep="\n").encode()


class EventNumbers:
    """Gives the events of one stream their numbers."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def numbered(self, events: bytes) -> bytes:
        """One or several events with their `id` lines."""
        if events.count(END) == 1:
            number, self._next = self._next, self._next + 1
            return b"id: %d\n%b" % (number, events)
        return b"".join(map(self.numbered, split_events(events)))

    def framed(self, text: str, frame: TextFrame) -> bytes:
        """An event with this text and its `id` line."""
        number, self._next = self._next, self._next + 1
        return b"id: %d\n%b%b%b" % (number, frame[0], orjson.dumps(text), frame[1])


def split_events(events: bytes) -> list[bytes]:
    """The events, each with its end."""
    return [event + END for event in events.split(END)[:-1]]


class PredictionTokens(NamedTuple):
    """Drafts taken from the request's `prediction`: equal to the output, and not equal."""

    accepted: int
    rejected: int


class Usage(NamedTuple):
    """Token counts of a whole response: each prompt once, all choices' output."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    written_tokens: int = 0  # prompt tokens added to the prefix cache
    reasoning_tokens: int = 0  # output tokens that are reasoning
    image_tokens: int = 0  # prompt tokens that are images
    prediction: PredictionTokens | None = None  # None if no prediction was used

    def as_json(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        details = {"reasoning_tokens": self.reasoning_tokens}
        if self.prediction is not None:
            details["accepted_prediction_tokens"] = self.prediction.accepted
            details["rejected_prediction_tokens"] = self.prediction.rejected
        of_prompts = {
            "cached_tokens": self.cached_tokens,
            "cache_write_tokens": self.written_tokens,
        }
        if self.image_tokens:
            of_prompts["image_tokens"] = self.image_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": of_prompts,
            "completion_tokens_details": details,
        }

    def as_response_json(self) -> dict[str, Any]:
        """`usage` of responses, decisions and batches."""
        of_prompts = {
            "cached_tokens": self.cached_tokens,
            "cache_write_tokens": self.written_tokens,
        }
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": of_prompts,
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class OutputToken(NamedTuple):
    """A token whose text has just been sent; present only if the request asks for token details.

    `offset` is the number of characters of the choice before it. An end token adds no text.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None = None
    is_end: bool = False


class PromptProgress(NamedTuple):
    """How much of a prompt is computed, `cached` tokens of it without computation."""

    total: int
    cached: int
    processed: int
    seconds: float = 0.0  # since the engine began with it

    @property
    def is_partial(self) -> bool:
        """Whether a part of it is computed, and not all."""
        return 0 < self.processed < self.total

    def as_comment(self) -> bytes:
        """A ping that says so."""
        return b": ping, %d of %d prompt tokens\n\n" % (self.processed, self.total)


class PromptReport(NamedTuple):
    """The prompt's token ids, and `logprobs` either for every token or empty. While the prompt is
    computed, the `progress` alone."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None] = ()
    progress: PromptProgress | None = None


# What a choice adds at one moment; may be empty.
Delta = Sequence[Piece | OutputToken | PromptReport]


class ChoiceEnd(NamedTuple):
    """OpenAI's finish reason, and the stop string or token id of the request that ended it."""

    reason: str
    stopped_by: str | int | None = None


@dataclass(frozen=True, slots=True)
class ToolCallText:
    """A tool call; `arguments` is the text that the model generated, which may be invalid JSON."""

    call_id: str
    name: str
    arguments: str


class FinishedChoice(NamedTuple):
    """One complete choice of a response that is not streamed."""

    content: str | None
    reasoning: str | None
    calls: tuple[ToolCallText, ...]
    end: ChoiceEnd
    tokens: tuple[OutputToken, ...] = ()
    prompt: PromptReport | None = None
    parts: Delta = ()  # all deltas of the choice, joined

    @property
    def num_reported(self) -> int:
        """Tokens that the body lists one by one, of prompt and output."""
        return len(self.tokens) + len(self.prompt.logprobs if self.prompt else ())


def finished_choice(parts: Delta, end: ChoiceEnd) -> FinishedChoice:
    """Join the deltas of a choice. Content is None if there is only reasoning or tool calls."""
    content: list[str] = []
    reasoning: list[str] = []
    begun: list[CallBegin] = []
    arguments: list[list[str]] = []
    for piece in parts:
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
    has_no_content = not content and bool(reasoning or begun)
    return FinishedChoice(
        content=None if has_no_content else "".join(content),
        reasoning="".join(reasoning) if reasoning else None,
        calls=tuple(
            ToolCallText(call.call_id, call.name, "".join(texts))
            for call, texts in zip(begun, arguments, strict=True)
        ),
        end=end,
        tokens=tuple(piece for piece in parts if isinstance(piece, OutputToken)),
        prompt=next((piece for piece in parts if isinstance(piece, PromptReport)), None),
        parts=parts,
    )


class UsageOptions(NamedTuple):
    """Token counts in a stream: in a last chunk of their own, and in every chunk."""

    at_the_end: bool = False
    continuous: bool = False


class ReportOptions(NamedTuple):
    """What the response reports besides text.

    `logprobs` and `prompt_logprobs` are the number of top alternatives per token; None: no
    log-probabilities.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    echo: bool = False  # the prompt, before the answer
    stop_string: bool = False
    special_tokens: bool = False
    progress: bool = False  # whether the prompt's progress is reported while it is computed

    @property
    def has_tokens(self) -> bool:
        """Whether the response lists its tokens."""
        return self.token_ids or self.logprobs is not None


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """The fields that all chunks of one response repeat; `created` is Unix seconds."""

    response_id: str
    created: int
    model: str
    fingerprint: str


class GenerationProgress(Protocol):
    """Provides the token counts of a response that is being generated."""

    @property
    def usage(self) -> Usage:
        """The counts so far."""


class ResponseRenderer(Protocol):
    """Renders one response as bytes. One object per response, called in the order of the stream.

    For each choice: any number of `delta` calls, then one `ending`; then `closing` once, or
    `failure`. A response that is not streamed calls `whole` alone. The first delta of a choice may
    also render the event that introduces the choice.
    """

    @property
    def ping(self) -> bytes:
        """The bytes sent while no token arrives, so that proxies keep the connection open."""

    def delta(self, index: int, parts: Delta, progress: GenerationProgress) -> bytes:
        """The events for what the choice `index` adds."""

    def text_frame(self, index: int) -> TextFrame | None:
        """The frame of every delta from here on that is one text; None if there is no such."""
        return None

    def ending(self, index: int, end: ChoiceEnd, progress: GenerationProgress) -> bytes:
        """The events that end the choice `index`."""

    def closing(self, progress: GenerationProgress) -> bytes:
        """The last bytes of a stream whose choices have all ended."""

    def failure(self, error: BaseException) -> bytes:
        """The last bytes of a stream that fails after its first event."""

    def whole(self, choices: Sequence[FinishedChoice], progress: GenerationProgress) -> bytes:
        """The body of a response that is not streamed."""
