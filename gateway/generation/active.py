"""Running: the responses that are being made, so that they can be ended by their own id."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gateway.access.callers import Caller
    from gateway.schema.responses.renderer import ResponsesRenderer


class ActiveResponse(NamedTuple):
    """A response in the making, and who asked for it."""

    caller: "Caller"
    frames: "ResponsesRenderer"


class ActiveResponses:
    """Knows each from the moment it is begun until its connection is done."""

    def __init__(self) -> None:
        self._made: dict[str, ActiveResponse] = {}

    @contextmanager
    def hold(self, made: ActiveResponse) -> Iterator[None]:
        """It is known while the block lasts."""
        response_id = made.frames.response_id
        self._made[response_id] = made
        try:
            yield
        finally:
            del self._made[response_id]

    def find(self, response_id: str, tenant: str) -> ActiveResponse | None:
        """One of this tenant's, if it is being made."""
        made = self._made.get(response_id)
        return made if made is not None and made.caller.tenant == tenant else None
