"""`POST /v1/messages` and `…/count_tokens`: Anthropic's API, which coding agents speak."""

from functools import partial
from typing import TYPE_CHECKING

import orjson

from gateway.access import read_body
from gateway.conversation import write_prompt
from gateway.reply import json_response
from gateway.routes.chat import conversation_of, order_request
from gateway.routes.generation import respond
from gateway.routes.models import check_model
from gateway.schema.anthropic_frames import AnthropicFrames
from gateway.schema.anthropic_request import NAMES, decode_anthropic
from gateway.schema.renaming import in_our_words
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp


async def create_message(http: "HttpRequest") -> "ASGIApp":
    """A stream or a whole reply; raises `InvalidRequest` for what cannot be served."""
    service, caller = service_of(http), caller_of(http)
    request = decode_anthropic(await read_body(http, service.limits))
    check_model(request.model, service)
    frames = AnthropicFrames(
        request.model,
        service.new_id,
        caller.request_id,
        shows_thoughts=request.shows_thoughts,
    )
    order = partial(order_request, request.as_chat(), frames, caller, service)
    return respond(in_our_words(order, NAMES), service)


async def count_tokens(http: "HttpRequest") -> "Response":
    """How long the prompt is; nothing is generated."""
    service, caller = service_of(http), caller_of(http)
    request = decode_anthropic(await read_body(http, service.limits), is_counted=True)
    check_model(request.model, service)
    conversation = in_our_words(partial(conversation_of, request.as_chat()), NAMES)
    written = await write_prompt(service.model, conversation)
    body = orjson.dumps({"input_tokens": len(written.ids)})
    return json_response(body, caller, service.clock)
