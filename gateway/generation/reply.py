"""Whole replies, errors among them. A reply watches for its client as a stream does."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
from starlette.responses import Response

from engine.request import Abort
from gateway.errors import error_headers, verdict
from gateway.generation.choices import ChoiceGroup
from gateway.schema.rendering import FinishedChoice, OutputToken, PromptReport, finished_choice

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from engine.ports import Clock
    from gateway.access.callers import Caller
    from gateway.generation.choice_stream import ChoiceStream
    from gateway.generation.plan import GenerationPlan
    from gateway.ports import Piece
    from gateway.service import Service

T = TypeVar("T")
JSON = "application/json"
_MANY_TOKENS = 500  # told one by one; more are rendered off the loop


def json_response(body: bytes, caller: "Caller", clock: "Clock", status: int = 200) -> Response:
    """A JSON body with the headers that every response carries."""
    return Response(body, status, caller.headers(clock()), JSON)


def error_response(error: BaseException, caller: "Caller", clock: "Clock") -> Response:
    """What the table of `gateway.errors` says about an error."""
    headers = caller.headers(clock()) | error_headers(error)
    body = caller.dialect.error_body(error, caller.request_id)
    return Response(body, verdict(error).status, headers, JSON)


class Reply:
    """An ASGI response: all choices to their end, then one body."""

    def __init__(self, order: "GenerationPlan", service: "Service") -> None:
        self._order = order
        self._service = service
        self._choir = ChoiceGroup(order, service)

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer; if the client leaves first, give everything back and say nothing."""
        work = partial(compose, self._order, self._choir)
        body = await unless_gone(receive, work, self._client_gone)
        if body is not None:
            response = json_response(body, self._order.caller, self._service.clock)
            await response(scope, receive, send)

    def _client_gone(self) -> None:
        self._choir.close(Abort.CLIENT_GONE)


async def compose(order: "GenerationPlan", choir: ChoiceGroup) -> bytes:
    """The body of the order's whole answer. The choir is new, and closed in the end."""
    with choir:
        await choir.gather()
        candidates = await choir.each(_to_the_end)
        choices = _likeliest(order, choir, candidates)
        if sum(choice.num_reported for choice in choices) > _MANY_TOKENS:
            body = await asyncio.to_thread(order.frames.whole, choices, choir)
        else:
            body = order.frames.whole(choices, choir)
    if order.seal is not None:
        await order.seal()
    return body


async def _to_the_end(voice: "ChoiceStream") -> FinishedChoice:
    said: list[Piece | OutputToken | PromptReport] = []
    while voice.end is None:
        said += await voice.next()
    return finished_choice(said, voice.end)


def _likeliest(
    order: "GenerationPlan", choir: ChoiceGroup, candidates: list[FinishedChoice]
) -> list[FinishedChoice]:
    """Of each prompt's candidates those with the best scores, the best first."""
    size, num_told = order.num_candidates, order.num_choices
    if size == num_told:
        return candidates
    told = []
    for start in range(0, len(candidates), size):
        places = sorted(range(start, start + size), key=lambda i: -choir.voices[i].score)
        told += [candidates[i] for i in places[:num_told]]
    return told


async def unless_gone(
    receive: "Receive", work: Callable[[], Awaitable[T]], on_gone: Callable[[], None]
) -> T | None:
    """The result of `work`, or None if the client hung up first: then `on_gone` was called
    at once and the work was cancelled. Errors of the work come out as they are."""
    scope = anyio.CancelScope()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()
        scope.cancel()

    watching = asyncio.create_task(watch())
    try:
        with scope:
            return await work()
        return None
    finally:
        watching.cancel()
        await asyncio.wait((watching,))
