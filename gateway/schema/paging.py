"""Lists in pages: `after` and `limit` of the query, `first_id`, `last_id` and `has_more` back."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_range, check_word, shown

ORDERS = ("asc", "desc")


class Page(NamedTuple):
    """What part of a list is wanted: so many from behind the item `after`."""

    limit: int
    after: str | None
    is_ascending: bool


def read_page(query: Mapping[str, str], default: int, most: int) -> Page:
    """The page that a query asks for. Raises `InvalidRequest` naming the parameter."""
    limit = query.get("limit")
    if limit is not None and not (limit.isascii() and limit.isdecimal() and len(limit) < 10):
        message = f"Invalid value for 'limit': expected an integer, but got {shown(limit)}."
        raise InvalidRequest(message, "limit")
    wanted = default if limit is None else int(limit)
    check_range(wanted, "limit", 1, most)
    order = query.get("order", "desc")
    check_word(order, "order", ORDERS)
    return Page(wanted, query.get("after") or None, order == "asc")


def list_json(items: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page of items that have an `id` each."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else "",
        "last_id": items[-1]["id"] if items else "",
        "has_more": has_more,
    }
