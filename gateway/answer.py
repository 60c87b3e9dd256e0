"""From an order to voices: what an HTTP request wants, and the choices that answer it.

    Order ──tokenise──▶ prompts ──asks──▶ Ask × choices ──lease──▶ Voice × choices

A voice is one choice: its lease, its text so far, and how it ended. Streams and whole replies
listen to voices in the same way.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from engine.errors import ContextTooLong, EngineError, InvalidRequest
from engine.request import Abort, Ask, FinishReason
from gateway.ports import TokenDecoder
from gateway.schema.frames import Frames, Usage
from gateway.schema.scheduling import Wishes
from gateway.text import TextStream

if TYPE_CHECKING:
    from engine.step import Sampling
    from engine.stream import TokenStream
    from gateway.access import Caller
    from gateway.service import Service

T = TypeVar("T")
Prompt = Sequence[int]
DEADLINES = ("ttft_deadline", "deadline")  # of an `Ask`; on the wire in ms, and so named


class Limits(NamedTuple):
    """How long an answer may be; `max_tokens` None: what the context leaves."""

    max_tokens: int | None
    min_tokens: int


@dataclass(frozen=True, slots=True)
class Order:
    """An HTTP request for text, understood and not yet begun.

    `tokenise` may wait (long prompts leave the loop). `sampling` is that of the first choice of
    a prompt; `param` is the field that holds the prompt, for complaints about its length.
    """

    caller: "Caller"
    tokenise: Callable[[], Awaitable[Sequence[Prompt]]]
    sampling: "Sampling"
    limits: Limits
    end_ids: frozenset[int]
    stops: tuple[str, ...]
    wishes: Wishes
    num_choices: int
    include_usage: bool
    param: str
    frames: Frames


class Voice:
    """One choice. `finish_reason` is None until `next` has returned the last of its text."""

    def __init__(
        self, index: int, tokens: "TokenStream", decoder: TokenDecoder, stops: Sequence[str]
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self._tokens = tokens
        self._text = TextStream(decoder, stops)
        self._has_stops = bool(stops)

    async def next(self) -> str:
        """Wait for news; the text that it adds, which may be none.

        Raises `RequestFailed` or `Unavailable` if the request was lost.
        """
        chunk = await self._tokens.next()
        if chunk.finish is None and not self._has_stops:
            self.num_tokens += len(chunk.tokens)
            return self._text.feed(chunk.tokens)
        return self._speak(chunk.tokens, chunk.finish)

    def _speak(self, tokens: tuple[int, ...], finish: FinishReason | None) -> str:
        """Token by token, so that the count after a stop string does not depend on the chunks."""
        shown = tokens[:-1] if finish is FinishReason.STOP else tokens
        pieces = []
        for token in shown:
            pieces.append(self._text.feed((token,)))
            self.num_tokens += 1
            if self._text.is_stopped:
                self._stop()
                return "".join(pieces)
        self.num_tokens += len(tokens) - len(shown)
        if finish is not None:
            self.finish_reason = finish.value
            pieces.append(self._text.finish())
            if self._text.is_stopped:
                self._stop()
        return "".join(pieces)

    def _stop(self) -> None:
        """A stop string is complete: end the request."""
        self._tokens.close(Abort.STOP_STRING)
        self.finish_reason = FinishReason.STOP.value

    @property
    def num_cached(self) -> int:
        """Tokens of its prompt that were found in the prefix cache."""
        return self._tokens.request.num_cached

    def close(self, reason: Abort) -> None:
        """End it early."""
        self._tokens.close(reason)


class Choir:
    """The voices of one response. Leave its `with` and every lease is given back."""

    def __init__(self, order: Order, service: "Service") -> None:
        self.voices: list[Voice] = []
        self._order = order
        self._service = service
        self._leases = ExitStack()
        self._num_prompt_tokens = 0

    def __enter__(self) -> "Choir":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, EngineError):
            self.close(Abort.EXPLICIT)  # one choice failed or was refused: so are the others
        self._leases.close()

    async def gather(self) -> None:
        """Tokenise and take all leases, or none: raises what the engine refuses with."""
        order, service = self._order, self._service
        prompts = await order.tokenise()
        self._num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        asks = [ask for prompt in prompts for ask in _asks(order, prompt, service)]
        for index, ask in enumerate(asks):
            tokens = self._lease(ask)
            decoder = service.model.tokenizer.decoder()
            self.voices.append(Voice(index, tokens, decoder, order.stops))

    def _lease(self, ask: Ask) -> "TokenStream":
        """Join the queue; a refusal names the field as the caller spelled it."""
        try:
            return self._leases.enter_context(self._service.engine.stream(ask))
        except InvalidRequest as error:
            if error.param not in DEADLINES:
                raise
            param = f"{error.param}_ms"
            raise InvalidRequest(f"'{param}' cannot be met: {error}", param) from error

    async def each(self, listen: Callable[[Voice], Awaitable[T]]) -> list[T]:
        """What `listen` makes of every voice, all at the same time, in their order.

        The first error ends the others and comes out as it is.
        """
        if len(self.voices) == 1:
            return [await listen(self.voices[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_run(listen, voice)) for voice in self.voices]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]

    def close(self, reason: Abort) -> None:
        """End whatever still runs."""
        for voice in self.voices:
            voice.close(reason)

    @property
    def usage(self) -> Usage:
        """Each prompt once, as its first choice found it, and the output of all choices so far."""
        first_choices = self.voices[:: self._order.num_choices]
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(voice.num_tokens for voice in self.voices),
            cached_tokens=sum(voice.num_cached for voice in first_choices),
        )


async def _run(listen: Callable[[Voice], Awaitable[T]], voice: Voice) -> T:
    return await listen(voice)


def _asks(order: Order, prompt: Prompt, service: "Service") -> list[Ask]:
    """One ask per choice; choice `i` has a seed of its own that follows from the first's."""
    if not prompt:
        raise InvalidRequest(f"'{order.param}' has no tokens.", order.param)
    if max(prompt) >= service.model.vocabulary.size:
        message = f"'{order.param}' has tokens that the model does not know."
        raise InvalidRequest(message, order.param)
    max_tokens = _max_tokens(order, len(prompt), service)
    return [
        Ask(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=replace(order.sampling, seed=derived_seed(order.sampling.seed, choice)),
            end_ids=order.end_ids,
            min_tokens=order.limits.min_tokens,
            label=order.caller.request_id,
            tenant=order.caller.tenant,
            **order.wishes._asdict(),
        )
        for choice in range(order.num_choices)
    ]


def _max_tokens(order: Order, prompt_len: int, service: "Service") -> int:
    limits = order.limits
    try:
        if limits.max_tokens is None:
            max_tokens = service.room_for_output(prompt_len)
        else:
            max_tokens = limits.max_tokens
            service.engine.check_fits(prompt_len, max_tokens)
    except ContextTooLong as error:
        error.param = order.param
        raise
    if limits.min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' ({limits.min_tokens}) is more than the answer may have ({max_tokens}).",
            "min_tokens",
        )
    return max_tokens


def derived_seed(seed: int, choice: int) -> int:
    """The seed of a choice: the first has the request's own, the others' follow from it."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
