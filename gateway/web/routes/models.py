"""`GET /v1/models` and `GET /v1/models/{model}`; model ids may contain slashes."""

from typing import TYPE_CHECKING, Any

import orjson

from gateway.generation.reply import json_response
from gateway.service import Service, caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response


async def list_models(http: "HttpRequest") -> "Response":
    """The served model, once per name, and its LoRA adapters."""
    service = service_of(http)
    names = (*service.model.names, *service.loras.served)
    body = {"object": "list", "data": [_model(service, name) for name in names]}
    return json_response(orjson.dumps(body), caller_of(http), service.clock)


async def retrieve_model(http: "HttpRequest") -> "Response":
    """The served model or a LoRA adapter; raises `ModelNotFound` for any other name."""
    service = service_of(http)
    name = http.path_params["model"]
    service.check_model(name)
    return json_response(orjson.dumps(_model(service, name)), caller_of(http), service.clock)


def _model(service: Service, name: str) -> dict[str, Any]:
    """The fields are vLLM's: the `root` of an adapter is its directory, and its `parent` the base
    model."""
    model, lora = service.model, service.loras.served.get(name)
    return {
        "id": name,
        "object": "model",
        "created": model.created if lora is None else lora.created,
        "owned_by": "podway",
        "task": "generate" if service.model.pooling is None else service.model.pooling.task,
        "root": model.name if lora is None else lora.path,
        "parent": None if lora is None else model.name,
        "max_model_len": service.engine.scheduler.settings.max_model_len,
    }
