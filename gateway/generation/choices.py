"""ChoiceGroup: the engine requests of one plan. Streams and whole responses both run on it.

GenerationPlan ──start──▶ engine streams ──▶ ChoiceStream × choices ──▶ deltas, usage
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Self, TypeVar

from engine.errors import EngineError, InvalidRequest, NoAllowedToken
from engine.request import Abort, Request, RequestSpec
from engine.stream import TokenStream, close_streams
from gateway.access.callers import Caller
from gateway.errors import ConstraintFailed, ModelNotFound
from gateway.generation.choice_stream import (
    MANY_TOKENS,
    ChoiceOptions,
    ChoiceStream,
    DirectSink,
)
from gateway.generation.image_prompt import ImagePrompt
from gateway.generation.plan import GenerationPlan, request_specs, truncated
from gateway.generation.prompt import TokenizedPrompts, tokenize_text
from gateway.generation.text import SpecialTokenDecoder
from gateway.generation.threads import thread_meter
from gateway.ports import Piece
from gateway.schema.rendering import (
    FinishedChoice,
    OutputToken,
    PredictionTokens,
    PromptReport,
    Usage,
    finished_choice,
)
from gateway.service import Service

S = TypeVar("S")
T = TypeVar("T")
CHOICES_AT_ONCE = 128  # choices, or tasks for them, that are created without a pause
SPECS_AT_ONCE = 16  # requests that are built or added without a pause
Sink = Callable[[bytes], Awaitable[None]]  # takes one or several events
_MANY_CHOICES = 256  # the same, rendered in 2 ms
DEADLINE_FIELDS = ("ttft_deadline", "deadline")  # fields of `RequestSpec`; request bodies add `_ms`


class StreamGroup:
    """The engine streams of one response. Leaving its `with` block closes all of them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._streams: dict[TokenStream, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """If one request failed or was rejected, end the others."""
        has_failed = kind is not None and issubclass(kind, EngineError)
        self.close(Abort.EXPLICIT if has_failed else Abort.CLIENT_GONE)

    def open(self, spec: RequestSpec, *, reports_progress: bool = False) -> TokenStream:
        """Add a request to the engine; errors name the field as the request body spells it."""
        service = self._service
        if (lora := spec.lora) is not None and service.lora_of(lora.name) != lora:
            raise ModelNotFound(lora.name, service.group.names)  # unloaded since it was planned
        try:
            stream = service.engine.stream(spec, reports_progress=reports_progress).open()
        except InvalidRequest as error:
            if error.param not in DEADLINE_FIELDS:
                raise
            param = f"{error.param}_ms"
            raise InvalidRequest(f"'{param}' cannot be met: {error}", param) from error
        self._streams[stream] = None
        return stream

    async def open_all(
        self, specs: Sequence[RequestSpec], caller: Caller, *, reports_progress: bool = False
    ) -> list[TokenStream]:
        """Add requests to the engine."""
        record = caller.record
        streams: list[TokenStream] = []
        if record is not None:
            record.is_starting = True
        for index, spec in enumerate(specs):
            if index and index % SPECS_AT_ONCE == 0:
                await self.pause(caller)
            streams.append(self.open(spec, reports_progress=reports_progress))
        if record is not None:
            record.is_starting = False
        return streams

    async def pause(self, caller: Caller) -> None:
        """Let others run, after `SPECS_AT_ONCE` requests were built or added. Beside requests of
        other clients, these get the client's share of the event loop's time (`Intake`)."""
        pools = self._service.engine.scheduler.arrivals.queue.pools
        has_others = any(pool.has_others(caller.client) for pool in pools)
        await (thread_meter.get().pause() if has_others else asyncio.sleep(0))

    def close(self, reason: Abort) -> None:
        """End the requests that still run (`close_streams`)."""
        close_streams(self._streams, reason)


class ChoiceGroup(StreamGroup):
    """The choices of one response."""

    def __init__(self, plan: GenerationPlan, service: Service) -> None:
        super().__init__(service)
        self.choices: list[ChoiceStream] = []
        self._plan = plan
        self._num_prompt_tokens = 0

    async def start(self) -> None:
        """Tokenize the prompts and add all requests to the engine, or none.

        Raises `InvalidRequest` and what `Engine.stream` raises, such as `Overloaded`.
        """
        plan, service = self._plan, self._service
        if plan.constraint is not None:
            await service.grammars.check_grammar(*plan.constraint, plan.caller.client)
        tokenized = await plan.tokenize()
        prediction: tuple[int, ...] = ()
        if plan.prediction:
            prediction = await tokenize_text(
                service.model.tokenizer, plan.prediction, "prediction.content"
            )
        # Counted before any is built: 2,048 prompts with 128 choices each fit into 14 KB.
        prompts = [ImagePrompt(prompt, tokenized.media) for prompt in tokenized.prompts]
        self._num_prompt_tokens = sum(
            len(truncated(plan, prompt, service).ids) for prompt in prompts
        )
        self._check_group(len(prompts))
        caller = plan.caller
        block_size = service.engine.scheduler.kv.block_size
        specs: list[RequestSpec] = []
        for prompt in prompts:
            breakpoints = tokenized.marks.breakpoints
            specs += request_specs(plan, prompt, service, prediction, breakpoints)
            if len(specs) % SPECS_AT_ONCE < plan.num_candidates:
                await self.pause(caller)
        if plan.turn is not None:
            specs = [plan.turn.with_known_hashes(spec, tokenized, block_size) for spec in specs]
        streams = await self.open_all(specs, caller, reports_progress=plan.report.progress)
        ends = tokenized.marks.message_ends
        service.timelines.note_messages(caller.request_id, caller.tenant, ends)
        for index, stream in enumerate(streams):
            if index and index % CHOICES_AT_ONCE == 0:
                await asyncio.sleep(0)
            self.choices.append(ChoiceStream(index, stream, self._options(tokenized)))
        if plan.turn is not None:
            plan.turn.begin(tokenized, self.choices[0], block_size)

    def _check_group(self, num_prompts: int) -> None:
        """Reject with a 400 what even an empty queue could not take, instead of a 503."""
        each = self._plan.num_candidates
        try:
            self._service.engine.check_group(
                num_prompts * each, self._num_prompt_tokens * each, self._plan.caller.client
            )
        except InvalidRequest as error:
            plan = self._plan
            param = "n" if plan.num_choices > 1 else plan.prompt_field
            param = "best_of" if plan.best_of else param
            raise InvalidRequest(f"'{param}' is too large: {error}", param) from error

    def _options(self, tokenized: TokenizedPrompts) -> ChoiceOptions:
        plan, tokenizer = self._plan, self._service.model.tokenizer
        decoder = tokenizer.decoder()
        visible_tokens = tokenized.visible_tokens
        if plan.report.special_tokens:
            visible_tokens = {i: text.encode() for text, i in tokenizer.special_tokens.items()}
        return ChoiceOptions(
            decoder=SpecialTokenDecoder(decoder, visible_tokens) if visible_tokens else decoder,
            stop_strings=plan.stop_strings,
            parser=None if tokenized.new_parser is None else tokenized.new_parser(),
            report=plan.report,
            caller_end_ids=plan.caller_end_ids,
            is_ranked=plan.is_ranked,
            is_prompt_only=plan.is_prompt_only,
            is_single=plan.is_held,
        )

    async def run_each(self, run: Callable[[ChoiceStream], Awaitable[T]]) -> list[T]:
        """The results of `run` for all choices; see `in_parallel`. An error of a grammar names its
        field."""
        try:
            return await in_parallel(self.choices, run)
        except NoAllowedToken as error:
            if (constraint := self._plan.constraint) is None:
                raise
            raise ConstraintFailed(constraint.param, error) from error

    @property
    def has_started(self) -> bool:
        """Whether the engine has begun to compute any of it."""
        return any(choice.request.times.admitted_at is not None for choice in self.choices)

    @property
    def ping(self) -> bytes:
        """The bytes sent while no event comes: they say how far the prompt is, or are the
        renderer's."""
        progress = (choice.prompt_progress for choice in self.choices)
        partial_one = next((each for each in progress if each.is_partial), None)
        return self._plan.renderer.ping if partial_one is None else partial_one.as_comment()

    @property
    def usage(self) -> Usage:
        """Each prompt once (with its first choice's cache hits), and all choices' output so far."""
        first_choices = self.choices[:: self._plan.num_candidates]
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(choice.num_completion_tokens for choice in self.choices),
            cached_tokens=sum(choice.request.num_cached for choice in first_choices),
            written_tokens=sum(num_written(each.request, self._service) for each in first_choices),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices),
            image_tokens=sum(
                each.num_tokens for choice in first_choices for each in choice.request.spec.media
            ),
            prediction=self._prediction_tokens() if self._plan.prediction else None,
        )

    def _prediction_tokens(self) -> PredictionTokens:
        requests = [choice.request for choice in self.choices]
        return PredictionTokens(
            sum(request.num_accepted_prediction for request in requests),
            sum(request.num_rejected_prediction for request in requests),
        )


def num_written(request: Request, service: Service) -> int:
    """Prompt tokens that a request adds to the prefix cache, in full blocks; 0 before it has
    started."""
    scheduler = service.engine.scheduler
    if not scheduler.settings.reuses_prefixes or request.times.admitted_at is None:
        return 0
    size, until = scheduler.kv.block_size, request.spec.caching.until
    known = max(request.num_cached, request.spec.shared_len // size * size)
    last = request.prompt_len if until is None else min(until, request.prompt_len)
    return max(0, last // size * size - known)


async def in_parallel(items: Sequence[S], run: Callable[[S], Awaitable[T]]) -> list[T]:
    """The results of `run` for all items, which run concurrently, in the items' order.

    The first error cancels the others and is raised as it is.
    """
    if len(items) == 1:
        return [await run(items[0])]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = []
            for index, item in enumerate(items):
                running.append(tasks.create_task(_await(run, item)))
                if index % CHOICES_AT_ONCE == CHOICES_AT_ONCE - 1:
                    await asyncio.sleep(0)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    except asyncio.CancelledError as error:
        raise error.with_traceback(None)  # noqa: B904 # frames of the group refer to it
    return [task.result() for task in running]


async def _await(run: Callable[[S], Awaitable[T]], item: S) -> T:
    return await run(item)


def _nothing() -> None:
    """The default of `on_accepted`."""


async def generate_events(
    plan: GenerationPlan,
    group: ChoiceGroup,
    sink: Sink,
    on_accepted: Callable[[], None] = _nothing,
    direct: DirectSink | None = None,
) -> bytes:
    """Hand the plan's events to `sink`, or what a single choice adds to `direct`, and return the
    last ones.

    `on_accepted` is called once the engine has the requests. `group` is new, and is closed when
    this returns. Raises what `ChoiceGroup.start` and the engine raise.
    """
    with plan.listed():
        with group:
            await group.start()
            if plan.background is not None:
                await sink(plan.background.accepted())
            on_accepted()
            last_events = await group.run_each(partial(_choice_events, plan, group, sink, direct))
            last_events.append(plan.renderer.closing(group))
        if plan.on_complete is not None:
            await plan.on_complete()
    return b"".join(last_events)


async def _choice_events(
    plan: GenerationPlan,
    group: ChoiceGroup,
    sink: Sink,
    direct: DirectSink | None,
    choice: ChoiceStream,
) -> bytes:
    """Hand over a choice's events. A single choice's last events are returned instead, so that
    they and the end of the stream are one write."""
    renderer, index = plan.renderer, choice.index
    if len(group.choices) > 1:
        direct = None  # the events of choices keep their order
    while True:
        delta = await choice.next(direct)
        if len(delta) > MANY_TOKENS:  # it is an echoed prompt
            events = await asyncio.to_thread(renderer.delta, index, delta, group)
        else:
            events = renderer.delta(index, delta, group) if delta else b""
        if choice.end is not None:
            break
        if events:
            await sink(events)
    events += renderer.ending(index, choice.end, group)
    if len(group.choices) == 1:
        return events
    await sink(events)
    return b""


async def generate_body(plan: GenerationPlan, group: ChoiceGroup) -> bytes:
    """The response body of a plan. `group` is new, and is closed when this returns."""
    with plan.listed():
        with group:
            await group.start()
            candidates = await group.run_each(_finished_choice)
            choices = _most_likely(plan, group, candidates)
            is_many = len(choices) > _MANY_CHOICES
            if is_many or sum(choice.num_reported for choice in choices) > MANY_TOKENS:
                body = await asyncio.to_thread(plan.renderer.whole, choices, group)
            else:
                body = plan.renderer.whole(choices, group)
        if plan.on_complete is not None:
            await plan.on_complete()
    return body


async def _finished_choice(choice: ChoiceStream) -> FinishedChoice:
    parts: list[Piece | OutputToken | PromptReport] = []
    while choice.end is None:
        parts += await choice.next()
    return finished_choice(parts, choice.end)


def _most_likely(
    plan: GenerationPlan, group: ChoiceGroup, candidates: list[FinishedChoice]
) -> list[FinishedChoice]:
    """The `num_choices` candidates of each prompt with the highest scores, highest first."""
    if not plan.is_ranked:
        return candidates
    size, best = plan.num_candidates, []
    for start in range(0, len(candidates), size):
        ranked = sorted(range(start, start + size), key=lambda i: -group.choices[i].score)
        best += [candidates[i] for i in ranked[: plan.num_choices]]
    return best
