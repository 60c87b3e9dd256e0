"""The engine requests of one pooling or decision plan, and the response body made of them."""

import asyncio
import struct
from collections.abc import Sequence
from functools import partial
from typing import Union

from starlette.types import ASGIApp

from engine.errors import InvalidRequest, RowFailed
from engine.pooling import PoolSpec
from engine.request import Abort, Caching, Request, RequestSpec
from engine.stream import TokenStream
from gateway.generation.choices import (
    SPECS_AT_ONCE,
    ChoiceGroup,
    StreamGroup,
    generate_body,
    in_parallel,
    num_written,
)
from gateway.generation.plan import GenerationPlan, caller_fields, check_fits
from gateway.generation.prompt import Prompt
from gateway.generation.reply import Reply, Work
from gateway.pooling.decisions import DecisionPlan, TokenizedQuestion, tokenize_decision
from gateway.pooling.plan import GREEDY, PooledInputs, PoolingPlan, pooling_specs, tokenize_inputs
from gateway.pooling.scores import Node, answer_of
from gateway.schema.decisions.question import Answer
from gateway.schema.rendering import Usage
from gateway.service import Service

# Ids of one response in the engine, which are 8 MiB; one request at least
MAX_WAITING_IDS = 1 << 20
BATCHES = 2  # as many requests wait or run as two iterations have seats
Plan = Union["GenerationPlan", PoolingPlan, DecisionPlan]
_MANY_BYTES = 64 << 10  # more bytes of vectors than this are rendered in a thread


class DecisionGroup(StreamGroup):
    """The questions of one response.

        shared tokens ──▶ question 1: root ──▶ other nodes ──▶ answer
                      └─▶ question 2 …

    The shared tokens are computed first. All questions then start behind them, in the same
    iterations, as far as seats and tokens are free. Tokens are counted once, whoever computes them.
    """

    def __init__(self, plan: DecisionPlan, service: Service) -> None:
        super().__init__(service)
        self._plan = plan
        self._shared: Prompt = ()
        self._questions: Sequence[TokenizedQuestion] = ()
        self._seats = asyncio.Semaphore()  # free places in the engine
        self._first: TokenStream
        self.usage = Usage()  # all requests that have ended

    async def start(self) -> None:
        """Tokenize the input and the questions, and add the shared tokens to the engine.

        Raises `InvalidRequest` and what `Engine.stream` raises, such as `Overloaded`.
        """
        self._shared, self._questions = await tokenize_decision(self._plan, self._service)
        longest = len(self._shared)
        for question, tokenized in zip(self._plan.questions, self._questions, strict=True):
            num_tokens = max(len(node.path) for node in tokenized.nodes) + len(tokenized.tail)
            longest = max(longest, len(self._shared) + num_tokens)
            check_fits(len(self._shared) + num_tokens, 0, question.field, self._service)
        seats = self._service.engine.scheduler.settings.max_batch_size
        self._seats = asyncio.Semaphore(max(1, min(BATCHES * seats, MAX_WAITING_IDS // longest)))
        spec = self._spec(self._shared, PoolSpec())
        self._first = self.open(spec)

    async def answers(self) -> list[Answer | None]:
        """The answers in the questions' order, None for one whose logits are not finite."""
        await self._finish(self._first)
        return await in_parallel(self._questions, self._answer)

    async def _answer(self, question: TokenizedQuestion) -> Answer | None:
        """The answer to a question: its root first, behind which the other nodes start."""
        root, *others = question.nodes
        try:
            asked = await self._scored(
                root, self._first.request, question.tail, goes_on=bool(others)
            )
            rest = (
                []
                if not others
                else await in_parallel(others, lambda node: self._scored(node, asked, node.path))
            )
        except RowFailed:
            return None
        return answer_of(question.labels, question.nodes, [_scores(one) for one in (asked, *rest)])

    async def _scored(
        self, node: Node, behind: Request, tail: Prompt, *, goes_on: bool = False
    ) -> Request:
        """The ended request for a node's children, which goes on `behind` another with `tail`."""
        async with self._seats:
            prompt = (*behind.spec.prompt, *tail)
            pooling = PoolSpec(token_ids=node.children)
            spec = self._spec(prompt, pooling, behind, goes_on=goes_on)
            stream = self.open(spec)
            try:
                return await self._finish(stream)
            finally:
                stream.close(Abort.CLIENT_GONE)
                del self._streams[stream]

    def _spec(
        self,
        prompt: Prompt,
        pooling: PoolSpec,
        behind: Request | None = None,
        *,
        goes_on: bool = True,
    ) -> RequestSpec:
        """A request for `prompt`; with `goes_on` others start behind it."""
        plan = self._plan
        return RequestSpec(
            prompt=prompt,
            max_tokens=0,
            sampling=GREEDY,
            pooling=pooling,
            lora=plan.lora,
            caching=Caching(checkpoints=(len(prompt),) if goes_on else ()),
            behind=behind,
            **caller_fields(plan.scheduling, plan.caller),
        )

    async def _finish(self, stream: TokenStream) -> Request:
        """The ended request of a stream, whose tokens are counted."""
        request, spec, usage = await finished(stream), stream.spec, self.usage
        self.usage = Usage(
            usage.prompt_tokens + spec.own_len,
            cached_tokens=usage.cached_tokens + request.own_cached,
            written_tokens=usage.written_tokens + num_written(request, self._service),
        )
        return request


async def finished(stream: TokenStream) -> Request:
    """The request of a stream, once it has ended."""
    while (await stream.next()).finish is None:
        pass
    return stream.request


def _scores(request: Request) -> tuple[float, ...]:
    """The log-probabilities that a request was made for."""
    return struct.unpack(f"<{len(request.vector) // 4}f", request.vector)


async def decision_body(plan: DecisionPlan, group: DecisionGroup) -> bytes:
    """The response body of a plan. `group` is new, and is closed when this returns."""
    with group:
        await group.start()
        answers = await group.answers()
        return plan.render(plan.model, plan.questions, answers, group.usage)


class PoolingGroup(StreamGroup):
    """The inputs of one response."""

    def __init__(self, plan: PoolingPlan, service: Service) -> None:
        super().__init__(service)
        self._plan = plan

    async def start(self) -> None:
        """Tokenize the inputs and add all requests to the engine, or none.

        Raises `InvalidRequest` and what `Engine.stream` raises, such as `Overloaded`.
        """
        plan, service = self._plan, self._service
        tokenizer = service.model.tokenizer
        tokenized = await tokenize_inputs(tokenizer, plan.inputs, plan.input_fields)
        specs = []
        for spec in pooling_specs(plan, tokenized, service):
            specs.append(spec)
            if len(specs) % SPECS_AT_ONCE == 0:
                await asyncio.sleep(0)
        try:
            service.engine.check_group(
                len(specs), sum(len(spec.prompt) for spec in specs), plan.caller.client
            )
        except InvalidRequest as error:
            field = plan.input_field
            raise InvalidRequest(f"'{field}' is too large: {error}", field) from error
        await self.open_all(specs, plan.caller)

    async def pooled(self) -> PooledInputs:
        """Wait for all vectors; the first error ends the other requests."""
        requests = await in_parallel([*self._streams], finished)
        return PooledInputs(
            [request.vector for request in requests], sum(r.prompt_len for r in requests)
        )


async def pooled_body(plan: PoolingPlan, group: PoolingGroup) -> bytes:
    """The response body of a plan. `group` is new, and is closed when this returns."""
    with group:
        await group.start()
        pooled = await group.pooled()
    if sum(map(len, pooled.vectors)) > _MANY_BYTES:
        return await asyncio.to_thread(plan.render, pooled)
    return plan.render(pooled)


def begun(plan: Plan, service: Service) -> tuple[StreamGroup, Work]:
    """The group of a plan, and what runs it and returns the response body."""
    group: StreamGroup
    if isinstance(plan, DecisionPlan):
        group = DecisionGroup(plan, service)
        return group, partial(decision_body, plan, group)
    if isinstance(plan, PoolingPlan):
        group = PoolingGroup(plan, service)
        return group, partial(pooled_body, plan, group)
    group = ChoiceGroup(plan, service)
    return group, partial(generate_body, plan, group)


async def body_of(plan: Plan, service: Service) -> bytes:
    """The response body of any plan, outside of an HTTP request."""
    return await begun(plan, service)[1]()


def respond(plan: PoolingPlan | DecisionPlan, service: Service) -> ASGIApp:
    """The ASGI response of a plan; the requests end as soon as the client disconnects."""
    group, work = begun(plan, service)
    return Reply(plan.caller, work, partial(group.close, Abort.CLIENT_GONE), service)
