"""`POST /v1/chat/completions`."""

from functools import partial
from typing import TYPE_CHECKING

from gateway.access import read_body
from gateway.conversation import Conversation, chat_prompt
from gateway.routes.generation import Ordered, Surface, ordered, respond, usage_wish
from gateway.routes.models import check_model
from gateway.schema.chat import decode_chat
from gateway.schema.chat_frames import ChatFrames
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp

    from gateway.access import Caller
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
    conversation = Conversation(request.messages)
    read = partial(chat_prompt, service.model, conversation, service.random.getrandbits)
    frames = ChatFrames(service.header("chatcmpl"), usage_wish(request), service_tier=request.tier)
    return ordered(request, Surface(read, frames, "messages"), caller, service)
