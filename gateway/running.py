"""Running: the responses that are being made, so that they can be ended by their own id."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gateway.access import Caller
    from gateway.schema.response_frames import ResponseFrames


class Made(NamedTuple):
    """A response in the making, and who asked for it."""

    caller: "Caller"
    frames: "ResponseFrames"


class Running:
    """Knows each from the moment it is begun until its connection is done."""

    def __init__(self) -> None:
        self._made: dict[str, Made] = {}

    @contextmanager
    def hold(self, made: Made) -> Iterator[None]:
        """It is known while the block lasts."""
        response_id = made.frames.response_id
        self._made[response_id] = made
        try:
            yield
        finally:
            del self._made[response_id]

    def find(self, response_id: str, tenant: str) -> Made | None:
        """One of this tenant's, if it is being made."""
        made = self._made.get(response_id)
        return made if made is not None and made.caller.tenant == tenant else None
