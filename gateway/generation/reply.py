"""Responses in one piece, errors included. Generation ends as soon as the client disconnects."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import anyio
from starlette.responses import Response

from engine.request import Abort
from gateway.errors import error_headers, http_error
from gateway.generation.choices import ChoiceGroup
from gateway.observe.timelines import phase_seconds, slowest
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
TIMING = b"x-podway-timing"  # with this request header, a response has timing headers
_MANY_CHOICES = 256  # the same, rendered in 2 ms
_MANY_TOKENS = 500  # reported one by one; more of them are rendered in a thread


def json_response(body: bytes, caller: "Caller", clock: "Clock", status: int = 200) -> Response:
    """A JSON body with the headers that every response carries."""
    return Response(body, status, caller.headers(clock()), JSON)


def error_response(error: BaseException, caller: "Caller", clock: "Clock") -> Response:
    """The status, headers and body of an error, from the table in `gateway.errors`. Its code is
    the reason in the request log."""
    caller.note(http_error(error).code)
    headers = caller.headers(clock()) | error_headers(error)
    body = caller.dialect.error_body(error, caller.request_id)
    return Response(body, http_error(error).status, headers, JSON)


class ClosableGroup(Protocol):
    """The engine requests of one response."""

    def close(self, reason: Abort) -> None:
        """End the requests that still run."""
        ...


class Reply:
    """The ASGI response that is not streamed: `work` runs a group's requests to their end and
    returns the body."""

    def __init__(
        self,
        caller: "Caller",
        group: ClosableGroup,
        work: Callable[[], Awaitable[bytes]],
        service: "Service",
    ) -> None:
        self._caller = caller
        self._group = group
        self._work = work
        self._service = service

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Send the body; if the client disconnects first, end the requests and send nothing."""
        body = await unless_disconnected(receive, self._work, self._on_disconnect)
        if body is not None:
            response = json_response(body, self._caller, self._service.clock)
            if TIMING in dict(scope["headers"]):
                response.headers.update(self._timing())
            await response(scope, receive, send)

    def _timing(self) -> dict[str, str]:
        """Milliseconds of each phase of the slowest choice, one header for each."""
        caller, now = self._caller, self._service.clock()
        timelines = self._service.timelines.find(caller.request_id, caller.tenant)
        phases = phase_seconds(slowest(timelines, now), now)
        return {f"x-podway-{name}-ms": f"{seconds * 1e3:.1f}" for name, seconds in phases.items()}

    def _on_disconnect(self) -> None:
        self._group.close(Abort.CLIENT_GONE)


async def generate_body(plan: "GenerationPlan", group: ChoiceGroup) -> bytes:
    """The response body of a plan. `group` is new, and is closed when this returns."""
    with group:
        await group.start()
        candidates = await group.run_each(_finished_choice)
        choices = _most_likely(plan, group, candidates)
        is_many = len(choices) > _MANY_CHOICES
        if is_many or sum(choice.num_reported for choice in choices) > _MANY_TOKENS:
            body = await asyncio.to_thread(plan.renderer.whole, choices, group)
        else:
            body = plan.renderer.whole(choices, group)
    if plan.on_complete is not None:
        await plan.on_complete()
    return body


async def _finished_choice(choice: "ChoiceStream") -> FinishedChoice:
    parts: list[Piece | OutputToken | PromptReport] = []
    while choice.end is None:
        parts += await choice.next()
    return finished_choice(parts, choice.end)


def _most_likely(
    plan: "GenerationPlan", group: ChoiceGroup, candidates: list[FinishedChoice]
) -> list[FinishedChoice]:
    """The `num_choices` candidates of each prompt with the highest scores, highest first."""
    if not plan.is_ranked:
        return candidates
    size, best = plan.num_candidates, []
    for start in range(0, len(candidates), size):
        ranked = sorted(range(start, start + size), key=lambda i: -group.choices[i].score)
        best += [candidates[i] for i in ranked[: plan.num_choices]]
    return best


async def unless_disconnected(
    receive: "Receive", work: Callable[[], Awaitable[T]], on_disconnect: Callable[[], None]
) -> T | None:
    """The result of `work`, or None if the client disconnected first.

    In that case `on_disconnect` has been called at once and the work cancelled. Errors of the
    work are raised as they are.
    """
    scope = anyio.CancelScope()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_disconnect()
        scope.cancel()

    watching = asyncio.create_task(watch())
    try:
        with scope:
            return await work()
        return None
    finally:
        watching.cancel()
        await asyncio.wait((watching,))
