"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`: vLLM's bodies, for admin keys."""

from functools import partial
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import PlainTextResponse

from engine.errors import InvalidRequest
from gateway.schema.decoding import decode
from gateway.service import service_of
from gateway.web.decoded_body import decoded_body

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response


class LoadLoraRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a load: a directory of PEFT files on the workers' machines. With `load_inplace`
    it replaces the adapter of this name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None  # ignored, as in vLLM


class UnloadLoraRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of an unload. `lora_int_id` is ignored: the name identifies the adapter."""

    lora_name: str
    lora_int_id: int | None = None


async def load_lora(http: "HttpRequest") -> "Response":
    """Load an adapter; its name is a model name when this returns. Raises `InvalidRequest`."""
    service = service_of(http)
    request = await decoded_body(http, partial(decode, LoadLoraRequest))
    if not request.lora_path:
        raise InvalidRequest("'lora_path' is empty.", "lora_path")
    now = service.unix_now()
    await service.loras.load(
        request.lora_name, request.lora_path, now, replaces=request.load_inplace
    )
    return _success(f"LoRA adapter '{request.lora_name}' added successfully.")


async def unload_lora(http: "HttpRequest") -> "Response":
    """Unload an adapter: its name is unknown at once; this returns when its last request has ended
    and its memory is free. Raises `LoraNotFound`."""
    service = service_of(http)
    request = await decoded_body(http, partial(decode, UnloadLoraRequest))
    await service.loras.unload(request.lora_name)
    return _success(f"LoRA adapter '{request.lora_name}' removed successfully.")


def _success(message: str) -> "Response":
    return PlainTextResponse(f"Success: {message}")
