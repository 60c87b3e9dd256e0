"""Responses that are being generated, so that a client can cancel one by the response's id."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from gateway.errors import ConversationLocked


class RunningResponse(NamedTuple):
    """A response of `/v1/responses` in progress; `request_id` is the engine requests' label.

    `snapshot(status)` is the response object as it is now. `conversation` is the id of the one
    that it continues.
    """

    response_id: str
    request_id: str
    tenant: str
    snapshot: Callable[..., dict[str, Any]]
    conversation: str | None = None


class RunningResponses:
    """All responses in progress, from their request's acceptance to their last byte."""

    def __init__(self) -> None:
        self._by_id: dict[str, RunningResponse] = {}

    @contextmanager
    def register(self, response: RunningResponse) -> Iterator[None]:
        """List the response until the `with` block ends. Raises `ConversationLocked`."""
        self.check_unlocked(response.conversation, response.tenant)
        self._by_id[response.response_id] = response
        try:
            yield
        finally:
            del self._by_id[response.response_id]

    def check_unlocked(self, conversation: str | None, tenant: str) -> None:
        """Raise `ConversationLocked` if a response to this conversation is in progress."""
        if conversation is not None and any(
            (each.conversation, each.tenant) == (conversation, tenant)
            for each in self._by_id.values()
        ):
            raise ConversationLocked(conversation)

    def find(self, response_id: str, tenant: str) -> RunningResponse | None:
        """The response, if it is in progress and belongs to this tenant."""
        response = self._by_id.get(response_id)
        return response if response is not None and response.tenant == tenant else None
