"""What every endpoint that generates text does: an order from the shared fields, and its answer."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from gateway.generation.event_stream import EventStream
from gateway.generation.plan import GenerationPlan, LengthLimits
from gateway.generation.reply import Reply
from gateway.schema.openai.logprobs import LogprobsFormatter

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from gateway.access.callers import Caller
    from gateway.generation.prompt import TokenizedPrompts
    from gateway.schema.fields.generation import GenerationRequest
    from gateway.schema.fields.output import OutputConstraint
    from gateway.schema.rendering import ResponseRenderer
    from gateway.service import Service


class PlanOptions(NamedTuple):
    """An order, and whether its caller wants to hear the answer as it is made."""

    order: GenerationPlan
    is_stream: bool


class Endpoint(NamedTuple):
    """How one endpoint reads its prompts, from the field `param`, and tells its answers.

    `held` is what the answers must match.
    """

    read: Callable[[], Awaitable["TokenizedPrompts"]]
    frames: "ResponseRenderer"
    param: str
    held: "OutputConstraint | None" = None


def plan_options(
    request: "GenerationRequest", surface: Endpoint, caller: "Caller", service: "Service"
) -> PlanOptions:
    """The order of a request that was decoded.

    Raises `InvalidRequest` for a value that this model cannot take.
    """
    eos = service.model.vocabulary.eos_token_ids
    vocabulary = service.model.vocabulary
    own_ends = request.caller_end_ids(vocabulary)
    avoided = eos - own_ends if request.ignore_eos and surface.held else frozenset[int]()
    ignored = eos if request.ignore_eos else frozenset[int]()
    order = GenerationPlan(
        caller=caller,
        read=surface.read,
        sampling=request.sampling(vocabulary, service.seed()),
        limits=LengthLimits(request.max_output, request.min_tokens or 0),
        end_ids=(eos - ignored) | own_ends | avoided,
        own_ends=own_ends,
        avoided_ids=avoided,
        stops=request.stops,
        wishes=request.scheduling_params,
        num_choices=request.num_choices,
        best_of=request.num_candidates,
        param=surface.param,
        frames=surface.frames,
        told=request.report_options,
        held=surface.held,
    )
    return PlanOptions(order, bool(request.stream))


def logprobs_formatter(
    request: "GenerationRequest", service: "Service"
) -> LogprobsFormatter | None:
    """How the answer's tokens are spelt, if they are told at all."""
    told = request.report_options
    if not told.has_tokens and told.prompt_logprobs is None:
        return None
    return LogprobsFormatter(service.model.tokenizer.token_bytes, told.logprobs, told.token_ids)


def respond(plan_options: PlanOptions, service: "Service") -> "ASGIApp":
    """A stream or a whole reply."""
    order, is_stream = plan_options
    return EventStream(order, service) if is_stream else Reply(order, service)
