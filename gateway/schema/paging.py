"""Paged lists: reads `after`, `limit` and `order` of a query; writes `first_id`, `last_id` and
`has_more`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed, check_range, invalid, quote

T = TypeVar("T")
ORDERS = ("asc", "desc")


class Page(NamedTuple):
    """The requested part of a list: at most `limit` items that follow the item `after`."""

    limit: int
    after: str | None
    is_ascending: bool

    def following(self, items: list[T], noun: str, id_of: Callable[[T], str]) -> list[T]:
        """The items from the page's first one on. Raises `InvalidRequest`."""
        if self.after is None:
            return items
        ids = [id_of(item) for item in items]
        if self.after not in ids:
            raise invalid("after", f"no {noun} {self.after[:100]!r}.")
        return items[ids.index(self.after) + 1 :]


def read_page(query: Mapping[str, str], default: int, most: int) -> Page:
    """Parse the query. `limit` is `default` if absent, at most `most`.

    Raises `InvalidRequest` that names the parameter.
    """
    limit = query.get("limit")
    if limit is not None and not (limit.isascii() and limit.isdecimal() and len(limit) < 10):
        message = f"Invalid value for 'limit': expected an integer, but got {quote(limit)}."
        raise InvalidRequest(message, "limit")
    num_items = default if limit is None else int(limit)
    check_range(num_items, "limit", 1, most)
    order = query.get("order", "desc")
    check_allowed(order, "order", ORDERS)
    return Page(num_items, query.get("after") or None, order == "asc")


def list_json(items: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """The body of one page. Each item has an `id`."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else "",
        "last_id": items[-1]["id"] if items else "",
        "has_more": has_more,
    }
