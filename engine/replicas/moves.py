"""Moves: waiting requests go to a replica that could start them now, if that is better for all."""

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from engine.replicas.placement import growth
from engine.request import Request, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from engine.replicas.replica import Replica

MAX_CANDIDATES = 8  # waiting requests of a replica, of which one moves
WAITING = State.WAITING


class Waiting(NamedTuple):
    """A request that may move. `growth`: of the sum of all completion times, if it does not."""

    growth: float
    request: Request
    giver: "Replica"


class Moves:
    """Moves requests between replicas. `num_moved` counts them."""

    def __init__(self, replicas: "Sequence[Replica]") -> None:
        self._replicas = replicas
        self.num_moved = 0

    def balance(self, planned: "Replica", now: float) -> None:
        """A replica has planned, or has lost its workers. If requests wait there, each replica with
        a free seat gets the one that gains most by it, and all move if it cannot be restarted; if
        none waits, it gets one itself. Other pairs of replicas are as they were."""
        if planned.engine.failure is not None:
            self._empty(planned, now)
        givers = [each for each in self._replicas if each.pool.count(WAITING)]
        takers: Sequence[Replica] = (planned,)
        if planned in givers:
            takers, givers = self._replicas, [planned]
        waiting: list[Waiting] | None = None
        for taker in takers if givers else ():
            if taker.has_seat:
                if waiting is None:
                    waiting = [each for giver in givers for each in self._waiting(giver, now)]
                if self._take(taker, waiting, now):
                    waiting = None

    def _empty(self, giver: "Replica", now: float) -> None:
        takers = [each for each in self._replicas if each.engine.failure is None]
        for request in list(giver.movable(now)):
            taker = min(takers, key=lambda each: (each.delay(now), len(each.pool)))
            self._move(request, giver, taker)

    def _waiting(self, giver: "Replica", now: float) -> "Iterator[Waiting]":
        """Requests that may move. Each waits behind those that stand before it."""
        for place, request in enumerate(list(islice(giver.movable(now), MAX_CANDIDATES))):
            before = giver.delay(now) * place / giver.pool.count(WAITING)
            wait, others = giver.restart_seconds + before, len(giver.pool) - 1
            yield Waiting(growth(wait, giver.prefill(request), others), request, giver)

    def _take(self, taker: "Replica", waiting: "Iterable[Waiting]", now: float) -> bool:
        """Move the request to a replica that gains most by it. Returns whether there is one."""
        delay, most, best = taker.delay(now), 0.0, None
        for each in waiting:
            if each.growth - delay > most:
                there = growth(delay, taker.prefill(each.request), len(taker.pool))
                if (gain := each.growth - there) > most and taker.may_start(each.request):
                    most, best = gain, each
        if best is None:
            return False
        self._move(best.request, best.giver, taker)
        return True

    def _move(self, request: Request, giver: "Replica", taker: "Replica") -> None:
        self.num_moved += 1
        giver.engine.hand_over(request, taker.engine)
        taker.arrive(request)
