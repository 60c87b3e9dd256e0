"""StoreLookups: asks a shared store what it has of a prompt before its request starts."""

import asyncio
from collections.abc import Callable

from engine.kv.prefix_search import PrefixSearch
from engine.ports import StoreLookup
from engine.request import Request
from engine.step import PageKind


class StoreLookups:
    """The lookups in progress; `on_found` is called when a request may start."""

    def __init__(
        self, search: PrefixSearch, lookup: StoreLookup, on_found: Callable[[], object]
    ) -> None:
        self._search = search
        self._lookup = lookup
        self._on_found = on_found
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, request: Request) -> None:
        """A request arrives: it waits for what the store has, if any other tier lacks a page."""
        names = self._search.to_look_up(request)
        if names:
            request.found.awaits_lookup = True
            task = asyncio.get_running_loop().create_task(self._look_up(request, names))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _look_up(self, request: Request, names: list[tuple[PageKind, bytes]]) -> None:
        """Let the scheduler know what the store has of a prompt; then the request may start."""
        try:
            stored = await self._lookup.find([name for _, name in names])
            self._search.learn(names, stored)
        finally:
            request.found.awaits_lookup = False
            self._on_found()
