"""LiveView: recent iterations and snapshots of the scheduler, for the web page.

Iterations are recorded only while a client watches; otherwise an event costs one test.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, takewhile, zip_longest
from typing import Any

import orjson

from engine.iteration import Iteration, Observer
from engine.loop import Engine
from engine.policy import POLICIES, levels_of, name_of
from engine.replicas.replicas import ServingEngine
from engine.request import Request, State
from engine.step import StepEntry
from gateway.observe.readings import Readings
from gateway.observe.timelines import lacks

KEEP_ITERATIONS = 256
MAX_REQUESTS = 200  # requests in a snapshot
MAX_STARTED = 120  # requests in it that hold KV on the device
MAX_SWAPPED = 40
RUNNING = (State.READY, State.RUNNING)
SWAPPED = (State.SWAPPING_OUT, State.SWAPPED, State.SWAPPING_IN)


@dataclass(slots=True, eq=False)
class _Recorded:
    """An iteration; its JSON is made when it is first sent."""

    number: int
    seconds: float
    entries: tuple[StepEntry, ...]
    _json: bytes = b""

    def as_json(self) -> bytes:
        if not self._json:
            rows = [
                (each.request_id, len(each.tokens), not each.is_decode) for each in self.entries
            ]
            fields = {"number": self.number, "seconds": self.seconds, "rows": rows}
            self._json = orjson.dumps(fields)
        return self._json


class LiveView(Observer):
    """The engine's latest iterations; `snapshot` describes its state at one moment."""

    def __init__(self) -> None:
        self._num_watchers = 0
        self._number = 0
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

    def committed(self, iteration: Iteration, seconds: float, now: float) -> None:
        self._number += 1
        if not self.is_watched:
            return
        entries = iteration.step.entries
        num_sampled = len(entries)
        if not entries[-1].is_decode:  # prefills come last
            num_sampled = sum(entry.sample is not None for entry in entries)
        self._iterations.append(_Recorded(self._number, seconds, entries))
        self._produced.append((now, num_sampled))

    @property
    def last_number(self) -> int:
        """The number of the latest iteration."""
        return self._number

    def newer(self, since: int) -> bytes:
        """The recorded iterations with numbers above `since`, in their order, as a JSON array. An
        iteration's rows are triples: a request's id, the number of its tokens, and whether they are
        of a prefill."""
        newest = takewhile(lambda each: each.number > since, reversed(self._iterations))
        return b"[" + b",".join([each.as_json() for each in newest][::-1]) + b"]"

    def snapshot(
        self, engine: ServingEngine, readings: Readings, loop_lag: float, now: float
    ) -> dict[str, Any]:
        """The state now, without the iterations."""
        scheduler, goal_steps = readings.scheduler, readings.metrics.goal_steps
        rejection = engine.rejection()
        blocks, error = readings.kv_blocks, readings.cost_error
        return {
            "policy": name_of(scheduler.policy),
            "policies": list(POLICIES),
            "admission": scheduler.settings.admission.value,
            "levels": _level_sizes(readings),
            "counts": {
                "running": readings.count(*RUNNING),
                "waiting": readings.num_waiting,
                "swapped": readings.count(*SWAPPED),
            },
            "kv": {
                tier: {state: blocks[tier, state] for state in ("free", "held", "cached", "moving")}
                | {"block_size": readings.block_size}
                for tier in ("device", "host")
            },
            "worker_state": "running" if rejection is None else str(rejection),
            "worker_restarts": readings.metrics.num_workers_lost,
            "loop_lag": loop_lag,
            "itl_goal": {
                "seconds": readings.itl_goal,
                "steps": goal_steps.total(),
                "exceeded": goal_steps["exceeded"],
            },
            "cost_error": error and {"median": error.median, "p90": error.p90},
            "tokens_per_second": self._rate(now),
            "num_requests": sum(map(len, readings.pools)),
            "requests": [
                _row(request, each, now) for each in engine.engines for request in _shown(each)
            ][:MAX_REQUESTS],
        }

    def _rate(self, now: float) -> float:
        """Output tokens per second over the last second."""
        return float(sum(count for at, count in self._produced if now - at <= 1.0))


def _row(request: Request, engine: Engine, now: float) -> dict[str, Any]:
    levels = levels_of(engine.scheduler.policy)
    return {
        "id": request.request_id,
        "label": request.spec.label,
        "state": _state(request),
        "age": now - request.times.arrived_at,
        "prompt": request.prompt_len,
        "output": request.produced,
        "computed": request.num_computed,
        "cached": request.num_cached,
        "preemptions": request.setbacks.num_preemptions,
        "level": None if levels is None or request.spec.is_background else levels.level(request),
        "waits_for": waits_for(request, engine),
    }


def _level_sizes(readings: Readings) -> list[int]:
    """The number of live requests in each queue of a policy that has several."""
    levels = [levels_of(scheduler.policy) for scheduler in readings.schedulers]
    sizes = [each.level_sizes for each in levels if each is not None]
    return [sum(queue) for queue in zip_longest(*sizes, fillvalue=0)]


def _shown(engine: Engine) -> list[Request]:
    """The live requests to show, `MAX_REQUESTS` at most: some of those that hold KV on the device,
    some that are swapped out, and the longest waiting ones. The cost does not depend on how many
    wait."""
    pool = engine.scheduler.pool
    found = list(islice(pool.started, MAX_STARTED)) + list(islice(pool.swapped, MAX_SWAPPED))
    waiting = (request for request in pool if request.state is State.WAITING)
    return found + list(islice(waiting, MAX_REQUESTS - len(found)))


def _state(request: Request) -> str:
    if request.state in RUNNING:
        return "decode" if request.is_decoding else "prefill"
    return request.state.value


def waits_for(request: Request, engine: Engine) -> str:
    """What a request waits for: KV, a seat, tokens of a step, the worker; empty if it runs."""
    scheduler = engine.scheduler
    if engine.rejection() is not None:
        return "worker restart"
    if request.state is State.RUNNING:
        return ""
    if request.num_crashes:
        return "a step of its own: it ran when a worker died"
    if request.state is State.READY:
        return "the next step"
    if request.state is not State.WAITING:
        return "KV: it is on the host"
    if not scheduler.may_start_in_time(request):
        return "the ITL goal: more requests would exceed it"
    return lacks(request, scheduler, scheduler.pool.num_admitted).value
