"""PolicyBase: what a policy does that rejects nothing and keeps no queue of started requests."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from engine.policy.port import SortKey
    from engine.request import Request, RequestSpec


class PolicyBase(ABC):
    """Derives the answers to rare questions from `sort_keys`. A policy under which thousands of
    requests may be started overrides `started_order`."""

    def validate(self, spec: "RequestSpec", num_tokens: int, now: float) -> None:
        return None

    def found(self, request: "Request", num_tokens: int) -> bool:
        return True

    def start(self, request: "Request") -> None:
        return None

    def ran(self, request: "Request", num_tokens: int, seconds: float, now: float) -> None:
        return None

    @abstractmethod
    def sort_keys(self, requests: "Sequence[Request]", now: float) -> "list[SortKey]":
        """One key for each request; the policy's order is ascending in them."""

    def started_order(
        self, started: "Collection[Request]", now: float, *, reverse: bool = False
    ) -> "Iterator[Request]":
        requests = [*started]
        keys = dict(zip(requests, self.sort_keys(requests, now), strict=True))
        return iter(sorted(requests, key=keys.__getitem__, reverse=reverse))

    def next_scheduled_times(self, requests: "Sequence[Request]", now: float) -> list[float]:
        """The position of each request among all of them in the order, from 0."""
        keys = self.sort_keys(requests, now)
        positions = [0.0] * len(keys)
        for position, index in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
            positions[index] = float(position)
        return positions
