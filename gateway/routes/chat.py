"""`POST /v1/chat/completions`."""

from functools import partial
from typing import TYPE_CHECKING

from gateway.access import read_body
from gateway.answer import Limits, Order
from gateway.prompt import chat_prompt
from gateway.reply import Reply
from gateway.routes.models import check_model
from gateway.schema.chat import decode_chat
from gateway.schema.frames import ChatFrames
from gateway.service import caller_of, service_of
from gateway.sse import EventStream

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp


async def create_chat_completion(http: "HttpRequest") -> "ASGIApp":
    """A stream or a whole reply; raises `InvalidRequest` for what cannot be served."""
    service = service_of(http)
    request = decode_chat(await read_body(http, service.limits))
    check_model(request.model, service)
    model = service.model
    order = Order(
        caller=caller_of(http),
        tokenise=partial(chat_prompt, model.tokenizer, model.template, request.messages),
        sampling=request.sampling(model.vocabulary, service.seed()),
        limits=Limits(request.max_output, request.min_tokens or 0),
        end_ids=request.end_ids(model.vocabulary),
        stops=request.stops,
        wishes=request.wishes,
        num_choices=request.num_choices,
        include_usage=request.include_usage,
        param="messages",
        frames=ChatFrames(
            service.header("chatcmpl"),
            with_usage=request.include_usage,
            service_tier=request.tier,
        ),
    )
    return EventStream(order, service) if request.stream else Reply(order, service)
