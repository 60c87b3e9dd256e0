"""`POST /v1/chat/completions`, and the plan of a chat request for every endpoint that makes one."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import orjson

from gateway.access.callers import read_body
from gateway.generation.conversation import render_prompt, tokenize_chat
from gateway.generation.plan import GenerationPlan, build_plan
from gateway.generation.reply import json_response
from gateway.generation.tool_grammar import tool_constraint
from gateway.schema.openai.chat import ChatRequest, decode_chat
from gateway.schema.openai.chat_renderer import ChatRenderer
from gateway.service import caller_of, service_of
from gateway.web.routes.generation import logprobs_formatter, respond
from gateway.web.routes.models import check_model

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from gateway.access.callers import Caller
    from gateway.schema.rendering import ResponseRenderer
    from gateway.service import Service


async def create_chat_completion(http: "HttpRequest") -> "ASGIApp":
    """An event stream or a JSON body; raises `InvalidRequest` for what cannot be served."""
    service = service_of(http)
    body = await read_body(http, service.limits)
    return respond(plan_chat_completion(body, caller_of(http), service), service)


def plan_chat_completion(body: bytes, caller: "Caller", service: "Service") -> GenerationPlan:
    """The plan of a request body; raises `InvalidRequest` for what cannot be served."""
    request = decode_chat(body)
    check_model(request.model, service)
    renderer = ChatRenderer(
        service.header("chatcmpl"),
        request.usage_options,
        logprobs_formatter(request, service),
        service_tier=request.tier,
        is_legacy=request.uses_legacy_functions,
    )
    return plan_chat(request, renderer, caller, service)


def plan_chat(
    request: ChatRequest, renderer: "ResponseRenderer", caller: "Caller", service: "Service"
) -> GenerationPlan:
    """The plan of a checked chat request, whichever endpoint it came from."""
    model, tools, requested = service.model, request.tool_plan(), request.constraint()
    tokenize = partial(
        tokenize_chat,
        model,
        request,
        tools,
        service.random.getrandbits,
        skips_reasoning=tools.must_call or requested is not None,
    )
    plan = build_plan(request, tokenize, renderer, caller, service)
    return replace(plan, constraint=tool_constraint(tools, requested, model.dialect))


async def render_chat(http: "HttpRequest") -> "Response":
    """The prompt of a chat request as text and ids; nothing is generated."""
    service = service_of(http)
    request = decode_chat(await read_body(http, service.limits))
    check_model(request.model, service)
    text, ids = await render_prompt(service.model, request)
    body = {
        "object": "chat.completion.prompt",
        "model": request.model,
        "prompt": text,
        "token_ids": ids,
        "count": len(ids),
        "max_model_len": service.engine.scheduler.settings.max_model_len,
    }
    return json_response(orjson.dumps(body), caller_of(http), service.clock)
