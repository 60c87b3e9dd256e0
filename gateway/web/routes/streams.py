"""`/v1/stream` and `/v1/streams`: streams that were begun with the header `x-conversation-id`."""

from itertools import islice
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from engine.errors import InvalidRequest
from gateway.generation.held_stream import EndedStream, HeldResponse
from gateway.generation.held_streams import FormerServer, event_number, held_stream, last_event
from gateway.service import caller_of, service_of

Json = dict[str, Any]
MAX_LISTED = 500


async def read_stream(http: HttpRequest) -> ASGIApp:
    """The events after the one that `last-event-id` names, or from the byte `from` on. Raises
    `StreamNotFound`."""
    service, caller = service_of(http), caller_of(http)
    stream = held_stream(http.path_params["name"], caller, service)
    after, start = last_event(http.scope), http.query_params.get("from")
    if start is None:
        return stream.response(caller, -1 if after is None else after)
    if after is not None:
        raise InvalidRequest("Send 'from' or 'last-event-id', not both.", "from")
    return HeldResponse(stream, service, caller, offset=event_number(start, "from"))


async def list_streams(http: HttpRequest) -> Json:
    """The caller's newest streams, or the one that the query `conversation_id` names. Those that
    run in a former server are older than all others. Raises `Unavailable`."""
    former: FormerServer | None = http.scope.get("podway.former")
    before = [] if former is None else await former.streams()
    service, caller = service_of(http), caller_of(http)
    wanted = http.query_params.get("conversation_id")
    streams = service.store.held.named(caller.tenant)
    newest = list(islice(reversed(streams.items()), MAX_LISTED))[::-1]
    listed = newest if wanted is None else [(wanted, streams.get(wanted))]
    data = [_as_json(name, stream) for name, stream in listed if isinstance(stream, EndedStream)]
    older = [each for each in before if each["id"] not in streams]
    return {"object": "list", "data": [*older, *data][-MAX_LISTED:]}


async def delete_stream(http: HttpRequest) -> Json:
    """End a stream, if it still runs, and forget its events. Raises `StreamNotFound`."""
    service, caller = service_of(http), caller_of(http)
    name = http.path_params["name"]
    service.store.held.delete(caller.tenant, name)
    return {"id": name, "object": "stream", "deleted": True}


def _as_json(name: str, stream: EndedStream) -> Json:
    ring = stream.ring
    return {
        "id": name,
        "object": "stream",
        "conversation_id": name,
        "created_at": stream.created_at,
        "status": "completed" if ring.is_complete else "in_progress",
        "oldest_event": ring.oldest,
        "num_events": ring.num_events,
        "num_bytes": ring.end,
    }
