"""Responses that are being generated, so that a client can cancel one by the response's id."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

from gateway.errors import ConversationLocked


@dataclass(slots=True, weakref_slot=True, eq=False)
class Continued:
    """A conversation as one request reads it: `is_current` until another one's response begins."""

    place: tuple[str, str]  # the conversation's id, the tenant
    is_current: bool = True


class RunningResponse(NamedTuple):
    """A response of `/v1/responses` in progress; `request_id` is the engine requests' label.

    `snapshot(status)` is the response object as it is now. `continued` is the conversation that it
    continues.
    """

    response_id: str
    request_id: str
    tenant: str
    snapshot: Callable[..., dict[str, Any]]
    continued: Continued | None = None


class RunningResponses:
    """All responses in progress, from their request's acceptance to their last byte."""

    def __init__(self) -> None:
        self._by_id: dict[str, RunningResponse] = {}
        self._continued = WeakSet[Continued]()

    @contextmanager
    def register(self, response: RunningResponse) -> Iterator[None]:
        """List the response until the `with` block ends. Raises `ConversationLocked` if another one
        has begun since the conversation was to be read: its turn may not have been read."""
        own = response.continued
        if own is not None:
            if not own.is_current:
                raise ConversationLocked(own.place[0])
            for each in self._continued:
                each.is_current &= each is own or each.place != own.place
        self._by_id[response.response_id] = response
        try:
            yield
        finally:
            del self._by_id[response.response_id]

    def continued(self, conversation: str | None, tenant: str) -> Continued | None:
        """The conversation with this id, which is to be read next; None without one. Raises
        `ConversationLocked` if a response to it is in progress."""
        if conversation is None:
            return None
        found = Continued((conversation, tenant))
        if any(
            each.continued is not None and each.continued.place == found.place
            for each in self._by_id.values()
        ):
            raise ConversationLocked(conversation)
        self._continued.add(found)
        return found

    def find(self, response_id: str, tenant: str) -> RunningResponse | None:
        """The response, if it is in progress and belongs to this tenant."""
        response = self._by_id.get(response_id)
        return response if response is not None and response.tenant == tenant else None
