"""Scheduler events, reported to observers: metrics, recordings and traces are observers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.iteration import Iteration
    from engine.policy.port import Policy
    from engine.request import Request
    from engine.step import BlockMove

    Handler = Callable[..., None]


class Observer:
    """Called synchronously by the scheduler, after the event. Each public method is an event, and
    does nothing unless a subclass overrides it. It must not wait, raise, or change what it is
    passed."""

    def arrived(self, request: "Request", now: float) -> None:
        """The request was accepted."""

    def withdrawn(self, request: "Request", now: float) -> None:
        """The waiting request goes to the scheduler of another replica."""

    def adopted(self, request: "Request", now: float) -> None:
        """The waiting request has come from the scheduler of another replica."""

    def planned(self, iteration: "Iteration", now: float) -> None:
        """The iteration is about to be sent to the workers."""

    def idled(self, now: float) -> None:
        """There are live requests, but none of them could be planned."""

    def committed(self, iteration: "Iteration", seconds: float, now: float) -> None:
        """The iteration's result was applied. `seconds`: the worker's own time for the step."""

    def failed(self, iteration: "Iteration", now: float) -> None:
        """The step raised an error; its requests end next."""

    def preempted(self, request: "Request", now: float) -> None:
        """The request's KV was dropped, to be recomputed."""

    def swapped(self, request: "Request", move: "BlockMove", now: float) -> None:
        """The next step swaps the request's KV out or in. An awaited move is made because blocks
        are short now, any other one ahead of need."""

    def cancelled(self, request: "Request", now: float) -> None:
        """The request ends for the reason in its `abort`: now, or when its iteration returns."""

    def ended(self, request: "Request", now: float) -> None:
        """The request reached its terminal state; reported exactly once per request."""

    def freed(self, request: "Request", iterations: int) -> None:
        """A cancelled request's KV is free, `iterations` iterations after it was cancelled."""

    def worker_lost(self, now: float) -> None:
        """A worker died: all KV is lost."""

    def given_up(self, now: float) -> None:
        """No live request can be served any more; all of them end next."""

    def switched(self, policy: "Policy", now: float) -> None:
        """`policy` replaced the policy that was in force."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))


class ObserverGroup(Observer):
    """Reports each event to several observers, in their order.

    The methods of its events are made with it: each calls those observers that override the event,
    and nothing else.
    """

    def __init__(self, *observers: Observer) -> None:
        for event in EVENTS:
            handlers = [getattr(one, event) for one in observers if _overrides(one, event)]
            if handlers:
                setattr(self, event, handlers[0] if len(handlers) == 1 else _calling(handlers))


def _overrides(observer: Observer, event: str) -> bool:
    if isinstance(observer, ObserverGroup):
        return event in vars(observer)
    return getattr(type(observer), event, None) is not getattr(Observer, event)


def _calling(handlers: "Sequence[Handler]") -> "Handler":
    """A function that calls all of them with its arguments."""

    def call_all(*event: object) -> None:
        for handler in handlers:
            handler(*event)

    return call_all
