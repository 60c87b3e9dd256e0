"""`/v1/requests/{request_id}`: cancel a running request, or show its timeline.

The id is the `x-request-id` of the request's response.
"""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest

from engine.errors import InvalidRequest
from gateway.errors import RequestNotFound
from gateway.groups.group import Serving
from gateway.observe.explanation import explain, report_of, spans_of
from gateway.observe.timelines import KEEP
from gateway.service import caller_of, service_of

MAX_NAMED = 4  # ids that an error lists


async def cancel(http: HttpRequest) -> dict[str, Any]:
    """End all choices of the request at once; its response ends with a `RequestCancelled` error.

    Raises `RequestNotFound` unless it runs or waits and belongs to the caller's API key; an admin
    key may cancel requests of every key.
    """
    service, caller = service_of(http), caller_of(http)
    request_id = http.path_params["request_id"]
    num_choices = service.groups.cancel(request_id, None if caller.key.is_admin else caller.tenant)
    if not num_choices:
        raise RequestNotFound(request_id)
    return {
        "id": request_id,
        "object": "request.cancelled",
        "cancelled": True,
        "num_choices": num_choices,
    }


async def timeline(http: HttpRequest) -> dict[str, Any]:
    """The phases of the request's choices, and one sentence about what cost it the most time.

    The id may be shortened to its first characters. Seconds are relative to a choice's arrival.
    Raises `RequestNotFound` for a request of another API key, and for one that is unknown or ended
    too long ago; `InvalidRequest` for a beginning of several ids.
    """
    service, caller = service_of(http), caller_of(http)
    given, now = http.path_params["request_id"], service.clock()
    serving, request_id = _found(given, service.groups.loaded, caller.tenant)
    timelines = serving.timelines.find(request_id, caller.tenant)
    arrived = min(each.request.times.arrived_at for each in timelines)
    waits = serving.timelines.reader_waits.of(request_id)
    choices = [
        {
            "index": index,
            "state": each.request.state.value,
            "ended": each.request.state.is_terminal,
            "prompt_tokens": each.request.prompt_len,
            "cached_tokens": each.request.num_cached,
            "completion_tokens": each.request.produced,
            "prefix": (prefix := report_of(each, serving.timelines)) and prefix.as_json(),
            "prefill_pieces": len(each.pieces),
            "worker_restarts": each.num_restarts,
            "spans": [span._asdict() for span in spans_of(each, now)],
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


def _found(given: str, loaded: Sequence[Serving], tenant: str) -> tuple[Serving, str]:
    """The model that has or had the request whose id begins with `given`, and its whole id."""
    ids = {
        request_id: serving
        for serving in loaded
        for request_id in serving.timelines.labels(given, tenant)
    }
    if given in ids or len(ids) == 1:
        request_id = given if given in ids else min(ids)
        return ids[request_id], request_id
    if not ids:
        raise RequestNotFound(given, num_ended=KEEP)
    shown = ", ".join(sorted(ids)[:MAX_NAMED]) + (", …" if len(ids) > MAX_NAMED else "")
    raise InvalidRequest(f"The ids of several requests begin with {given[:128]!r}: {shown}.")
