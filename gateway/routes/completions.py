"""`POST /v1/completions`."""

from functools import partial
from typing import TYPE_CHECKING

from gateway.access import read_body
from gateway.prompt import text_prompts
from gateway.routes.generation import answer, usage_wish
from gateway.routes.models import check_model
from gateway.schema.completion_frames import CompletionFrames
from gateway.schema.completions import decode_completion
from gateway.service import service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp


async def create_completion(http: "HttpRequest") -> "ASGIApp":
    """A stream or a whole reply; raises `InvalidRequest` for what cannot be served."""
    service = service_of(http)
    request = decode_completion(await read_body(http, service.limits))
    check_model(request.model, service)
    model = service.model
    read = partial(text_prompts, model.tokenizer, request.prompts(model.vocabulary))
    frames = CompletionFrames(service.header("cmpl"), usage_wish(request))
    return answer(http, request, read, frames, "prompt")
