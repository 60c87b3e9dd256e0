"""`POST /v1/completions`."""

from functools import partial
from typing import TYPE_CHECKING

from gateway.access.callers import read_body
from gateway.generation.prompt import text_prompts
from gateway.schema.openai.completion_renderer import CompletionRenderer
from gateway.schema.openai.completions import decode_completion
from gateway.service import caller_of, service_of
from gateway.web.routes.generation import (
    Endpoint,
    PlanOptions,
    logprobs_formatter,
    plan_options,
    respond,
)
from gateway.web.routes.models import check_model

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp

    from gateway.access.callers import Caller
    from gateway.service import Service


async def create_completion(http: "HttpRequest") -> "ASGIApp":
    """A stream or a whole reply; raises `InvalidRequest` for what cannot be served."""
    service = service_of(http)
    body = await read_body(http, service.limits)
    return respond(order_completion(body, caller_of(http), service), service)


def order_completion(body: bytes, caller: "Caller", service: "Service") -> PlanOptions:
    """What the body asks for; raises `InvalidRequest` for what cannot be served."""
    request = decode_completion(body)
    check_model(request.model, service)
    model = service.model
    read = partial(text_prompts, model.tokenizer, request.prompts(model.vocabulary))
    frames = CompletionRenderer(
        service.header("cmpl"), request.usage_options, logprobs_formatter(request, service)
    )
    surface = Endpoint(read, frames, "prompt", request.constraint())
    return plan_options(request, surface, caller, service)
