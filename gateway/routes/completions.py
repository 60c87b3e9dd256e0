"""`POST /v1/completions`."""

from functools import partial
from typing import TYPE_CHECKING

from gateway.access import read_body
from gateway.answer import Limits, Order
from gateway.prompt import text_prompts
from gateway.reply import Reply
from gateway.routes.models import check_model
from gateway.schema.completions import decode_completion
from gateway.schema.frames import CompletionFrames
from gateway.service import caller_of, service_of
from gateway.sse import EventStream

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp


async def create_completion(http: "HttpRequest") -> "ASGIApp":
    """A stream or a whole reply; raises `InvalidRequest` for what cannot be served."""
    service = service_of(http)
    request = decode_completion(await read_body(http, service.limits))
    check_model(request.model, service)
    model = service.model
    order = Order(
        caller=caller_of(http),
        tokenise=partial(text_prompts, model.tokenizer, request.prompts(model.vocabulary)),
        sampling=request.sampling(model.vocabulary, service.seed()),
        limits=Limits(request.max_output, request.min_tokens or 0),
        end_ids=request.end_ids(model.vocabulary),
        stops=request.stops,
        wishes=request.wishes,
        num_choices=request.num_choices,
        include_usage=request.include_usage,
        param="prompt",
        frames=CompletionFrames(service.header("cmpl"), with_usage=request.include_usage),
    )
    return EventStream(order, service) if request.stream else Reply(order, service)
