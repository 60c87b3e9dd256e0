"""Endings: every way out of the engine. Whoever ends gives its KV back and is told of once.

Who is in no iteration ends at once. Who is in flight, or whose KV moves, is LEAVING until its
last iteration has come back, since the workers may touch its KV until then. A worker that dies
ends nobody, but those in flight are suspect: each runs with no other suspect until it has
produced a token, who saw more deaths after who saw fewer, and who saw too many is failed.
"""

from typing import TYPE_CHECKING

from engine.errors import DeadlineExceeded, EngineError, WorkerLost
from engine.request import Abort, Move, Request, State

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine.control.admission import AdmissionControl
    from engine.control.pool import RequestPool
    from engine.events import Observer
    from engine.iteration import Iteration
    from engine.kv.ledger import KVLedger

LEAVING = State.LEAVING  # bound once, for the hot path (see pool)


class Lifecycle:
    """Ends requests; `num_committed` counts the iterations that came back, whatever they did."""

    def __init__(
        self,
        ledger: "KVLedger",
        pool: "RequestPool",
        memory: "AdmissionControl",
        observer: "Observer",
        max_crashes: int,
    ) -> None:
        self.num_committed = 0
        self._ledger = ledger
        self._pool = pool
        self._memory = memory
        self._observer = observer
        self._max_crashes = max_crashes
        self._suspects: set[Request] = set()

    @property
    def has_suspect_in_flight(self) -> bool:
        """Whether a second one has to wait, so that a death says which of them it was."""
        return any(suspect.num_in_flight for suspect in self._suspects)

    @property
    def least_crashes(self) -> int:
        """Of all suspects who wait for an answer; who has more lets them go first, and so is not
        blamed again for what another one, or nobody, did."""
        suspects = [r.num_crashes for r in self._suspects if not r.spec.is_background]
        return min(suspects, default=self._max_crashes)

    def clear(self, request: Request) -> None:
        """A suspect has produced a token."""
        request.num_crashes = 0
        self._suspects.discard(request)

    def leave(self, request: Request, now: float) -> None:
        """Its end is decided: it ends now if it is in no iteration."""
        if request.num_in_flight:
            self._pool.move(request, Move.LEAVE)
        else:
            self._end(request, now)

    def come_back(self, request: Request, now: float) -> None:
        """An iteration of one who is leaving came back; the last one ends it."""
        if not request.num_in_flight:
            self._end(request, now)

    def fail(self, request: Request, error: EngineError, now: float) -> None:
        """End it with an error, unless its end is decided already."""
        if request.state is LEAVING:
            self.come_back(request, now)
        else:
            request.error = error
            self.leave(request, now)

    def fail_all(self, error: EngineError, now: float) -> list[Request]:
        """Nobody will be served any more. The requests that learn of it."""
        self._observer.given_up(now)
        requests = [request for request in self._pool if request.state is not LEAVING]
        for request in requests:
            if request.num_in_flight:
                request.error = error
                self.cancel(request, Abort.SHUTDOWN, now)
            else:
                self.fail(request, error, now)
        return requests

    def cancel(self, request: Request, reason: Abort, now: float) -> None:
        """End a request from outside, if it has not ended and its end is not decided."""
        if request.state.is_terminal or request.state is LEAVING:
            return
        request.abort = reason
        request.cancelled_in = self.num_committed
        self._observer.cancelled(request, now)
        self.leave(request, now)

    def expire(self, now: float) -> list[Request]:
        """End whoever is past its deadline. The requests."""
        overdue = [r for r in self._pool.overdue(now) if r.state is not LEAVING]
        for request in overdue:
            request.error = DeadlineExceeded(
                f"The request's deadline of {request.spec.deadline:g} s passed after "
                f"{request.produced} of its tokens."
            )
            self.cancel(request, Abort.DEADLINE, now)
        return overdue

    def lose_device(self, in_flight: "Collection[Iteration]", now: float) -> list[Request]:
        """All KV is gone: everybody waits again, to be computed from prompt and output.

        Who was in flight is suspect; who is so for the `max_crashes`th time in a row is failed.
        The requests that ended.
        """
        self._observer.worker_lost(now)
        ended: list[Request] = []
        for rider in [r for iteration in in_flight for r in self._memory.tiers.void(iteration)]:
            self.come_back(rider, now)
        for request in dict.fromkeys(r for iteration in in_flight for r in iteration.requests):
            request.num_in_flight = 0
            request.num_crashes += 1
            self._suspects.add(request)
            if request.num_crashes >= self._max_crashes or request.state is LEAVING:
                error = WorkerLost("This request was being computed each time a worker died.")
                self.fail(request, error, now)
                ended.append(request)
        for request in self._pool:
            if request.state is not State.WAITING:
                request.land(0)
                self._pool.move(request, Move.LOSE)
        self._ledger.forget()
        return ended

    def _end(self, request: Request, now: float) -> None:
        """The one way out: KV back, out of pool and policy, told once."""
        self._ledger.release(request.request_id)
        self._pool.move(request, request.ending)
        self._memory.policy.leave(request, now)
        self._suspects.discard(request)
        request.ended_at = now
        if request.cancelled_in is not None:
            self._observer.freed(request, self.num_committed - request.cancelled_in)
        self._observer.ended(request, now)
