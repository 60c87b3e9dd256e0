"""What every endpoint that generates text does: an order from the shared fields, and its answer."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from gateway.order import Limits, Order
from gateway.reply import Reply
from gateway.schema.logprobs import Spelling
from gateway.sse import EventStream

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from gateway.access import Caller
    from gateway.prompt import Reading
    from gateway.schema.frames import Frames
    from gateway.schema.generation import GenerationRequest
    from gateway.schema.output import Held
    from gateway.service import Service


class Ordered(NamedTuple):
    """An order, and whether its caller wants to hear the answer as it is made."""

    order: Order
    is_stream: bool


class Surface(NamedTuple):
    """How one endpoint reads its prompts, from the field `param`, and tells its answers.

    `held` is what the answers must match.
    """

    read: Callable[[], Awaitable["Reading"]]
    frames: "Frames"
    param: str
    held: "Held | None" = None


def ordered(
    request: "GenerationRequest", surface: Surface, caller: "Caller", service: "Service"
) -> Ordered:
    """The order of a request that was decoded.

    Raises `InvalidRequest` for a value that this model cannot take.
    """
    eos = service.model.vocabulary.eos_token_ids
    vocabulary = service.model.vocabulary
    own_ends = request.own_ends(vocabulary)
    avoided = eos - own_ends if request.ignore_eos and surface.held else frozenset[int]()
    ignored = eos if request.ignore_eos else frozenset[int]()
    order = Order(
        caller=caller,
        read=surface.read,
        sampling=request.sampling(vocabulary, service.seed()),
        limits=Limits(request.max_output, request.min_tokens or 0),
        end_ids=(eos - ignored) | own_ends | avoided,
        own_ends=own_ends,
        avoided_ids=avoided,
        stops=request.stops,
        wishes=request.wishes,
        num_choices=request.num_choices,
        best_of=request.num_candidates,
        param=surface.param,
        frames=surface.frames,
        told=request.told,
        held=surface.held,
    )
    return Ordered(order, bool(request.stream))


def spelling(request: "GenerationRequest", service: "Service") -> Spelling | None:
    """How the answer's tokens are spelt, if they are told at all."""
    told = request.told
    if not told.has_tokens and told.prompt_logprobs is None:
        return None
    return Spelling(service.model.tokenizer.token_bytes, told.logprobs, told.token_ids)


def respond(ordered: Ordered, service: "Service") -> "ASGIApp":
    """A stream or a whole reply."""
    order, is_stream = ordered
    return EventStream(order, service) if is_stream else Reply(order, service)
