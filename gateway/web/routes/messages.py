"""`POST /v1/messages` and `…/count_tokens`: Anthropic's API, which coding agents speak."""

from functools import partial
from typing import TYPE_CHECKING

import orjson

from gateway.access.callers import read_body
from gateway.generation.conversation import write_prompt
from gateway.generation.reply import json_response
from gateway.schema.anthropic.renderer import MessagesRenderer
from gateway.schema.anthropic.request import NAMES, decode_anthropic
from gateway.schema.field_names import with_renamed_fields
from gateway.service import caller_of, service_of
from gateway.web.routes.chat import conversation_of, order_request
from gateway.web.routes.generation import respond
from gateway.web.routes.models import check_model

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp


async def create_message(http: "HttpRequest") -> "ASGIApp":
    """A stream or a whole reply; raises `InvalidRequest` for what cannot be served."""
    service, caller = service_of(http), caller_of(http)
    request = decode_anthropic(await read_body(http, service.limits))
    check_model(request.model, service)
    frames = MessagesRenderer(
        request.model,
        service.new_id,
        caller.request_id,
        shows_reasoning=request.shows_reasoning,
    )
    order = partial(order_request, request.as_chat(), frames, caller, service)
    return respond(with_renamed_fields(order, NAMES), service)


async def count_tokens(http: "HttpRequest") -> "Response":
    """How long the prompt is; nothing is generated."""
    service, caller = service_of(http), caller_of(http)
    request = decode_anthropic(await read_body(http, service.limits), is_count_only=True)
    check_model(request.model, service)
    conversation = with_renamed_fields(partial(conversation_of, request.as_chat()), NAMES)
    written = await write_prompt(service.model, conversation)
    body = orjson.dumps({"input_tokens": len(written.ids)})
    return json_response(body, caller, service.clock)
