"""PoolingGroup: the engine requests of one pooling plan, and the response body made of them."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Union

from engine.errors import InvalidRequest
from engine.request import Abort
from gateway.generation.choices import (
    SPECS_AT_ONCE,
    ChoiceGroup,
    StreamGroup,
    generate_body,
    in_parallel,
)
from gateway.generation.reply import Reply
from gateway.pooling.decision_group import DecisionGroup, decision_body
from gateway.pooling.decisions import DecisionPlan
from gateway.pooling.inputs import tokenize_inputs
from gateway.pooling.plan import PooledInputs, PoolingPlan, pooling_specs

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from engine.stream import TokenStream
    from gateway.generation.plan import GenerationPlan
    from gateway.service import Service

Plan = Union["GenerationPlan", PoolingPlan, DecisionPlan]
_MANY_BYTES = 64 << 10  # more bytes of vectors than this are rendered in a thread


class PoolingGroup(StreamGroup):
    """The inputs of one response."""

    def __init__(self, plan: PoolingPlan, service: "Service") -> None:
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
        streams = [*self._streams]
        await in_parallel(streams, _finish)
        requests = [stream.request for stream in streams]
        return PooledInputs(
            [request.vector for request in requests], sum(r.prompt_len for r in requests)
        )


async def _finish(stream: "TokenStream") -> None:
    while (await stream.next()).finish is None:
        pass


async def pooled_body(plan: PoolingPlan, group: PoolingGroup) -> bytes:
    """The response body of a plan. `group` is new, and is closed when this returns."""
    with group:
        await group.start()
        pooled = await group.pooled()
    if sum(map(len, pooled.vectors)) > _MANY_BYTES:
        return await asyncio.to_thread(plan.render, pooled)
    return plan.render(pooled)


async def body_of(plan: "Plan", service: "Service") -> bytes:
    """The response body of any plan, outside of an HTTP request."""
    if isinstance(plan, DecisionPlan):
        return await decision_body(plan, DecisionGroup(plan, service))
    if isinstance(plan, PoolingPlan):
        return await pooled_body(plan, PoolingGroup(plan, service))
    return await generate_body(plan, ChoiceGroup(plan, service))


def respond(plan: PoolingPlan | DecisionPlan, service: "Service") -> "ASGIApp":
    """The ASGI response of a plan; the requests end as soon as the client disconnects."""
    if isinstance(plan, DecisionPlan):
        decisions = DecisionGroup(plan, service)
        end = partial(decisions.close, Abort.CLIENT_GONE)
        return Reply(plan.caller, partial(decision_body, plan, decisions), end, service)
    group = PoolingGroup(plan, service)
    abandon = partial(group.close, Abort.CLIENT_GONE)
    return Reply(plan.caller, partial(pooled_body, plan, group), abandon, service)
