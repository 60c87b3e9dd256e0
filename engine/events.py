"""What happened, told to whoever listens: metrics, recordings and traces are observers."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.iteration import Iteration
    from engine.ports import Policy
    from engine.request import Request
    from engine.step import BlockMove


class Observer(Protocol):
    """Called synchronously by the scheduler, after the fact. Must not wait, raise or write."""

    def arrived(self, request: "Request", now: float) -> None: ...

    def planned(self, iteration: "Iteration", now: float) -> None: ...

    def idled(self, now: float) -> None:
        """Requests are live, and a plan found none of them to run."""
        ...

    def committed(self, iteration: "Iteration", seconds: float, now: float) -> None:
        """`seconds` is the worker's own time for the step."""
        ...

    def failed(self, iteration: "Iteration", now: float) -> None:
        """Its step raised; its requests end next."""
        ...

    def preempted(self, request: "Request", now: float) -> None:
        """Its KV was given up, to be computed again."""
        ...

    def swapped(self, request: "Request", move: "BlockMove", now: float) -> None:
        """Its KV goes to the host or comes back, as the next step orders; an awaited move is
        made because blocks are short now, any other ahead of need."""
        ...

    def cancelled(self, request: "Request", now: float) -> None:
        """It is to end for the reason in its `abort`: now, or when its iteration returns."""
        ...

    def ended(self, request: "Request", now: float) -> None:
        """The request reached its terminal state; told exactly once."""
        ...

    def freed(self, request: "Request", iterations: int) -> None:
        """A cancelled request's KV is free, so many iterations after the cancel."""
        ...

    def worker_lost(self, now: float) -> None: ...

    def given_up(self, now: float) -> None:
        """Nobody who is live will be served any more; all end next."""
        ...

    def switched(self, policy: "Policy", now: float) -> None:
        """Another policy orders from now on."""
        ...


class NullObserver:
    """The observer that does nothing; base for those who want a few of the calls."""

    def arrived(self, request: "Request", now: float) -> None:
        return None

    def planned(self, iteration: "Iteration", now: float) -> None:
        return None

    def idled(self, now: float) -> None:
        return None

    def committed(self, iteration: "Iteration", seconds: float, now: float) -> None:
        return None

    def failed(self, iteration: "Iteration", now: float) -> None:
        return None

    def preempted(self, request: "Request", now: float) -> None:
        return None

    def swapped(self, request: "Request", move: "BlockMove", now: float) -> None:
        return None

    def cancelled(self, request: "Request", now: float) -> None:
        return None

    def ended(self, request: "Request", now: float) -> None:
        return None

    def freed(self, request: "Request", iterations: int) -> None:
        return None

    def worker_lost(self, now: float) -> None:
        return None

    def given_up(self, now: float) -> None:
        return None

    def switched(self, policy: "Policy", now: float) -> None:
        return None


class ObserverGroup:
    """Several observers behind one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def arrived(self, request: "Request", now: float) -> None:
        for observer in self._observers:
            observer.arrived(request, now)

    def planned(self, iteration: "Iteration", now: float) -> None:
        for observer in self._observers:
            observer.planned(iteration, now)

    def idled(self, now: float) -> None:
        for observer in self._observers:
            observer.idled(now)

    def committed(self, iteration: "Iteration", seconds: float, now: float) -> None:
        for observer in self._observers:
            observer.committed(iteration, seconds, now)

    def failed(self, iteration: "Iteration", now: float) -> None:
        for observer in self._observers:
            observer.failed(iteration, now)

    def preempted(self, request: "Request", now: float) -> None:
        for observer in self._observers:
            observer.preempted(request, now)

    def swapped(self, request: "Request", move: "BlockMove", now: float) -> None:
        for observer in self._observers:
            observer.swapped(request, move, now)

    def cancelled(self, request: "Request", now: float) -> None:
        for observer in self._observers:
            observer.cancelled(request, now)

    def ended(self, request: "Request", now: float) -> None:
        for observer in self._observers:
            observer.ended(request, now)

    def freed(self, request: "Request", iterations: int) -> None:
        for observer in self._observers:
            observer.freed(request, iterations)

    def worker_lost(self, now: float) -> None:
        for observer in self._observers:
            observer.worker_lost(now)

    def given_up(self, now: float) -> None:
        for observer in self._observers:
            observer.given_up(now)

    def switched(self, policy: "Policy", now: float) -> None:
        for observer in self._observers:
            observer.switched(policy, now)
