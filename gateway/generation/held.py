"""HeldResponses: the latest conversations of connections, in memory and within bounds.

A connection's next response continues one of them by `previous_response_id`, also if it was not
stored. What exceeds a bound is dropped, the oldest first, and of the API key that holds the most.
Then the client gets the error of an unknown id, and sends the conversation again.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from gateway.generation.known_text import KnownText
from gateway.generation.prompt import PromptMarks

MAX_HELD = 8  # responses per connection: the one that is continued, and others to fork from
MAX_BYTES = 256 << 20  # bytes that the server holds in all
ITEM_BYTES = 1024  # the size of an item's objects, its texts aside


class HeldPrompt(NamedTuple):
    """The prompt of a held response: its size, what it was rendered from, and its marks."""

    num_items: int
    num_chars: int
    num_ids: int
    marks: PromptMarks
    settings: bytes  # a digest of all but the items


class HeldResponse(NamedTuple):
    """The items up to and including a response, and their text as the model has read it.

    `num_bytes` is its memory, roughly; most items are shared with the response before it. The ids
    of the text are those of `model`; it begins with the prompt.
    """

    items: list[dict[str, Any]]
    known: KnownText | None
    num_bytes: int
    model: str = ""
    prompt: HeldPrompt | None = None


def held_response(
    items: list[dict[str, Any]],
    known: KnownText | None,
    model: str = "",
    prompt: HeldPrompt | None = None,
) -> HeldResponse:
    """The response with its memory. Images in items may be most of it."""
    num_bytes = len(orjson.dumps(items)) + ITEM_BYTES * len(items)
    num_bytes += 0 if known is None else known.num_bytes
    return HeldResponse(items, known, num_bytes, model, prompt)


@dataclass(slots=True, eq=False)
class HeldResponses:
    """The responses that all connections hold, by API key and then by connection and id."""

    max_bytes: int = MAX_BYTES
    num_bytes: int = 0
    _by_tenant: dict[str, OrderedDict[tuple[int, str], HeldResponse]] = field(default_factory=dict)
    _tenant_bytes: dict[str, int] = field(default_factory=dict)

    def find(self, tenant: str, key: tuple[int, str]) -> HeldResponse | None:
        """The response, unless it was dropped."""
        own = self._by_tenant.get(tenant)
        return None if own is None else own.get(key)

    def put(self, tenant: str, key: tuple[int, str], held: HeldResponse) -> None:
        """Hold a response, and drop others if all are too many bytes."""
        self._by_tenant.setdefault(tenant, OrderedDict())[key] = held
        self._count(tenant, held.num_bytes)
        while self.num_bytes > self.max_bytes:
            largest = max(self._tenant_bytes, key=self._tenant_bytes.__getitem__)
            self.drop(largest, next(iter(self._by_tenant[largest])))

    def drop(self, tenant: str, key: tuple[int, str]) -> None:
        """Hold it no longer, if it is held."""
        own = self._by_tenant.get(tenant, OrderedDict())
        held = own.pop(key, None)
        if held is not None:
            self._count(tenant, -held.num_bytes)
            if not own:
                del self._by_tenant[tenant], self._tenant_bytes[tenant]

    def _count(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + num_bytes


class HeldConversations:
    """The responses that one connection holds."""

    def __init__(self, held: HeldResponses, tenant: str) -> None:
        self._held = held
        self._tenant = tenant
        self._ids: deque[str] = deque()

    def find(self, response_id: str) -> HeldResponse | None:
        """The response, if it was generated here and is still held."""
        return self._held.find(self._tenant, (id(self), response_id))

    def put(self, response_id: str, held: HeldResponse) -> None:
        """Hold a response, and drop the oldest one if they are too many."""
        self._ids.append(response_id)
        self._held.put(self._tenant, (id(self), response_id), held)
        if len(self._ids) > MAX_HELD:
            self._held.drop(self._tenant, (id(self), self._ids.popleft()))

    def drop(self, response_id: str) -> None:
        """Hold a response no longer, if it is held."""
        if self.find(response_id) is not None:
            self._ids.remove(response_id)
            self._held.drop(self._tenant, (id(self), response_id))

    def close(self) -> None:
        """The connection has ended."""
        while self._ids:
            self._held.drop(self._tenant, (id(self), self._ids.popleft()))
