"""Readings: the state of a model that metrics, the live view and `/v1/loads` show alike, and of the
server.

Each is read at the moment of the call; nothing is stored.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from itertools import chain
from math import inf
from operator import add
from typing import Generic, TypeVar

from engine.control.scheduler import IterationScheduler
from engine.cost.live import ErrorSummary
from engine.kv.counts import KVCounts
from engine.pool import RequestPool
from engine.ports import Clock
from engine.request import State
from gateway.observe.metrics import LoraUsage, Metrics
from gateway.observe.request_log import RequestLog
from gateway.store.database import Database

V = TypeVar("V")
TICK_SECONDS = 0.1


class Ticked(Generic[V]):
    """The results of `make`, each for all readers that asked during the tick before it.

    A result is made after its readers asked, at once if the last tick has ended. So it is never
    older than the question, and a reader that asks again and again gets one result per tick.
    """

    def __init__(self, make: Callable[[], V], clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._result: V  # from the first `get` on
        self._made_at = -inf

    async def get(self) -> V:
        """The next result."""
        asked_at = self._clock()
        delay = self._made_at + TICK_SECONDS - asked_at
        if delay > 0:
            await asyncio.sleep(delay)
        if self._made_at <= asked_at:  # else another reader has made it meanwhile
            self._result = self._make()
            self._made_at = self._clock()
        return self._result


@dataclass(frozen=True, slots=True)
class Readings:
    """The parts of a model that are read. `others` are the schedulers of its further replicas; what
    is counted is the sum over all."""

    metrics: Metrics
    scheduler: IterationScheduler
    lora_usage: LoraUsage
    others: tuple[IterationScheduler, ...] = ()

    @property
    def schedulers(self) -> tuple[IterationScheduler, ...]:
        """The schedulers of all replicas."""
        return (self.scheduler, *self.others)

    @property
    def pools(self) -> list[RequestPool]:
        return [scheduler.pool for scheduler in self.schedulers]

    @property
    def num_blocks(self) -> int:
        """KV blocks on the device."""
        return sum(scheduler.kv.shape.num_blocks for scheduler in self.schedulers)

    @property
    def block_size(self) -> int:
        return self.scheduler.kv.block_size

    @property
    def kv_counts(self) -> KVCounts:
        return reduce(add, [scheduler.kv_counts for scheduler in self.schedulers])

    def count(self, *states: State) -> int:
        """Requests in these states."""
        return sum(pool.count(state) for pool in self.pools for state in states)

    @property
    def num_running(self) -> int:
        """Requests that hold KV slots."""
        return sum(pool.num_admitted for pool in self.pools)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for KV slots."""
        return self.count(State.WAITING)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that waiting requests still have to compute."""
        return sum(pool.waiting_tokens for pool in self.pools)

    @property
    def prefix_tokens(self) -> dict[str, int]:
        """Prompt tokens found in the prefix cache (hit) and computed (miss)."""
        hits, tokens = self.metrics.num_cached_tokens, self.metrics.num_prompt_tokens
        return {"hit": hits, "miss": tokens - hits}

    @property
    def num_used_blocks(self) -> int:
        """KV blocks on the device that requests hold or move."""
        return self.kv_counts.num_used

    @property
    def kv_blocks(self) -> dict[tuple[str, str], int]:
        """KV blocks by tier and state."""
        counts = self.kv_counts
        return {
            **{("device", state): n for state, n in counts.device._asdict().items()},
            **{("host", state): n for state, n in counts.host._asdict().items()},
            ("disk", "cached"): counts.num_on_disk,
            ("store", "cached"): counts.num_in_store,
        }

    @property
    def itl_goal(self) -> float | None:
        """The server's ITL goal in seconds."""
        goal = self.scheduler.settings.itl_goal
        return None if goal == inf else goal

    @property
    def cost_error(self) -> ErrorSummary | None:
        """Relative errors of the predicted seconds of recent steps, of the replica where they are
        largest; None before the first step."""
        errors = [scheduler.cost.errors.summary() for scheduler in self.schedulers]
        return max(filter(None, errors), key=lambda each: each.p90, default=None)

    def lora_requests(self) -> dict[tuple[str, str, str], float]:
        """vLLM's labels, the adapters of waiting and of running requests, and the time."""
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for request in chain.from_iterable(self.pools):
            if (lora := request.spec.lora) is not None:
                names[request.state is State.WAITING].add(lora.name)
        waiting, running = (",".join(sorted(names[is_waiting])) for is_waiting in (True, False))
        labels = str(self.lora_usage.max_loras), waiting, running
        return {labels: datetime.now(UTC).timestamp()}


@dataclass(frozen=True, slots=True)
class ServerReadings:
    """What all models share. `metrics` has the lag of the loop and the traces that were dropped."""

    metrics: Metrics
    database: Database
    request_log: RequestLog

    def http_requests_by_class(self) -> Counter[tuple[str, str, str]]:
        """HTTP requests by route, method and class of status."""
        counts: Counter[tuple[str, str, str]] = Counter()
        for (path, method, status), count in self.request_log.requests.items():
            counts[path, method, f"{status // 100}xx"] += count
        return counts
