"""LiveView: recent iterations and snapshots of the scheduler, for the web page.

Iterations are recorded only while a client watches; otherwise an event costs one test.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, takewhile
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.events import NullObserver
from engine.policy import POLICIES, levels_of, name_of
from engine.request import Phase, State
from gateway.observe.queueing import lacks

if TYPE_CHECKING:
    from engine.cost.live import LiveCost
    from engine.iteration import Iteration
    from engine.loop import Engine
    from engine.pool import RequestPool
    from engine.request import Request
    from engine.step import StepEntry

KEEP_ITERATIONS = 256
MAX_REQUESTS = 200  # of a snapshot
MAX_STARTED = 120  # of them, requests that hold KV on the device
MAX_SWAPPED = 40
RUNNING = (State.READY, State.RUNNING)
SWAPPED = (State.SWAPPING_OUT, State.SWAPPED, State.SWAPPING_IN)


class _Recorded(NamedTuple):
    """An iteration; its rows are made when it is sent."""

    number: int
    seconds: float
    entries: "tuple[StepEntry, ...]"

    def as_json(self) -> dict[str, Any]:
        rows = [
            (entry.request_id, len(entry.tokens), not entry.is_decode) for entry in self.entries
        ]
        return {"number": self.number, "seconds": self.seconds, "rows": rows}


class LiveView(NullObserver):
    """The engine's latest iterations; `snapshot` describes its state at one moment."""

    def __init__(self) -> None:
        self.num_workers_lost = 0
        self._num_watchers = 0
        self._number = 0
        self._num_goal_steps = self._num_exceeded = 0  # iterations with an ITL goal
        self._iterations: deque[_Recorded] = deque(maxlen=KEEP_ITERATIONS)
        self._produced: deque[tuple[float, int]] = deque(maxlen=KEEP_ITERATIONS)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Iterations are recorded inside."""
        self._num_watchers += 1
        try:
            yield
        finally:
            self._num_watchers -= 1

    @property
    def is_watched(self) -> bool:
        """Whether iterations are being recorded."""
        return self._num_watchers > 0

    def committed(self, iteration: "Iteration", seconds: float, now: float) -> None:
        self._number += 1
        if iteration.itl_goal < inf:
            self._num_goal_steps += 1
            self._num_exceeded += seconds > iteration.itl_goal
        if not self.is_watched:
            return
        entries = iteration.step.entries
        num_sampled = len(entries)
        if not entries[-1].is_decode:  # prefills come last
            num_sampled = sum(entry.sample is not None for entry in entries)
        self._iterations.append(_Recorded(self._number, seconds, entries))
        self._produced.append((now, num_sampled))

    def worker_lost(self, now: float) -> None:
        self.num_workers_lost += 1

    @property
    def last_number(self) -> int:
        """The number of the latest iteration."""
        return self._number

    def snapshot(self, engine: "Engine", since: int, loop_lag: float, now: float) -> dict[str, Any]:
        """The state now, and the iterations with numbers above `since`. An iteration's rows are
        triples: a request's id, the number of its tokens, and whether they are of a prefill."""
        scheduler = engine.scheduler
        pool, ledger = scheduler.pool, scheduler.ledger
        rejection = engine.rejection()
        levels = levels_of(scheduler.policy)
        return {
            "policy": name_of(scheduler.policy),
            "policies": list(POLICIES),
            "admission": scheduler.settings.admission.value,
            "levels": [] if levels is None else levels.level_sizes,
            "counts": {
                "running": sum(pool.count(state) for state in RUNNING),
                "waiting": pool.count(State.WAITING),
                "swapped": sum(pool.count(state) for state in SWAPPED),
            },
            "kv": {
                "device": {
                    "free": ledger.num_free - ledger.num_cached,
                    "held": ledger.num_held,
                    "cached": ledger.num_cached,
                    "moving": ledger.num_moving,
                    "block_size": ledger.block_size,
                },
                "host": {
                    "free": ledger.host.num_free - ledger.host.cached.num_replaceable,
                    "held": ledger.host.num_held,
                    "cached": len(ledger.host.cached),
                    "moving": ledger.host.num_moving,
                    "block_size": ledger.block_size,
                },
            },
            "worker_state": "running" if rejection is None else str(rejection),
            "worker_restarts": self.num_workers_lost,
            "loop_lag": loop_lag,
            "itl_goal": self._itl_goal(scheduler.settings.itl_goal),
            "cost_error": _error(scheduler.cost),
            "tokens_per_second": self._rate(now),
            "num_requests": len(pool),
            "requests": self._requests(engine, now),
            "iterations": self._newer(since),
        }

    def _newer(self, since: int) -> list[dict[str, Any]]:
        """The recorded iterations with numbers above `since`, in their order."""
        newest = takewhile(lambda each: each.number > since, reversed(self._iterations))
        return [each.as_json() for each in newest][::-1]

    def _itl_goal(self, goal: float) -> dict[str, Any]:
        """The server's goal in seconds, the iterations with one, and how many exceeded it."""
        return {
            "seconds": None if goal == inf else goal,
            "steps": self._num_goal_steps,
            "exceeded": self._num_exceeded,
        }

    def _rate(self, now: float) -> float:
        """Output tokens per second over the last second."""
        return float(sum(count for at, count in self._produced if now - at <= 1.0))

    def _requests(self, engine: "Engine", now: float) -> list[dict[str, Any]]:
        levels = levels_of(engine.scheduler.policy)
        return [
            {
                "id": request.request_id,
                "label": request.spec.label,
                "state": _state(request),
                "age": now - request.arrived_at,
                "prompt": request.prompt_len,
                "output": request.produced,
                "computed": request.num_computed,
                "cached": request.num_cached,
                "preemptions": request.num_preemptions,
                "level": None
                if levels is None or request.spec.is_background
                else levels.level(request),
                "waits_for": waits_for(request, engine),
            }
            for request in _shown(engine.scheduler.pool)
        ]


def _error(cost: "LiveCost") -> dict[str, float] | None:
    """Relative errors of the predicted seconds of recent steps; None before the first step."""
    summary = cost.errors.summary()
    return None if summary is None else {"median": summary.median, "p90": summary.p90}


def _shown(pool: "RequestPool") -> "list[Request]":
    """At most `MAX_REQUESTS` live requests: some of those that hold KV on the device, some that are
    swapped out, and the longest waiting ones. The cost does not depend on how many wait."""
    found = list(islice(pool.started, MAX_STARTED)) + list(islice(pool.swapped, MAX_SWAPPED))
    waiting = (request for request in pool if request.state is State.WAITING)
    return found + list(islice(waiting, MAX_REQUESTS - len(found)))


def _state(request: "Request") -> str:
    if request.state in RUNNING:
        return "prefill" if request.phase is Phase.PREFILL else "decode"
    return request.state.value


def waits_for(request: "Request", engine: "Engine") -> str:
    """What a request waits for: KV, a seat, tokens of a step, the worker; empty if it runs."""
    scheduler = engine.scheduler
    if engine.rejection() is not None:
        return "worker restart"
    if request.state is State.RUNNING:
        return ""
    if request.is_suspect:
        return "a step of its own: it ran when a worker died"
    if request.state is State.READY:
        return "the next step"
    if request.state is not State.WAITING:
        return "KV: it is on the host"
    if not scheduler.may_start_in_time(request):
        return "the ITL goal: more requests would exceed it"
    return lacks(request, scheduler, scheduler.pool.num_admitted).value
