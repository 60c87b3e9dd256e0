"""`POST /v1/chat/completions`."""

from functools import partial
from typing import TYPE_CHECKING

from gateway.access import read_body
from gateway.prompt import chat_prompt
from gateway.routes.generation import answer, usage_wish
from gateway.routes.models import check_model
from gateway.schema.chat import decode_chat
from gateway.schema.chat_frames import ChatFrames
from gateway.service import service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp


async def create_chat_completion(http: "HttpRequest") -> "ASGIApp":
    """A stream or a whole reply; raises `InvalidRequest` for what cannot be served."""
    service = service_of(http)
    request = decode_chat(await read_body(http, service.limits))
    check_model(request.model, service)
    model = service.model
    read = partial(chat_prompt, model.tokenizer, model.template, request.messages)
    frames = ChatFrames(service.header("chatcmpl"), usage_wish(request), service_tier=request.tier)
    return answer(http, request, read, frames, "messages")
