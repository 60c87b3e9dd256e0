"""`GET /v1/models` and `GET /v1/models/{model}`; model ids may contain slashes. `/models`,
`/models/load`, `/models/unload` and `/models/sse` are llama.cpp's."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse

from gateway.errors import UnsupportedByModel
from gateway.generation.event_stream import EVENT_HEADERS
from gateway.groups.group import Group
from gateway.groups.groups import Change
from gateway.schema.decoding import decode
from gateway.schema.rendering import END, PING
from gateway.service import Service, service_of
from gateway.web.route import decoded_body


async def model_events(http: HttpRequest) -> StreamingResponse:
    """Server-sent events until the client leaves or the server shuts down."""
    return StreamingResponse(_events(service_of(http)), headers=EVENT_HEADERS)


async def _events(service: Service) -> AsyncIterator[bytes]:
    """`model_status` for each model, then `status_change` for each change; a ping if there is none
    for a while."""
    with service.groups.changes.watch() as changes:
        for group in service.groups:
            yield _event("model_status", Change(group.name, group.status))
        while not service.groups.changes.is_ended:
            try:
                async with asyncio.timeout(service.pace.ping):
                    change = await changes.get()
            except TimeoutError:
                yield PING
                continue
            if change is None:
                return
            yield _event("status_change", change)


def _event(kind: str, change: Change) -> bytes:
    fields = {"model": change.name, "event": kind, "data": {"status": change.status.value}}
    return b"data: " + orjson.dumps(fields) + END


class ModelAction(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `/models/load` and `/models/unload`: the name of the model."""

    model: str


async def list_models(http: HttpRequest) -> dict[str, Any]:
    """The models of the server, once per name, and their LoRA adapters."""
    groups = service_of(http).groups
    data = [_model(group, name) for group in groups for name in group.names]
    return {"object": "list", "data": data}


async def retrieve_model(http: HttpRequest) -> dict[str, Any]:
    """A served model or a LoRA adapter; raises `ModelNotFound` for any other name."""
    name = http.path_params["model"]
    return _model(service_of(http).groups.find(name), name)


async def load_model(http: HttpRequest) -> dict[str, Any]:
    """Begin to load a model, if it is not loaded; `/v1/models` says when it is. Raises
    `ModelNotFound`."""
    service = service_of(http)
    action = await decoded_body(http, partial(decode, ModelAction))
    group = service.groups.find(action.model)
    if not group.accepts:
        service.groups.loads.begin(group)
    return {"success": True}


async def unload_model(http: HttpRequest) -> dict[str, Any]:
    """Unload a model once its running requests have ended; a later request loads it again. Raises
    `ModelNotFound`, and `UnsupportedByModel` if it is the only one."""
    service = service_of(http)
    action = await decoded_body(http, partial(decode, ModelAction))
    group = service.groups.find(action.model)
    if service.groups.are_fixed:
        raise UnsupportedByModel(
            f"The model {action.model!r} is the only one of this server, and stays loaded; "
            "--idle-unload unloads it while it has no requests.",
            "model",
        )
    service.groups.begin_unload(group)
    return {"success": True}


def _model(group: Group, name: str) -> dict[str, Any]:
    """The fields are vLLM's: the `root` of an adapter is its directory, and its `parent` the base
    model; and llama.cpp's `status`. What is known only of a loaded model is null otherwise."""
    fields = {"id": name, "object": "model", "owned_by": "podway", "status": _status(group)}
    if (serving := group.loaded) is None:
        is_lora = name in group.deployment.loras
        return fields | {
            "created": group.deployment.created,
            "task": None,
            "root": None if is_lora else group.name,
            "parent": group.name if is_lora else None,
            "max_model_len": None,
        }
    model, lora = serving.model, serving.loras.served.get(name)
    return fields | {
        "created": model.created if lora is None else lora.created,
        "task": "generate" if model.pooling is None else model.pooling.task,
        "root": model.name if lora is None else lora.path,
        "parent": None if lora is None else model.name,
        "max_model_len": serving.engine.scheduler.max_request_len,
    }


def _status(group: Group) -> dict[str, Any]:
    status: dict[str, Any] = {"value": group.status.value}
    return status | {"error": group.error} if group.error else status
