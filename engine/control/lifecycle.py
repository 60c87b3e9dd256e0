"""Lifecycle: every way in which a request ends. It frees its KV and is reported ended once.

A request that is in no iteration ends at once. One that is in flight, or whose KV is being
swapped, is LEAVING until its last iteration has returned, since workers may touch its KV until
then. If a worker dies no request ends, but those in flight are suspects: each runs in iterations
without another suspect until it has produced a token. Suspects with fewer crashes run first, and
one with `max_crashes` crashes in a row fails.
"""

from typing import TYPE_CHECKING

from engine.errors import DeadlineExceeded, EngineError, WorkerLost
from engine.request import ENDS_AT_ONCE, Abort, Move, Request, State

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine.events import Observer
    from engine.iteration import Iteration
    from engine.kv.cache import KVCache
    from engine.pool import RequestPool

LEAVING = State.LEAVING  # bound once, for the hot path (see engine.pool)


class Lifecycle:
    """Ends requests. `num_committed` counts the iterations that returned, failed ones included."""

    def __init__(
        self, kv: "KVCache", pool: "RequestPool", observer: "Observer", max_crashes: int
    ) -> None:
        self.num_committed = 0
        self._kv = kv
        self._pool = pool
        self._observer = observer
        self._max_crashes = max_crashes
        self._suspects: set[Request] = set()
        self._cancelled: dict[Request, int] = {}  # until they end; `num_committed` at that time

    @property
    def has_suspect_in_flight(self) -> bool:
        """Whether another suspect has to wait, so that a crash can be attributed to this one."""
        return any(suspect.num_in_flight for suspect in self._suspects)

    @property
    def least_crashes(self) -> int:
        """The fewest crashes of a suspect that is not in the background. Suspects with more wait
        for it, so that they are not counted in a crash which it causes."""
        if not self._suspects:
            return self._max_crashes
        suspects = [r.num_crashes for r in self._suspects if not r.spec.is_background]
        return min(suspects, default=self._max_crashes)

    def clear(self, request: Request) -> None:
        """A suspect has produced a token: it is no suspect any more."""
        request.num_crashes = 0
        self._suspects.discard(request)

    def withdraw(self, request: Request) -> None:
        """A waiting request goes to another scheduler."""
        self._suspects.discard(request)

    def adopt(self, request: Request) -> None:
        """A waiting request has come from another scheduler, where it may have become a suspect."""
        if request.num_crashes:
            self._suspects.add(request)

    def leave(self, request: Request, now: float) -> None:
        """The request's end is decided: it ends now, or after its last iteration in flight."""
        if request.num_in_flight:
            self._pool.move(request, Move.LEAVE)
        else:
            self._end(request, now)

    def iteration_returned(self, request: Request, now: float) -> None:
        """An iteration of a leaving request has returned; after the last one it ends."""
        if not request.num_in_flight:
            self._end(request, now)

    def fail(self, request: Request, error: EngineError, now: float) -> None:
        """End the request with an error, unless its end is already decided."""
        if request.state is LEAVING:
            self.iteration_returned(request, now)
        else:
            request.error = error
            self.leave(request, now)

    def fail_all(self, error: EngineError, now: float) -> list[Request]:
        """End all live requests with an error. Returns those whose end was not decided before."""
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
        """End the request from outside, unless it has ended or its end is already decided."""
        if request.state.is_terminal or request.state is LEAVING:
            return
        request.abort = reason
        self._cancelled[request] = self.num_committed
        self._observer.cancelled(request, now)
        self.leave(request, now)

    def expire(self, now: float) -> list[Request]:
        """End requests whose deadline has passed, at most `ENDS_AT_ONCE`, and return them."""
        overdue = [r for r in self._pool.overdue(now, ENDS_AT_ONCE) if r.state is not LEAVING]
        for request in overdue:
            request.error = DeadlineExceeded(
                f"The request's deadline of {request.spec.deadline:g} s passed after "
                f"{request.produced} output tokens."
            )
            self.cancel(request, Abort.DEADLINE, now)
        return overdue

    def lose_device(self, in_flight: "Collection[Iteration]", now: float) -> list[Request]:
        """All KV is lost: all requests wait again, to be recomputed from prompt and output.

        Those in flight become suspects; one that was in flight at `max_crashes` crashes in a row
        fails. Returns the requests that ended.
        """
        self._observer.worker_lost(now)
        ended: list[Request] = []
        for iteration in in_flight:
            for request in self._kv.finish(iteration, None).leaving:
                self.iteration_returned(request, now)
        for request in dict.fromkeys(r for iteration in in_flight for r in iteration.requests):
            request.num_in_flight = 0
            request.num_crashes += 1
            self._suspects.add(request)
            if request.num_crashes >= self._max_crashes or request.state is LEAVING:
                error = WorkerLost("A worker died each time while it computed this request.")
                self.fail(request, error, now)
                ended.append(request)
        for request in self._pool:
            if request.state is not State.WAITING:
                request.reset_to(0)
                self._pool.move(request, Move.LOSE)
        self._kv.reset()
        return ended

    def _end(self, request: Request, now: float) -> None:
        """The one way out: free the KV, leave pool and policy, report the end once."""
        self._kv.release(request)
        self._pool.move(request, request.final_move)
        self._pool.policy.leave(request, now)
        self._suspects.discard(request)
        request.times.ended_at = now
        if (cancelled_at := self._cancelled.pop(request, None)) is not None:
            self._observer.freed(request, self.num_committed - cancelled_at)
        self._observer.ended(request, now)
