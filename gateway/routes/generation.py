"""What every endpoint that generates text does: an order from the shared fields, and its answer."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from gateway.order import Limits, Order
from gateway.reply import Reply
from gateway.schema.envelope import UsageWish
from gateway.sse import EventStream

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from gateway.access import Caller
    from gateway.prompt import Reading
    from gateway.schema.frames import Frames
    from gateway.schema.sampling import GenerationRequest
    from gateway.service import Service


class Ordered(NamedTuple):
    """An order, and whether its caller wants to hear the answer as it is made."""

    order: Order
    is_stream: bool


class Surface(NamedTuple):
    """How one endpoint reads its prompts, from the field `param`, and tells its answers."""

    read: Callable[[], Awaitable["Reading"]]
    frames: "Frames"
    param: str


def ordered(
    request: "GenerationRequest",
    surface: Surface,
    caller: "Caller",
    service: "Service",
) -> Ordered:
    """The order of a request that was decoded.

    Raises `InvalidRequest` for a value that this model cannot take.
    """
    vocabulary = service.model.vocabulary
    order = Order(
        caller=caller,
        read=surface.read,
        sampling=request.sampling(vocabulary, service.seed()),
        limits=Limits(request.max_output, request.min_tokens or 0),
        end_ids=request.end_ids(vocabulary),
        stops=request.stops,
        wishes=request.wishes,
        num_choices=request.num_choices,
        param=surface.param,
        frames=surface.frames,
    )
    return Ordered(order, bool(request.stream))


def respond(ordered: Ordered, service: "Service") -> "ASGIApp":
    """A stream or a whole reply."""
    order, is_stream = ordered
    return EventStream(order, service) if is_stream else Reply(order, service)


def usage_wish(request: "GenerationRequest") -> UsageWish:
    """Which chunks carry token counts."""
    return UsageWish(at_the_end=request.include_usage)
