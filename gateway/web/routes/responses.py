"""`/v1/responses`: the stored ones, those in progress and their events."""

from contextlib import suppress
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from engine.errors import InvalidRequest
from gateway.access.callers import Caller
from gateway.errors import ResponseNotFound, StreamNotFound
from gateway.generation.held_streams import event_number, held_stream
from gateway.schema.paging import list_json, read_page
from gateway.service import Service, caller_of, service_of
from gateway.store.responses import Key, Responses

Json = dict[str, Any]
DEFAULT_LISTED, MAX_LISTED = 20, 100


async def compact_response(http: HttpRequest) -> Json:
    """Rejected: only OpenAI's models make the opaque items that replace a conversation."""
    raise InvalidRequest(
        "Compaction is not supported. Send fewer items, or set 'truncation' to 'auto', which "
        "leaves out the oldest."
    )


async def retrieve_response(http: HttpRequest) -> ASGIApp | Json:
    """A stored response, or one in the background as it is now; with `stream`, its events after
    number `starting_after`. Raises `ResponseNotFound`."""
    service, caller = service_of(http), caller_of(http)
    response_id = http.path_params["response_id"]
    if http.query_params.get("stream", "false").lower() not in ("false", "0"):
        return await _events(http)
    with suppress(StreamNotFound):
        group = held_stream(response_id, caller, service).group
        running = service.running.find(response_id, caller.tenant)
        if group is not None and running is not None:
            is_queued = running.snapshot()["status"] == "queued"
            return running.snapshot("in_progress" if is_queued and group.has_started else None)
    return await _find(http)


async def _events(http: HttpRequest) -> ASGIApp:
    """The events of a response in the background."""
    service, caller = service_of(http), caller_of(http)
    text = http.query_params.get("starting_after")
    after = -1 if text is None else event_number(text, "starting_after")
    try:
        stream = held_stream(http.path_params["response_id"], caller, service)
    except StreamNotFound:
        await _find(http)
        raise InvalidRequest(
            "The events of this response are not held: it was made without 'background', or it "
            "ended too long ago. It can be read without 'stream'.",
            "stream",
        ) from None
    return stream.response(caller, after)


async def delete_response(http: HttpRequest) -> Json:
    """Delete a stored response; raises `ResponseNotFound`."""
    service, caller = service_of(http), caller_of(http)
    key = _key(http)
    if await _end_background(key.id, caller, service):
        with suppress(ResponseNotFound):  # it was rejected
            await service.store.responses.delete(key)
    else:
        await service.store.responses.delete(key)
    return {"id": key.id, "object": "response", "deleted": True}


async def _end_background(response_id: str, caller: Caller, service: Service) -> bool:
    """End a response in the background, and forget its events; False if there is none."""
    try:
        stream = held_stream(response_id, caller, service)
    except StreamNotFound:
        return False
    service.store.held.delete(caller.tenant, response_id)
    await stream.forget()
    return True


async def cancel_response(http: HttpRequest) -> Json:
    """End a response in progress.

    Raises `ResponseNotFound`, or `InvalidRequest` for a response that has ended.
    """
    service, caller = service_of(http), caller_of(http)
    response_id = http.path_params["response_id"]
    running = service.running.find(response_id, caller.tenant)
    if running is None or not service.groups.cancel(running.request_id, caller.tenant):
        response = await _find(http)
        status = response["status"]
        if status == "cancelled" and response["background"]:
            return response  # cancelling again has no effect
        raise InvalidRequest(f"This response cannot be cancelled: it is {status}.", "response_id")
    return running.snapshot("cancelled")


async def list_input_items(http: HttpRequest) -> Json:
    """A page of the items of the prompt, newest first by default."""
    return await page_of(http, service_of(http).store.responses, _key(http))


async def page_of(http: HttpRequest, stored: Responses, key: Key) -> Json:
    """The page that the query asks for of the items of that object, newest first by default."""
    page = read_page(http.query_params, default=DEFAULT_LISTED, most=MAX_LISTED)
    items = await stored.page(key, page.after, page.limit + 1, ascending=page.is_ascending)
    shown = items[: page.limit]
    listed = list_json([{"id": item_id} for item_id, _ in shown], has_more=len(items) > page.limit)
    return listed | {"data": [orjson.Fragment(item) for _, item in shown]}


async def _find(http: HttpRequest) -> Json:
    return await service_of(http).store.responses.find(_key(http))


def _key(http: HttpRequest) -> Key:
    service, found = service_of(http), http.path_params["response_id"]
    return Key(found, caller_of(http).tenant, service.unix_now())
