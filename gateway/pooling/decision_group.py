"""DecisionGroup: the engine requests of one decision plan, and the response body made of them.

    shared tokens ──▶ question 1: root ──▶ other nodes ──▶ answer
                  └─▶ question 2 …

The shared tokens are computed first. All questions then start behind them, in the same iterations,
as far as seats and tokens are free. Tokens are counted once, whoever computes them.
"""

import asyncio
import struct
from typing import TYPE_CHECKING

from engine.errors import RowFailed
from engine.pooling import PoolSpec
from engine.request import Abort, Caching, RequestSpec
from gateway.generation.choices import StreamGroup, in_parallel, num_written
from gateway.generation.plan import caller_fields, check_fits
from gateway.pooling.decisions import DecisionPlan, TokenizedQuestion, tokenize_decision
from gateway.pooling.labels import Node, answer_of
from gateway.pooling.plan import GREEDY
from gateway.schema.decisions.question import Answer
from gateway.schema.rendering import Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.request import Request
    from engine.stream import TokenStream
    from gateway.generation.prompt import Prompt
    from gateway.service import Service

# Ids of one response in the engine, which are 8 MiB; one request at least
MAX_WAITING_IDS = 1 << 20
BATCHES = 2  # as many requests wait or run as two iterations have seats


class DecisionGroup(StreamGroup):
    """The questions of one response."""

    def __init__(self, plan: DecisionPlan, service: "Service") -> None:
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
        self._seats = asyncio.Semaphore(
            max(1, min(BATCHES * seats, MAX_WAITING_IDS // longest)),
        )
        spec = self._spec(self._shared, PoolSpec())
        self._first = self.open(spec)

    async def answers(self) -> "list[Answer | None]":
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
        self, node: Node, behind: "Request", tail: "Prompt", *, goes_on: bool = False
    ) -> "Request":
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
        prompt: "Prompt",
        pooling: PoolSpec,
        behind: "Request | None" = None,
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

    async def _finish(self, stream: "TokenStream") -> "Request":
        """The ended request of a stream, whose tokens are counted."""
        while (await stream.next()).finish is None:
            pass
        request, spec, usage = stream.request, stream.spec, self.usage
        self.usage = Usage(
            usage.prompt_tokens + spec.own_len,
            cached_tokens=usage.cached_tokens + request.own_cached,
            written_tokens=usage.written_tokens + num_written(request, self._service),
        )
        return request


def _scores(request: "Request") -> tuple[float, ...]:
    """The log-probabilities that a request was made for."""
    return struct.unpack(f"<{len(request.vector) // 4}f", request.vector)


async def decision_body(plan: DecisionPlan, group: DecisionGroup) -> bytes:
    """The response body of a plan. `group` is new, and is closed when this returns."""
    with group:
        await group.start()
        answers = await group.answers()
        return plan.render(plan.model, plan.questions, answers, group.usage)
