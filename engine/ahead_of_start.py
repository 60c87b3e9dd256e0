"""AheadOfStart: what is read and looked up for a request while it waits to be started."""

import asyncio
from typing import TYPE_CHECKING

from engine.step import ReadAhead

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.kv.prefix_search import PrefixSearch
    from engine.ports import StoreLookup
    from engine.request import Request
    from engine.step import PageKind, RequestId


class AheadOfStart:
    """Lets workers read what a request will load from the disk, and asks a shared store what it has
    of the prompt."""

    def __init__(
        self,
        search: "PrefixSearch",
        read_ahead: "Callable[[ReadAhead], object] | None",
        lookup: "StoreLookup | None",
        on_found: "Callable[[], object]",
    ) -> None:
        """Without `read_ahead` nothing is read, and without `lookup` nothing is looked up.
        `on_found` is called when a request may start."""
        self._search = search
        self._read_ahead = read_ahead
        self._lookup = lookup
        self._on_found = on_found
        self._lookups: set[asyncio.Task[None]] = set()
        self._reads: set[RequestId] = set()  # live requests for which copies were read ahead

    def arrive(self, request: "Request", *, must_wait: bool) -> None:
        """A request waits; it `must_wait` if an iteration is in flight."""
        if self._read_ahead is not None and must_wait:
            copies = self._search.read_ahead(request)
            if copies is not None:
                self._reads.add(request.request_id)
                self._read_ahead(copies)
        if self._lookup is not None:
            self._begin_lookup(request, self._lookup)

    def _begin_lookup(self, request: "Request", lookup: "StoreLookup") -> None:
        names = self._search.to_look_up(request)
        if names:
            request.found.awaits_lookup = True
            task = asyncio.get_running_loop().create_task(self._look_up(request, names, lookup))
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)

    async def _look_up(
        self, request: "Request", names: "list[tuple[PageKind, bytes]]", lookup: "StoreLookup"
    ) -> None:
        """Let the scheduler know what the store has of a prompt; then the request may start."""
        try:
            stored = await lookup.find([name for _, name in names])
            self._search.learn(names, stored)
        finally:
            request.found.awaits_lookup = False
            self._on_found()

    def leave(self, request: "Request") -> None:
        """A request has ended, or another engine gets it: workers forget what they have read."""
        if request.request_id in self._reads and self._read_ahead is not None:
            self._reads.remove(request.request_id)
            self._read_ahead(ReadAhead(request.request_id))
