"""BackgroundLast: any policy for who waits for an answer, and behind them whoever does not.

A request with `RequestSpec.is_background` (a line of a batch) uses what is left of an iteration.
It never goes before one of the others, whatever their policy, and is the first to give up its KV.
Among themselves background requests go first come, first served, so under steady load they may
starve: that is what their caller asked for.
"""

from itertools import chain
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.ports import Policy
    from engine.request import Request, RequestSpec


class BackgroundLast:
    """Every policy of `engine.policy.build` comes in one of these; `inner` orders the others."""

    def __init__(self, inner: "Policy") -> None:
        self.inner = inner
        self._background: dict[Request, None] = {}

    @property
    def preempts(self) -> bool:
        return self.inner.preempts

    def validate(self, spec: "RequestSpec", num_tokens: int, now: float) -> None:
        """Forecasts are made for those who wait."""
        if not spec.is_background:
            self.inner.validate(spec, num_tokens, now)

    def arrive(self, request: "Request", now: float) -> None:
        if request.spec.is_background:
            self._background[request] = None
        else:
            self.inner.arrive(request, now)

    def ran(self, request: "Request", num_tokens: int, seconds: float, now: float) -> None:
        if not request.spec.is_background:
            self.inner.ran(request, num_tokens, seconds, now)

    def leave(self, request: "Request", now: float) -> None:
        if request.spec.is_background:
            del self._background[request]
        else:
            self.inner.leave(request, now)

    def order(self, now: float) -> "Iterator[Request]":
        order = self.inner.order(now)
        return chain(order, self._background) if self._background else order

    def next_scheduled_times(self, requests: "Sequence[Request]", now: float) -> list[float]:
        others = [request for request in requests if not request.spec.is_background]
        turns = iter(self.inner.next_scheduled_times(others, now))
        return [inf if request.spec.is_background else next(turns) for request in requests]
