"""`/v1/conversations`: conversations and their items, which responses continue."""

from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from engine.errors import InvalidRequest
from gateway.schema.paging import list_json
from gateway.schema.responses.conversations import (
    conversation_json,
    decode_create,
    decode_items,
    decode_update,
)
from gateway.schema.responses.items import Item, joined
from gateway.service import caller_of, service_of
from gateway.store.conversations import Edit
from gateway.store.responses import ResponseRecord
from gateway.web.decoded_body import decoded_body
from gateway.web.routes.responses import page_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

Json = dict[str, Any]


async def create_conversation(http: "HttpRequest") -> Json:
    """Store a conversation, perhaps with items. Raises `InvalidRequest`."""
    service, caller = service_of(http), caller_of(http)
    read = partial(decode_create, new_id=service.new_id)
    metadata, items = await decoded_body(http, read)
    now, new_id = service.unix_now(), service.new_id("conv_")
    whole = conversation_json(new_id, now, metadata)
    record = ResponseRecord(new_id, caller.tenant, whole, items)
    await service.store.conversations.put(record, now)
    return whole


async def retrieve_conversation(http: "HttpRequest") -> Json:
    """A conversation without its items; raises `ConversationNotFound`."""
    return (await _find(http)).response


async def update_conversation(http: "HttpRequest") -> Json:
    """Replace the metadata; raises `ConversationNotFound`."""
    metadata = await decoded_body(http, decode_update)

    def edit(record: ResponseRecord) -> ResponseRecord:
        return structs.replace(record, response=record.response | {"metadata": metadata})

    return (await _changed(http, edit)).response


async def delete_conversation(http: "HttpRequest") -> Json:
    """Delete a conversation with its items; raises `ConversationNotFound`. Responses that were
    generated for it stay."""
    service, found = service_of(http), http.path_params["conversation_id"]
    conversations, tenant = service.store.conversations, caller_of(http).tenant
    await conversations.delete(found, tenant, service.unix_now())
    return {"id": found, "object": "conversation.deleted", "deleted": True}


async def create_items(http: "HttpRequest") -> Json:
    """Add items; the body has them as they are stored. Raises `InvalidRequest`."""
    new_id = service_of(http).new_id
    items = await decoded_body(http, partial(decode_items, new_id=new_id))

    def edit(record: ResponseRecord) -> ResponseRecord:
        return structs.replace(record, items=joined(record.items, items, new_id))

    record = await _changed(http, edit)
    return list_json(record.items[-len(items) :], has_more=False)


async def list_items(http: "HttpRequest") -> Json:
    """A page of the items, newest first by default; raises `ConversationNotFound`."""
    return await page_of(http, _find)


async def retrieve_item(http: "HttpRequest") -> Json:
    """One item; raises `InvalidRequest` if the conversation has none with this id."""
    return _item(await _find(http), http.path_params["item_id"])


async def delete_item(http: "HttpRequest") -> Json:
    """Delete an item; the conversation is returned. Raises `InvalidRequest`."""
    return (await _changed(http, partial(_without, item_id=http.path_params["item_id"]))).response


def _without(record: ResponseRecord, item_id: str) -> ResponseRecord:
    item = _item(record, item_id)
    return structs.replace(record, items=[each for each in record.items if each is not item])


def _item(record: ResponseRecord, item_id: str) -> Item:
    for item in record.items:
        if item["id"] == item_id:
            return item
    raise InvalidRequest(f"The conversation has no item {item_id[:128]!r}.", "item_id")


async def _find(http: "HttpRequest") -> ResponseRecord:
    service, found = service_of(http), http.path_params["conversation_id"]
    tenant, now = caller_of(http).tenant, service.unix_now()
    return await service.store.conversations.find(found, tenant, now)


async def _changed(http: "HttpRequest", edit: Edit) -> ResponseRecord:
    """The conversation after a change. Raises `ConversationNotFound`, and what `edit` raises."""
    service, found = service_of(http), http.path_params["conversation_id"]
    tenant, now = caller_of(http).tenant, service.unix_now()
    return await service.store.conversations.change(found, tenant, now, edit)
