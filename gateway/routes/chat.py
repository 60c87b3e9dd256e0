"""`POST /v1/chat/completions`."""

from functools import partial
from typing import TYPE_CHECKING

import orjson

from gateway.access import read_body
from gateway.conversation import Conversation, chat_prompt, write_prompt
from gateway.holding import hold
from gateway.ports import WantedCalls
from gateway.reply import json_response
from gateway.routes.generation import Ordered, Surface, ordered, respond, spelling
from gateway.routes.models import check_model
from gateway.schema.chat import ChatRequest, decode_chat
from gateway.schema.chat_frames import ChatFrames
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from gateway.access import Caller
    from gateway.schema.frames import Frames
    from gateway.service import Service


async def create_chat_completion(http: "HttpRequest") -> "ASGIApp":
    """A stream or a whole reply; raises `InvalidRequest` for what cannot be served."""
    service = service_of(http)
    body = await read_body(http, service.limits)
    return respond(order_chat(body, caller_of(http), service), service)


def order_chat(body: bytes, caller: "Caller", service: "Service") -> Ordered:
    """What the body asks for; raises `InvalidRequest` for what cannot be served."""
    request = decode_chat(body)
    check_model(request.model, service)
    frames = ChatFrames(
        service.header("chatcmpl"),
        request.usage_wish,
        spelling(request, service),
        service_tier=request.tier,
        is_old=request.has_functions,
    )
    return order_request(request, frames, caller, service)


def order_request(
    request: ChatRequest,
    frames: "Frames",
    caller: "Caller",
    service: "Service",
    param: str = "messages",
) -> Ordered:
    """The order of a checked request, whoever tells its answer; `param` has the prompt."""
    held = hold(request.tool_plan(), request.held(), service.model.dialect)
    conversation = conversation_of(request)
    read = partial(chat_prompt, service.model, conversation, service.random.getrandbits)
    return ordered(request, Surface(read, frames, param, held), caller, service)


def conversation_of(request: ChatRequest) -> Conversation:
    """What the prompt of a checked request is made of."""
    plan = request.tool_plan()
    return Conversation(
        messages=request.messages,
        tools=[function.as_tool() for function in plan.offered],
        wanted=WantedCalls(plan.names, plan.max_calls),
        is_direct=plan.must_call or request.held() is not None,
        variables=request.variables,
        own_template=request.chat_template,
        is_answer_due=request.is_answer_due,
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
