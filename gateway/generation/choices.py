"""Choir: the voices that answer an order. Streams and whole replies listen in the same way.

Order ──gather──▶ leases ──▶ Voice × choices ──▶ pieces, usage
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from engine.errors import EngineError, InvalidRequest
from engine.request import Abort, RequestSpec
from gateway.generation.choice_stream import ChoiceOptions, ChoiceStream
from gateway.generation.plan import GenerationPlan, request_specs
from gateway.generation.text import ShowingDecoder
from gateway.schema.rendering import Usage

if TYPE_CHECKING:
    from engine.stream import TokenStream
    from gateway.generation.prompt import TokenizedPrompts
    from gateway.service import Service

T = TypeVar("T")
DEADLINE_FIELDS = (
    "ttft_deadline",
    "deadline",
)  # of an `RequestSpec`; on the wire in ms, and so named


class ChoiceGroup:
    """The voices of one response. Leave its `with` and every lease is given back."""

    def __init__(self, order: GenerationPlan, service: "Service") -> None:
        self.voices: list[ChoiceStream] = []
        self._order = order
        self._service = service
        self._leases = ExitStack()
        self._num_prompt_tokens = 0

    def __enter__(self) -> "ChoiceGroup":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, EngineError):
            self.close(Abort.EXPLICIT)  # one choice failed or was refused: so are the others
        self._leases.close()

    async def gather(self) -> None:
        """Read the prompts and take all leases, or none: raises what the engine refuses with."""
        order, service = self._order, self._service
        if order.held is not None:
            await service.grammars.check_grammar(*order.held)
        reading = await order.read()
        self._num_prompt_tokens = sum(len(prompt) for prompt in reading.prompts)
        all_asks = [
            ask for prompt in reading.prompts for ask in request_specs(order, prompt, service)
        ]
        self._check_together(all_asks)
        for index, ask in enumerate(all_asks):
            self.voices.append(self._voice(index, self._lease(ask), reading))

    def _check_together(self, all_asks: Sequence[RequestSpec]) -> None:
        """Refuse for good what no empty queue could take, and not as if it were full."""
        try:
            self._service.engine.check_group([len(ask.prompt) for ask in all_asks])
        except InvalidRequest as error:
            order = self._order
            param = "n" if order.num_choices > 1 else order.param
            param = "best_of" if order.best_of else param
            raise InvalidRequest(f"'{param}' is too much: {error}", param) from error

    def _voice(
        self, index: int, tokens: "TokenStream", reading: "TokenizedPrompts"
    ) -> ChoiceStream:
        order, tokenizer = self._order, self._service.model.tokenizer
        decoder = tokenizer.decoder()
        shown = reading.shown
        if order.told.special_tokens:
            shown = {i: text.encode() for text, i in tokenizer.special_tokens.items()}
        ear = ChoiceOptions(
            decoder=ShowingDecoder(decoder, shown) if shown else decoder,
            stops=order.stops,
            parser=None if reading.parser is None else reading.parser(),
            told=order.told,
            own_ends=order.own_ends,
            is_ranked=order.num_candidates > order.num_choices,
            is_mute=order.is_mute,
        )
        return ChoiceStream(index, tokens, ear)

    def _lease(self, ask: RequestSpec) -> "TokenStream":
        """Join the queue; a refusal names the field as the caller spelled it."""
        try:
            return self._leases.enter_context(self._service.engine.stream(ask))
        except InvalidRequest as error:
            if error.param not in DEADLINE_FIELDS:
                raise
            param = f"{error.param}_ms"
            raise InvalidRequest(f"'{param}' cannot be met: {error}", param) from error

    async def each(self, listen: Callable[[ChoiceStream], Awaitable[T]]) -> list[T]:
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
        first_choices = self.voices[:: self._order.num_candidates]
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(voice.num_shown for voice in self.voices),
            cached_tokens=sum(voice.num_cached for voice in first_choices),
            reasoning_tokens=sum(voice.num_reasoning for voice in self.voices),
        )


async def _run(listen: Callable[[ChoiceStream], Awaitable[T]], voice: ChoiceStream) -> T:
    return await listen(voice)
