"""`POST /v1/chat/completions`."""

from functools import partial
from typing import TYPE_CHECKING

import orjson

from gateway.access.callers import read_body
from gateway.generation.conversation import ChatInput, chat_prompt, write_prompt
from gateway.generation.reply import json_response
from gateway.generation.tool_grammar import tool_constraint
from gateway.ports import ToolChoice
from gateway.schema.openai.chat import ChatRequest, decode_chat
from gateway.schema.openai.chat_renderer import ChatRenderer
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
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from gateway.access.callers import Caller
    from gateway.schema.rendering import ResponseRenderer
    from gateway.service import Service


async def create_chat_completion(http: "HttpRequest") -> "ASGIApp":
    """A stream or a whole reply; raises `InvalidRequest` for what cannot be served."""
    service = service_of(http)
    body = await read_body(http, service.limits)
    return respond(order_chat(body, caller_of(http), service), service)


def order_chat(body: bytes, caller: "Caller", service: "Service") -> PlanOptions:
    """What the body asks for; raises `InvalidRequest` for what cannot be served."""
    request = decode_chat(body)
    check_model(request.model, service)
    frames = ChatRenderer(
        service.header("chatcmpl"),
        request.usage_options,
        logprobs_formatter(request, service),
        service_tier=request.tier,
        is_legacy=request.uses_legacy_functions,
    )
    return order_request(request, frames, caller, service)


def order_request(
    request: ChatRequest,
    frames: "ResponseRenderer",
    caller: "Caller",
    service: "Service",
    param: str = "messages",
) -> PlanOptions:
    """The order of a checked request, whoever tells its answer; `param` has the prompt."""
    held = tool_constraint(request.tool_plan(), request.constraint(), service.model.dialect)
    conversation = conversation_of(request)
    read = partial(chat_prompt, service.model, conversation, service.random.getrandbits)
    return plan_options(request, Endpoint(read, frames, param, held), caller, service)


def conversation_of(request: ChatRequest) -> ChatInput:
    """What the prompt of a checked request is made of."""
    plan = request.tool_plan()
    return ChatInput(
        messages=request.messages,
        tools=[function.as_tool() for function in plan.offered],
        wanted=ToolChoice(plan.names, plan.max_calls),
        is_direct=plan.must_call or request.constraint() is not None,
        variables=request.template_variables,
        own_template=request.chat_template,
        is_answer_due=request.adds_generation_prompt,
        is_continued=bool(request.continue_final_message),
    )


async def render_chat(http: "HttpRequest") -> "Response":
    """The prompt that a chat request becomes, as text and ids; nothing is generated."""
    service = service_of(http)
    request = decode_chat(await read_body(http, service.limits))
    check_model(request.model, service)
    text, ids = await write_prompt(service.model, conversation_of(request))
    told = {
        "object": "chat.completion.prompt",
        "model": request.model,
        "prompt": text,
        "token_ids": ids,
        "count": len(ids),
        "max_model_len": service.engine.scheduler.settings.max_model_len,
    }
    return json_response(orjson.dumps(told), caller_of(http), service.clock)
