"""PrefixFirst: of the first waiting requests, the one with the longest cached prefix starts first.

Cached blocks that no started request has are evicted when blocks are short. A request that starts
while its prefix is still cached has fewer tokens to compute. So the first `size` waiting requests
of a policy's order are a window, from which the one with the longest cached prefix is taken; among
equals the policy's order decides. The cached prefixes of a window are evicted after all other
cached blocks; a started request that needs their blocks gets them.

Bounded unfairness: a request that others have overtaken `size` times since it last waited for KV is
overtaken no more: none behind it is taken before it. Only the order of starts changes: a window has
no started request between its requests, and started ones run in the policy's order.
"""

from typing import TYPE_CHECKING

from engine.request import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.kv.prefix_search import PrefixSearch
    from engine.request import Request

WAITING = State.WAITING  # bound once (see engine.pool)
EVICTIONS = 8  # one in so many cached blocks evicted: prefixes are moved to the end again


class PrefixFirst:
    """Changes the order of waiting requests within a window."""

    def __init__(self, size: int, search: "PrefixSearch") -> None:
        """`size`: requests in the window, and how often a request may be overtaken."""
        self._size = size
        self._search = search
        self._taken: Request | None = None  # the last one that was taken from the window,
        self._overtaken: list[Request] = []  # and those before it in the policy's order
        self._kept: set[Request] = set()  # in the window, whose blocks are evicted last
        self._kept_at = 0  # evictions until then
        self._is_kept = False  # in the plan being made

    def order(self, order: "Iterator[Request]") -> "Iterator[Request]":
        """The requests of a policy's order. It looks for the cached prefix of each request in the
        window, once per plan."""
        window: list[Request] = []
        self._is_kept = False
        for request in order:
            if request.state is WAITING:
                self._search.find(request)
                window.append(request)
                if len(window) == self._size:
                    yield self._take(window)
                continue
            while window:
                yield self._take(window)
            yield request
        while window:
            yield self._take(window)

    def started(self, request: "Request") -> None:
        """A waiting request got its KV: it has overtaken those before it in its window."""
        overtaken = self._overtaken if request is self._taken else []
        self._taken = None
        request.num_overtaken = 0
        for other in overtaken:
            other.num_overtaken += 1

    def _keep(self, window: "list[Request]") -> None:
        """Evict the prefixes of a plan's first window last. They are moved to the end when their
        request joins the window, and again before blocks that were cached since can push them to
        the front."""
        evictions = self._search.num_evictions
        if (evictions - self._kept_at) * EVICTIONS >= self._search.num_cached:
            self._kept.clear()
            self._kept_at = evictions
        for request in reversed(window):
            if request not in self._kept:
                self._search.evict_last(request)
        self._kept, self._is_kept = set(window), True

    def _take(self, window: "list[Request]") -> "Request":
        if not self._is_kept:
            self._keep(window)
        best = 0
        for place, request in enumerate(window):
            if request.num_matched > window[best].num_matched:
                best = place
            if request.num_overtaken >= self._size:
                break
        self._overtaken = window[:best]
        self._taken = window.pop(best)
        return self._taken
