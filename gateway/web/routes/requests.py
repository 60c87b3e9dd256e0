"""`/v1/requests/{request_id}`: cancel a running request, or show its timeline.

The id is the `x-request-id` of the request's response.
"""

from typing import TYPE_CHECKING, Any

from gateway.errors import RequestNotFound
from gateway.observe.explanation import explain, prefix_json
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest


async def cancel(http: "HttpRequest") -> dict[str, Any]:
    """End all choices of the request at once; its response ends with a `RequestCancelled` error.

    Raises `RequestNotFound` unless it runs or waits and belongs to the caller's API key; an admin
    key may cancel requests of every key.
    """
    service, caller = service_of(http), caller_of(http)
    request_id = http.path_params["request_id"]
    num_choices = service.groups.cancel(request_id, None if caller.is_admin else caller.tenant)
    if not num_choices:
        raise RequestNotFound(request_id)
    return {
        "id": request_id,
        "object": "request.cancelled",
        "cancelled": True,
        "num_choices": num_choices,
    }


async def timeline(http: "HttpRequest") -> dict[str, Any]:
    """The phases of the request's choices, and one sentence about what cost it the most time.

    Seconds are relative to a choice's arrival. Raises `RequestNotFound` for a request of another
    API key, and for one that is unknown or ended too long ago.
    """
    service, caller = service_of(http), caller_of(http)
    request_id, now = http.path_params["request_id"], service.clock()
    for serving in service.groups.loaded:
        if timelines := serving.timelines.find(request_id, caller.tenant):
            break
    else:
        raise RequestNotFound(request_id)
    arrived = min(each.request.arrived_at for each in timelines)
    waits = serving.timelines.reader_waits.of(request_id)
    choices = [
        {
            "index": index,
            "state": each.request.state.value,
            "ended": each.request.state.is_terminal,
            "prompt_tokens": each.request.prompt_len,
            "cached_tokens": each.request.num_cached,
            "completion_tokens": each.request.produced,
            "prefix": prefix_json(each, serving.timelines),
            "prefill_pieces": len(each.pieces),
            "worker_restarts": each.num_restarts,
            "spans": [span._asdict() for span in each.spans(now)],
        }
        for index, each in enumerate(timelines)
    ]
    return {
        "id": request_id,
        "object": "request.timeline",
        "explanation": explain(timelines, request_id, serving.timelines, now),
        "reader_wait_seconds": sum(wait.seconds for wait in waits),
        "reader_waits": [
            {"start": wait.began - arrived, "seconds": wait.seconds} for wait in waits
        ],
        "choices": choices,
    }
