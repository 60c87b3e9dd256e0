"""Moves: waiting requests go to a replica that could start them now, if that is better for all."""

from itertools import islice
from typing import TYPE_CHECKING

from engine.replicas.placement import growth
from engine.request import Request, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.replicas.replica import Replica

MAX_CANDIDATES = 8  # waiting requests of a replica, of which one moves
WAITING = State.WAITING


class Moves:
    """Moves requests between replicas. `num_moved` counts them."""

    def __init__(self, replicas: "Sequence[Replica]") -> None:
        self._replicas = replicas
        self.num_moved = 0

    def balance(self, now: float) -> None:
        """Empty the queues of replicas that cannot be restarted, and give each replica with a free
        seat the request that gains most by it."""
        givers = [each for each in self._replicas if each.pool.count(WAITING)]
        if not givers:
            return
        for giver in givers:
            if giver.engine.failure is not None:
                self._empty(giver, now)
        for taker in self._replicas:
            if taker.has_seat:
                self._take(taker, givers, now)

    def _empty(self, giver: "Replica", now: float) -> None:
        takers = [each for each in self._replicas if each.engine.failure is None]
        for request in list(giver.movable(now)):
            taker = min(takers, key=lambda each: (each.delay(now), len(each.pool)))
            self._move(request, giver, taker)

    def _take(self, taker: "Replica", givers: "Sequence[Replica]", now: float) -> None:
        """Move the request to a replica that gains most by it, if there is one."""
        best: tuple[float, Request, Replica] | None = None
        for giver in givers:
            candidates = islice(giver.movable(now), MAX_CANDIDATES)
            for place, request in enumerate(list(candidates)):
                gain = self._gain(request, place, giver, taker, now)
                if gain > 0.0 and (best is None or gain > best[0]) and taker.may_start(request):
                    best = gain, request, giver
        if best is not None:
            self._move(best[1], best[2], taker)

    def _gain(
        self, request: Request, place: int, giver: "Replica", taker: "Replica", now: float
    ) -> float:
        """How much less the sum of all completion times grows at the taker than at the giver, where
        the request waits behind `place` others."""
        there = growth(taker.delay(now), taker.prefill(request), len(taker.pool))
        wait = giver.restart_seconds + giver.delay(now) * place / giver.pool.count(WAITING)
        return growth(wait, giver.prefill(request), len(giver.pool) - 1) - there

    def _move(self, request: Request, giver: "Replica", taker: "Replica") -> None:
        self.num_moved += 1
        giver.engine.hand_over(request, taker.engine)
        taker.arrive(request)
