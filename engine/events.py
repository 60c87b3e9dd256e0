"""What happened, told to whoever listens: metrics, recordings and traces are observers."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.iteration import Iteration
    from engine.request import Request


class Observer(Protocol):
    """Called synchronously by the scheduler, after the fact. Must not wait, raise or write."""

    def arrived(self, request: "Request", now: float) -> None: ...

    def planned(self, iteration: "Iteration", now: float) -> None: ...

    def committed(self, iteration: "Iteration", seconds: float, now: float) -> None:
        """`seconds` is the worker's own time for the step."""
        ...

    def preempted(self, request: "Request", now: float) -> None: ...

    def ended(self, request: "Request", now: float) -> None:
        """The request reached its terminal state; told exactly once."""
        ...

    def freed(self, request: "Request", iterations: int) -> None:
        """A cancelled request's KV is free, so many iterations after the cancel."""
        ...

    def worker_lost(self, now: float) -> None: ...


class Silence:
    """The observer that does nothing; base for those who want a few of the calls."""

    def arrived(self, request: "Request", now: float) -> None:
        return None

    def planned(self, iteration: "Iteration", now: float) -> None:
        return None

    def committed(self, iteration: "Iteration", seconds: float, now: float) -> None:
        return None

    def preempted(self, request: "Request", now: float) -> None:
        return None

    def ended(self, request: "Request", now: float) -> None:
        return None

    def freed(self, request: "Request", iterations: int) -> None:
        return None

    def worker_lost(self, now: float) -> None:
        return None
