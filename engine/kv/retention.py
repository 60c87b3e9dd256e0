"""Retention: pages that are evicted after all others until a time, since a request asked for it
(OpenAI's `prompt_cache_options.ttl`, Anthropic's `cache_control.ttl`)."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class _Retained(NamedTuple):
    until: float
    tenant: str


class RetainedNames:
    """The names of the retained pages of one kind, at most `most`: half of the device's pages.

    A page beyond that is not retained, so that those which are can be relied on; except that it
    replaces the latest one of the tenant with the most, if its own tenant has fewer.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.names: dict[bytes, _Retained] = {}
        self._of: dict[str, dict[bytes, None]] = {}  # by tenant, the first asked for first
        self._ends: list[tuple[float, bytes]] = []  # a heap; also of names that have a later end

    def retain(self, name: bytes, until: float, tenant: str) -> bytes | None:
        """Retain a page until a time, or longer if it is already, if there is room. Returns the
        name of the page that it replaces, if any."""
        replaced = None
        if (before := self.names.get(name)) is not None:
            until = max(until, before.until)
            self._remove(name)
        elif len(self.names) >= self._most:
            largest = max(self._of, key=lambda each: len(self._of[each]), default=tenant)
            if len(self._of.get(tenant, ())) >= len(self._of.get(largest, ())):
                return None
            replaced = next(reversed(self._of[largest]))
            self._remove(replaced)
        self.names[name] = _Retained(until, tenant)
        self._of.setdefault(tenant, {})[name] = None
        heappush(self._ends, (until, name))
        if len(self._ends) > 4 * self._most:
            self._ends = [(one.until, each) for each, one in self.names.items()]
            heapify(self._ends)
        return replaced

    def expire(self, now: float) -> Iterator[bytes]:
        """Remove the names whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            until, name = heappop(self._ends)
            if (one := self.names.get(name)) is not None and one.until == until:
                self._remove(name)
                yield name

    def _remove(self, name: bytes) -> None:
        tenant = self.names.pop(name).tenant
        del self._of[tenant][name]
        if not self._of[tenant]:
            del self._of[tenant]
