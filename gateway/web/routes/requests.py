"""`POST /v1/requests/{request_id}/cancel`: end running requests by their `x-request-id`."""

from typing import TYPE_CHECKING

import orjson

from gateway.errors import RequestNotFound
from gateway.generation.reply import json_response
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response


async def cancel(http: "HttpRequest") -> "Response":
    """End all choices of the request at once; its response ends with a `RequestCancelled` error.

    Raises `RequestNotFound` unless it runs or waits and belongs to the caller's API key.
    """
    service, caller = service_of(http), caller_of(http)
    request_id = http.path_params["request_id"]
    num_choices = service.engine.cancel(request_id, caller.tenant)
    if not num_choices:
        raise RequestNotFound(request_id)
    body = {
        "id": request_id,
        "object": "request.cancelled",
        "cancelled": True,
        "num_choices": num_choices,
    }
    return json_response(orjson.dumps(body), caller, service.clock)
