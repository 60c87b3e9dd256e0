"""First come, first served at iteration level (Orca, section 4.1 and algorithm 1)."""

from typing import TYPE_CHECKING

from engine.policy.base import PolicyBase
from engine.policy.port import Preemption

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.policy.port import SortKey
    from engine.policy.settings import PolicySettings
    from engine.ports import Cost
    from engine.request import Request


class FirstComeFirstServed(PolicyBase):
    """The order of arrival, which preemption does not change. Uses neither cost nor settings."""

    preemption = Preemption.NEVER

    def __init__(
        self, cost: "Cost | None" = None, settings: "PolicySettings | None" = None
    ) -> None:
        self._live: dict[Request, SortKey] = {}
        self._num_arrived = 0

    def arrive(self, request: "Request", now: float) -> None:
        self._live[request] = (self._num_arrived,)
        self._num_arrived += 1

    def leave(self, request: "Request", now: float) -> None:
        del self._live[request]

    def order(self, now: float) -> "Iterator[Request]":
        return iter(self._live)

    def sort_keys(self, requests: "Sequence[Request]", now: float) -> "list[SortKey]":
        return [self._live[request] for request in requests]
