"""`POST /v1/completions`."""

from functools import partial
from typing import TYPE_CHECKING

from gateway.access import read_body
from gateway.prompt import text_prompts
from gateway.routes.generation import Ordered, Surface, ordered, respond, spelling
from gateway.routes.models import check_model
from gateway.schema.completion_frames import CompletionFrames
from gateway.schema.completions import decode_completion
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp

    from gateway.access import Caller
    from gateway.service import Service


async def create_completion(http: "HttpRequest") -> "ASGIApp":
    """A stream or a whole reply; raises `InvalidRequest` for what cannot be served."""
    service = service_of(http)
    body = await read_body(http, service.limits)
    return respond(order_completion(body, caller_of(http), service), service)


def order_completion(body: bytes, caller: "Caller", service: "Service") -> Ordered:
    """What the body asks for; raises `InvalidRequest` for what cannot be served."""
    request = decode_completion(body)
    check_model(request.model, service)
    model = service.model
    read = partial(text_prompts, model.tokenizer, request.prompts(model.vocabulary))
    frames = CompletionFrames(
        service.header("cmpl"), request.usage_wish, spelling(request, service)
    )
    surface = Surface(read, frames, "prompt", request.held())
    return ordered(request, surface, caller, service)
