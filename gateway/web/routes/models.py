"""`GET /v1/models` and `GET /v1/models/{model}`; model ids may contain slashes."""

from typing import TYPE_CHECKING, Any

from gateway.service import Service, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest


async def list_models(http: "HttpRequest") -> dict[str, Any]:
    """The served model, once per name, and its LoRA adapters."""
    service = service_of(http)
    names = (*service.model.names, *service.loras.served)
    return {"object": "list", "data": [_model(service, name) for name in names]}


async def retrieve_model(http: "HttpRequest") -> dict[str, Any]:
    """The served model or a LoRA adapter; raises `ModelNotFound` for any other name."""
    service = service_of(http)
    name = http.path_params["model"]
    service.check_model(name)
    return _model(service, name)


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
