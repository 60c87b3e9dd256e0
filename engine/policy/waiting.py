"""Patience: since when each request waits for its next iteration, and who has waited too long."""

from typing import TYPE_CHECKING

from engine.request import State

if TYPE_CHECKING:
    from engine.request import Request

IN_FLIGHT = frozenset({State.RUNNING, State.LEAVING})


class WaitingTimes:
    """Keeps requests by the length of their wait, the longest first, so that looking for the
    starving costs no more than there are of them (and of requests in flight)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: dict[Request, float] = {}

    def watch(self, request: "Request", now: float) -> None:
        """It arrived, or was just in an iteration: its wait begins anew."""
        self._since.pop(request, None)
        self._since[request] = now

    def forget(self, request: "Request") -> None:
        """It no longer waits, or its waiting is no longer of interest."""
        self._since.pop(request, None)

    def left(self, request: "Request", now: float) -> float:
        """Seconds until a watched request has waited for the limit."""
        return self._since[request] + self._seconds - now

    def starving(self, now: float) -> "list[Request]":
        """Who has waited for the limit or longer; each is told once, then its wait begins anew."""
        found: list[Request] = []
        for request, since in self._since.items():
            if now - since < self._seconds:
                break
            if request.state not in IN_FLIGHT:
                found.append(request)
        for request in found:
            self.watch(request, now)
        return found
