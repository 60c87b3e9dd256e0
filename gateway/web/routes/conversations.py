"""`/v1/conversations`: conversations and their items, which responses continue."""

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest

from gateway.schema.paging import list_json
from gateway.schema.responses.conversations import (
    conversation_json,
    decode_create,
    decode_items,
    decode_update,
)
from gateway.schema.responses.items import distinct
from gateway.service import caller_of, service_of
from gateway.store.conversations import Conversations
from gateway.store.responses import Key
from gateway.web.route import decoded_body
from gateway.web.routes.responses import page_of

Json = dict[str, Any]


async def create_conversation(http: HttpRequest) -> Json:
    """Store a conversation, perhaps with items. Raises `InvalidRequest`."""
    service, caller = service_of(http), caller_of(http)
    read = partial(decode_create, new_id=service.new_id)
    metadata, items = await decoded_body(http, read)
    key = Key(service.new_id("conv_"), caller.tenant, service.unix_now())
    made = conversation_json(key.id, key.now, metadata)
    await service.store.conversations.put(key, made, items)
    return made


async def retrieve_conversation(http: HttpRequest) -> Json:
    """A conversation without its items; raises `ConversationNotFound`."""
    return await _stored(http).find(_key(http))


async def update_conversation(http: HttpRequest) -> Json:
    """Replace the metadata; raises `ConversationNotFound`."""
    metadata = await decoded_body(http, decode_update)
    return await _stored(http).update(_key(http), {"metadata": metadata})


async def delete_conversation(http: HttpRequest) -> Json:
    """Delete a conversation with its items; raises `ConversationNotFound`. Responses that were
    generated for it stay."""
    key = _key(http)
    await _stored(http).delete(key)
    return {"id": key.id, "object": "conversation.deleted", "deleted": True}


async def create_items(http: HttpRequest) -> Json:
    """Add items; the body has them as they are stored. Raises `InvalidRequest`."""
    new_id = service_of(http).new_id
    items = await decoded_body(http, partial(decode_items, new_id=new_id))
    added = await _stored(http).add(_key(http), items, partial(distinct, new_id=new_id))
    return list_json(added, has_more=False)


async def list_items(http: HttpRequest) -> Json:
    """A page of the items, newest first by default; raises `ConversationNotFound`."""
    return await page_of(http, _stored(http), _key(http))


async def retrieve_item(http: HttpRequest) -> bytes:
    """One item; raises `ItemNotFound`."""
    return await _stored(http).item(_key(http), http.path_params["item_id"])


async def delete_item(http: HttpRequest) -> Json:
    """Delete an item; the conversation is returned. Raises `ItemNotFound`."""
    return await _stored(http).remove(_key(http), http.path_params["item_id"])


def _stored(http: HttpRequest) -> Conversations:
    return service_of(http).store.conversations


def _key(http: HttpRequest) -> Key:
    service, found = service_of(http), http.path_params["conversation_id"]
    return Key(found, caller_of(http).tenant, service.unix_now())
