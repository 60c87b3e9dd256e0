"""Scheduler events, reported to observers: metrics, recordings and traces are observers."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.iteration import Iteration
    from engine.policy.port import Policy
    from engine.request import Request
    from engine.step import BlockMove


class Observer(Protocol):
    """Called synchronously by the scheduler, after the event. Must not wait, raise, or change what
    it is passed."""

    def arrived(self, request: "Request", now: float) -> None: ...

    def planned(self, iteration: "Iteration", now: float) -> None: ...

    def idled(self, now: float) -> None:
        """There are live requests, but none of them could be planned."""
        ...

    def committed(self, iteration: "Iteration", seconds: float, now: float) -> None:
        """The iteration's result was applied. `seconds`: the worker's own time for the step."""
        ...

    def failed(self, iteration: "Iteration", now: float) -> None:
        """The step raised an error; its requests end next."""
        ...

    def preempted(self, request: "Request", now: float) -> None:
        """The request's KV was dropped, to be recomputed."""
        ...

    def swapped(self, request: "Request", move: "BlockMove", now: float) -> None:
        """The next step swaps the request's KV out or in. An awaited move is made because blocks
        are short now, any other one ahead of need."""
        ...

    def cancelled(self, request: "Request", now: float) -> None:
        """The request ends for the reason in its `abort`: now, or when its iteration returns."""
        ...

    def ended(self, request: "Request", now: float) -> None:
        """The request reached its terminal state; reported exactly once per request."""
        ...

    def freed(self, request: "Request", iterations: int) -> None:
        """A cancelled request's KV is free, `iterations` iterations after it was cancelled."""
        ...

    def worker_lost(self, now: float) -> None: ...

    def given_up(self, now: float) -> None:
        """No live request can be served any more; all of them end next."""
        ...

    def switched(self, policy: "Policy", now: float) -> None:
        """`policy` replaced the policy that was in force."""
        ...


class NullObserver:
    """An observer that does nothing; a base class for observers of a few events."""

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


def _ignores(observer: Observer, event: str) -> bool:
    """Whether the observer inherits `NullObserver`'s method for this event."""
    return getattr(type(observer), event, None) is getattr(NullObserver, event)


class ObserverGroup:
    """Reports each event to several observers, in their order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers
        # The events of every iteration, for those observers that do not ignore them
        self._planned = [o.planned for o in observers if not _ignores(o, "planned")]
        self._committed = [o.committed for o in observers if not _ignores(o, "committed")]

    def arrived(self, request: "Request", now: float) -> None:
        for observer in self._observers:
            observer.arrived(request, now)

    def planned(self, iteration: "Iteration", now: float) -> None:
        for planned in self._planned:
            planned(iteration, now)

    def idled(self, now: float) -> None:
        for observer in self._observers:
            observer.idled(now)

    def committed(self, iteration: "Iteration", seconds: float, now: float) -> None:
        for committed in self._committed:
            committed(iteration, seconds, now)

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
