"""First come, first served at iteration level (Orca, section 4.1 and algorithm 1)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.request import Request
    from engine.step import RequestId


class FirstComeFirstServed:
    """The order of arrival, kept through preemption: who came first is never passed for good."""

    preempts = False

    def __init__(self) -> None:
        self._live: dict[RequestId, Request] = {}

    def arrive(self, request: "Request", now: float) -> None:
        self._live[request.request_id] = request

    def ran(self, request: "Request", num_tokens: int, seconds: float, now: float) -> None:
        return None

    def leave(self, request: "Request", now: float) -> None:
        del self._live[request.request_id]

    def order(self, now: float) -> "Iterator[Request]":
        return iter(self._live.values())

    def next_turn(self, now: float) -> float | None:
        return None
