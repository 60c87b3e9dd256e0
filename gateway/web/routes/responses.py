"""`/v1/responses`: answers as items, kept so that the next turn need not repeat them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from engine.errors import ContextTooLong, InvalidRequest
from gateway.access.callers import read_body
from gateway.errors import ResponseNotFound
from gateway.generation.active import ActiveResponse
from gateway.generation.reply import json_response
from gateway.schema.field_names import with_renamed_fields
from gateway.schema.paging import list_json, read_page
from gateway.schema.responses.items import Item, stored_items
from gateway.schema.responses.renderer import ResponsesRenderer
from gateway.schema.responses.request import NAMES, ResponseRequest, decode_response, response_head
from gateway.service import caller_of, service_of
from gateway.store.responses import ResponseRecord
from gateway.web.routes.chat import order_request
from gateway.web.routes.generation import PlanOptions, logprobs_formatter, respond
from gateway.web.routes.models import check_model

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from gateway.access.callers import Caller
    from gateway.generation.prompt import TokenizedPrompts
    from gateway.service import Service

DEFAULT_LISTED, MAX_LISTED = 20, 100


async def create_response(http: "HttpRequest") -> "ASGIApp":
    """A stream or a whole reply; raises `InvalidRequest` for what cannot be served."""
    service, caller = service_of(http), caller_of(http)
    body = await read_body(http, service.limits)
    ordered = await order_response(body, caller, service)
    return _Known(ordered, service)


async def order_response(body: bytes, caller: "Caller", service: "Service") -> PlanOptions:
    """What the body asks for; raises `InvalidRequest` for what cannot be served."""
    request = decode_response(body)
    check_model(request.model, service)
    assert request.input is not None, "checked"
    items = stored_items(request.input, service.new_id)
    if request.previous_response_id is not None:
        items = await _turns_before(request.previous_response_id, caller, service) + items
    return _ordered(request, items, caller, service)


def _ordered(
    request: ResponseRequest, items: list[Item], caller: "Caller", service: "Service"
) -> PlanOptions:
    chat = request.as_chat(items)
    head = response_head(request, service.new_id("resp_"), service.unix_now())
    frames = ResponsesRenderer(
        head, service.new_id, service.unix_now, logprobs_formatter(chat, service)
    )
    ordered = with_renamed_fields(
        partial(order_request, chat, frames, caller, service, param="input"), NAMES
    )
    order = ordered.order
    if request.truncation == "auto":
        order = replace(order, read=partial(_read_what_fits, request, items, ordered, service))
    if request.is_stored:
        order = replace(order, seal=partial(_keep, frames, items, caller, service))
    return PlanOptions(order, ordered.is_stream)


async def _turns_before(response_id: str, caller: "Caller", service: "Service") -> list[Item]:
    responses = service.store.responses
    try:
        record = await responses.find(response_id, caller.tenant, service.unix_now())
    except ResponseNotFound as error:
        raise ResponseNotFound(response_id, "previous_response_id") from error
    return record.turns


async def _read_what_fits(
    request: ResponseRequest, items: list[Item], ordered: PlanOptions, service: "Service"
) -> "TokenizedPrompts":
    """The prompt without the oldest turns, as few as it takes."""
    order, cuts = ordered.order, list(_cuts(items))

    async def read(place: int) -> "TokenizedPrompts":
        chat = request.as_chat(cuts[place])
        shorter = order_request(chat, order.frames, order.caller, service, param="input")
        return await shorter.order.read()

    def fits(reading: "TokenizedPrompts") -> bool:
        return _fits(order.limits.max_tokens, len(reading.prompts[0]), service)

    best = await order.read()
    low, high = (len(cuts), 0) if fits(best) else (1, len(cuts) - 1)
    while low <= high:
        middle = (low + high) // 2
        reading = await read(middle)
        if fits(reading):
            best, high = reading, middle - 1
        else:
            low = middle + 1
    return best  # if nothing fits, its length is refused where all lengths are


def _cuts(items: Sequence[Item]) -> Iterator[list[Item]]:
    """All items, then ever fewer: always from a message of the user on, rules always."""
    yield list(items)
    for start, item in enumerate(items):
        if start and item.get("role") == "user":
            rules = [i for i in items[:start] if i.get("role") in ("system", "developer")]
            yield [*rules, *items[start:]]


def _fits(max_tokens: int | None, prompt_len: int, service: "Service") -> bool:
    try:
        service.engine.check_fits(prompt_len, max_tokens or 1)
    except ContextTooLong:
        return False
    return True


async def _keep(
    frames: ResponsesRenderer, items: list[Item], caller: "Caller", service: "Service"
) -> None:
    record = ResponseRecord(frames.response_id, caller.tenant, frames.snapshot(), items)
    await service.store.responses.put(record, service.unix_now())


class _Known:
    """The ASGI response of an order, which can be cancelled by its response's id meanwhile."""

    def __init__(self, ordered: PlanOptions, service: "Service") -> None:
        self._ordered = ordered
        self._service = service

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        order = self._ordered.order
        assert isinstance(order.frames, ResponsesRenderer), "made here"
        with self._service.running.hold(ActiveResponse(order.caller, order.frames)):
            await respond(self._ordered, self._service)(scope, receive, send)


async def retrieve_response(http: "HttpRequest") -> "Response":
    """A response that was kept; raises `ResponseNotFound`."""
    if http.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise InvalidRequest("'stream' is not supported here: the events were told once.", "stream")
    record = await _find(http)
    return _told(http, record.response)


async def delete_response(http: "HttpRequest") -> "Response":
    """Forget a response; raises `ResponseNotFound`."""
    service, caller = service_of(http), caller_of(http)
    response_id = http.path_params["response_id"]
    await service.store.responses.delete(response_id, caller.tenant, service.unix_now())
    return _told(http, {"id": response_id, "object": "response", "deleted": True})


async def cancel_response(http: "HttpRequest") -> "Response":
    """End a response that is being made; raises `ResponseNotFound`, and `InvalidRequest` for one
    that is complete."""
    service, caller = service_of(http), caller_of(http)
    response_id = http.path_params["response_id"]
    made = service.running.find(response_id, caller.tenant)
    if made is None or not service.engine.cancel(made.caller.request_id, caller.tenant):
        record = await _find(http)
        status = record.response["status"]
        raise InvalidRequest(f"This response cannot be cancelled: it is {status}.", "response_id")
    return _told(http, made.frames.snapshot("cancelled"))


async def list_input_items(http: "HttpRequest") -> "Response":
    """A page of the items that the model saw, the newest first unless asked otherwise."""
    page = read_page(http.query_params, default=DEFAULT_LISTED, most=MAX_LISTED)
    record = await _find(http)
    items = record.items if page.is_ascending else record.items[::-1]
    if page.after is not None:
        places = [i for i, item in enumerate(items) if item["id"] == page.after]
        if not places:
            raise InvalidRequest(f"Invalid 'after': no item {page.after[:100]!r}.", "after")
        items = items[places[0] + 1 :]
    return _told(http, list_json(items[: page.limit], has_more=len(items) > page.limit))


async def _find(http: "HttpRequest") -> ResponseRecord:
    service, caller = service_of(http), caller_of(http)
    response_id = http.path_params["response_id"]
    return await service.store.responses.find(response_id, caller.tenant, service.unix_now())


def _told(http: "HttpRequest", told: dict[str, Any]) -> "Response":
    return json_response(orjson.dumps(told), caller_of(http), service_of(http).clock)
