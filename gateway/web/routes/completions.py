"""`POST /v1/completions`."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gateway.access.callers import read_body
from gateway.generation.event_stream import respond
from gateway.generation.plan import GenerationPlan, build_plan, check_fits, longest_prompt
from gateway.generation.prompt import tokenize_prompts
from gateway.schema.openai.completion_renderer import CompletionRenderer
from gateway.schema.openai.completions import decode_completion
from gateway.schema.openai.event_envelope import token_formatter
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp

    from gateway.access.callers import Caller
    from gateway.service import Service


async def create_completion(http: "HttpRequest") -> "ASGIApp":
    """An event stream or a JSON body; raises `InvalidRequest` for what cannot be served."""
    service = service_of(http)
    body = await read_body(http, service.limits)
    return respond(plan_completion(body, caller_of(http), service), service)


def plan_completion(body: bytes, caller: "Caller", service: "Service") -> GenerationPlan:
    """The plan of a request body; raises `InvalidRequest` for what cannot be served."""
    request = decode_completion(body, caller.unknown_fields)
    service.check_generates(request.model)
    model = service.model
    most = longest_prompt(request, service)
    if most is not None and request.num_ids > most:  # before each id is checked
        check_fits(request.num_ids, request.max_output, "prompt", service)
    prompts = request.prompts(model.vocabulary)
    tokenize = partial(tokenize_prompts, model.tokenizer, prompts, most)
    renderer = CompletionRenderer(
        service.header("cmpl", request.model),
        request.usage_options,
        token_formatter(request.report_options, model.tokenizer),
    )
    plan = build_plan(request, tokenize, renderer, caller, service)
    return replace(plan, constraint=request.constraint(), prompt_field="prompt")
