"""`/v1/conversations`: the bodies of its requests, and OpenAI's conversation object."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.schema.decoding import check_unicode, decode, invalid
from gateway.schema.openai.batches import check_metadata
from gateway.schema.responses.items import InputItem, Item, distinct, stored_items

MAX_ADDED = 20  # items at a time, as in OpenAI's API


class ConversationUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/conversations/{id}`."""

    metadata: dict[str, str] | None


class ConversationCreate(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/conversations`."""

    metadata: dict[str, str] | None = None
    items: list[InputItem] | None = None


class ItemsCreate(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/conversations/{id}/items`."""

    items: list[InputItem]


def decode_create(
    body: bytes, new_id: Callable[[str], str]
) -> tuple[dict[str, str] | None, list[Item]]:
    """The metadata and the items of the request. Raises `InvalidRequest`."""
    request = decode(ConversationCreate, body or b"{}")
    check_unicode(body)
    check_metadata(request.metadata)
    return request.metadata, _added(request.items, new_id) if request.items else []


def decode_update(body: bytes) -> dict[str, str]:
    """The metadata of the request. Raises `InvalidRequest`."""
    request = decode(ConversationUpdate, body)
    check_unicode(body)
    check_metadata(request.metadata)
    return request.metadata or {}


def decode_items(body: bytes, new_id: Callable[[str], str]) -> list[Item]:
    """The items of the request. Raises `InvalidRequest`."""
    request = decode(ItemsCreate, body)
    check_unicode(body)
    return _added(request.items, new_id)


def _added(items: Sequence[InputItem], new_id: Callable[[str], str]) -> list[Item]:
    if len(items) > MAX_ADDED:
        raise invalid("items", f"expected at most {MAX_ADDED} items.")
    return distinct(stored_items(items, new_id, "items"), set(), new_id)


def conversation_json(
    conversation_id: str, created_at: int, metadata: dict[str, str] | None
) -> dict[str, Any]:
    """The conversation object."""
    return {
        "id": conversation_id,
        "object": "conversation",
        "created_at": created_at,
        "metadata": metadata or {},
    }


def conversation_id(value: object) -> str | None:
    """The id in a request's `conversation`: an id, or an object that has one. Raises
    `InvalidRequest`."""
    match value:
        case None:
            return None
        case str(found) | {"id": str(found)} if found:
            return found
    raise invalid("conversation", "expected the id of a conversation, or an object with its 'id'.")
