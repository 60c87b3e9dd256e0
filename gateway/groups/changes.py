"""Changes: the statuses of models, as they change, for everyone who watches."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gateway.groups.group import Group, Status


class Change(NamedTuple):
    """A model has had this status since now."""

    name: str
    status: "Status"


class Changes:
    """Sends each change to all watchers; None when the server shuts down, or another one has taken
    over."""

    def __init__(self) -> None:
        self.is_ended = False
        self._watchers: set[asyncio.Queue[Change | None]] = set()

    @contextmanager
    def watch(self) -> "Iterator[asyncio.Queue[Change | None]]":
        """The changes from now on, until the block ends."""
        changes: asyncio.Queue[Change | None] = asyncio.Queue()
        self._watchers.add(changes)
        try:
            yield changes
        finally:
            self._watchers.discard(changes)

    def changed(self, group: "Group") -> None:
        """Tell the watchers the status of a group."""
        for changes in self._watchers:
            changes.put_nowait(Change(group.name, group.status))

    def end(self) -> None:
        """Tell the watchers that there is nothing more to watch here."""
        self.is_ended = True
        for changes in self._watchers:
            changes.put_nowait(None)
