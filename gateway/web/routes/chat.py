"""`POST /v1/chat/completions` and `…/render`."""

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest

from gateway.access.callers import Caller
from gateway.generation.conversation import render_prompt
from gateway.generation.image_prompt import ImageOrigin
from gateway.generation.plan import GenerationPlan, plan_chat
from gateway.schema.openai.chat import decode_chat
from gateway.schema.openai.renderers import ChatRenderer, token_formatter
from gateway.service import Service, caller_of, service_of
from gateway.web.route import decoded_body


def plan_chat_completion(body: bytes, caller: Caller, service: Service) -> GenerationPlan:
    """The plan of a request body; raises `InvalidRequest` for what cannot be served."""
    request = decode_chat(body, caller.unknown_fields)
    service.check_generates(request.model)
    model = service.model
    renderer = ChatRenderer(
        service.header("chatcmpl", request.model),
        request.usage_options,
        token_formatter(request.report_options, model.tokenizer),
        service_tier=request.tier,
        is_legacy=request.uses_legacy_functions,
    )
    return plan_chat(request, renderer, caller, service)


async def render_chat(http: HttpRequest) -> dict[str, Any]:
    """The prompt of a chat request as text and ids; nothing is generated."""
    service, caller = service_of(http), caller_of(http)
    request = await decoded_body(http, partial(decode_chat, unknown=caller.unknown_fields))
    service.check_generates(request.model)
    origin = ImageOrigin(service.image_sender(caller))
    text, ids, *_ = await render_prompt(service.model, request, origin)
    return {
        "object": "chat.completion.prompt",
        "model": request.model,
        "prompt": text,
        "token_ids": ids,
        "count": len(ids),
        "max_model_len": service.engine.scheduler.max_request_len,
    }
