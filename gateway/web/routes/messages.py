"""`POST /v1/messages` and `…/count_tokens`: Anthropic's API, which coding agents use."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request as HttpRequest

from gateway.access.bodies import read_body
from gateway.access.callers import Caller
from gateway.generation.conversation import render_prompt
from gateway.generation.image_prompt import ImageOrigin
from gateway.generation.plan import GenerationPlan, plan_chat
from gateway.generation.threads import read_body_with
from gateway.schema.anthropic.renderer import MessagesRenderer
from gateway.schema.anthropic.request import NAMES, decode_anthropic
from gateway.schema.field_names import renamed_fields
from gateway.schema.openai.chat import ChatRequest
from gateway.service import Service, caller_of, service_of


def plan_message(body: bytes, caller: Caller, service: Service) -> GenerationPlan:
    """The plan of a request body; raises `InvalidRequest` for what cannot be served."""
    request = decode_anthropic(body, caller.unknown_fields)
    service.check_generates(request.model)
    renderer = MessagesRenderer(
        request.model,
        service.new_id,
        caller.request_id,
        shows_reasoning=request.shows_reasoning,
        counts_writes=request.has_breakpoints,
    )
    with renamed_fields(NAMES):
        plan = plan_chat(
            request.as_chat(), renderer, caller, service, image_fields=request.image_fields
        )
    constraint = None if plan.constraint is None else plan.constraint.renamed(NAMES)
    return replace(plan, constraint=constraint)


async def count_tokens(http: HttpRequest) -> dict[str, int]:
    """The number of tokens of a prompt; nothing is generated."""
    service, caller = service_of(http), caller_of(http)
    body = await read_body(http, service.limits)
    request, fields = await read_body_with(partial(_counted, body, caller, service), body)
    with renamed_fields(NAMES):
        rendered = await render_prompt(
            service.model, request, ImageOrigin(service.image_sender(caller), fields)
        )
    return {"input_tokens": len(rendered.ids)}


def _counted(body: bytes, caller: Caller, service: Service) -> tuple[ChatRequest, Sequence[str]]:
    """The chat request whose prompt is counted, and the paths of its images."""
    request = decode_anthropic(body, caller.unknown_fields, is_count_only=True)
    service.check_generates(request.model)
    with renamed_fields(NAMES):
        return request.as_chat(), request.image_fields
