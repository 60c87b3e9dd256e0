"""What every endpoint that generates text does: an order from the shared fields, and its answer."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from gateway.order import Limits, Order
from gateway.reply import Reply
from gateway.schema.envelope import UsageWish
from gateway.service import caller_of, service_of
from gateway.sse import EventStream

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp

    from gateway.prompt import Reading
    from gateway.schema.frames import Frames
    from gateway.schema.sampling import GenerationRequest


def answer(
    http: "HttpRequest",
    request: "GenerationRequest",
    read: Callable[[], Awaitable["Reading"]],
    frames: "Frames",
    param: str,
) -> "ASGIApp":
    """A stream or a whole reply. `read` makes the prompts of the field `param`.

    Raises `InvalidRequest` for a value that this model cannot take.
    """
    service = service_of(http)
    vocabulary = service.model.vocabulary
    order = Order(
        caller=caller_of(http),
        read=read,
        sampling=request.sampling(vocabulary, service.seed()),
        limits=Limits(request.max_output, request.min_tokens or 0),
        end_ids=request.end_ids(vocabulary),
        stops=request.stops,
        wishes=request.wishes,
        num_choices=request.num_choices,
        param=param,
        frames=frames,
    )
    return EventStream(order, service) if request.stream else Reply(order, service)


def usage_wish(request: "GenerationRequest") -> UsageWish:
    """Which chunks carry token counts."""
    return UsageWish(at_the_end=request.include_usage)
