"""`POST /v1/requests/{request_id}/cancel`: end running requests by the `x-request-id` they have."""

from typing import TYPE_CHECKING

import orjson

from gateway.errors import RequestNotFound
from gateway.generation.reply import json_response
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response


async def cancel(http: "HttpRequest") -> "Response":
    """End all choices of the request at once; whoever reads its answer is told so.

    Raises `RequestNotFound` unless it runs or waits, and belongs to the caller's own key.
    """
    service, caller = service_of(http), caller_of(http)
    request_id = http.path_params["request_id"]
    num_choices = service.engine.cancel(request_id, caller.tenant)
    if not num_choices:
        raise RequestNotFound(request_id)
    told = {
        "id": request_id,
        "object": "request.cancelled",
        "cancelled": True,
        "num_choices": num_choices,
    }
    return json_response(orjson.dumps(told), caller, service.clock)
