"""Replica: an engine of a model that has several, and what is known and forecast of its queue."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from math import inf

from engine.cost.model import CostModel
from engine.iteration import Observer
from engine.loop import Engine
from engine.policy.forecast import MAX_SAMPLED, Forecast
from engine.pool import RequestPool
from engine.ports import Cost
from engine.request import FoundPrefix, Request, State
from engine.step import RequestId

Beginning = tuple[str, bytes]  # `Caching.key`, and the hash of the first block

# A request with so many does not move while its replica restarts: it may be the cause
MAX_CRASHES = 1
MIN_FIRST = 64  # entries of ended requests that are kept in any case
WAITING = State.WAITING


class QueueDelay(Observer):
    """Forecasts by how much later a new request ends than on an idle replica. Learns from the
    requests that end how long outputs are. `seats`: requests in a batch."""

    def __init__(self, cost: Cost, seats: int) -> None:
        self._forecast = Forecast(cost, seats)

    def ended(self, request: Request, now: float) -> None:
        self._forecast.ended(request)

    def seconds(self, pool: RequestPool, model: CostModel, now: float) -> float:
        """The forecast for these live requests; 0 if there are none."""
        if not pool:
            return 0.0
        forecast, running, count = self._forecast, len(pool.started), pool.count(WAITING)
        slots = sum([request.num_tokens for request in pool.started])
        pace = model.tokens(running) + model.per_slot * slots
        forecast.observe(pace, now)
        spec = next(iter(pool)).spec
        decodes = forecast.decodes_left(spec, 0)
        prefill = [request for request in pool.started if request.remaining > 1]
        seconds = decodes * max(0.0, pace - forecast.pace_alone(spec))
        seconds += forecast.wait(prefill, len(prefill))
        if count:  # they wait for KV, so for the ends of running ones
            waiting = (request for request in pool if request.state is WAITING)
            seconds += forecast.wait(list(islice(waiting, MAX_SAMPLED)), count)
            seconds += decodes * pace * count / max(1, running)
        return seconds


class Replica:
    """An engine, and what is known of its queue."""

    def __init__(self, engine: Engine, delay: QueueDelay) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.pool = engine.scheduler.pool
        self._delay = delay
        self._seconds = 0.0
        self._state = (0, 0, 0)  # the state for which `_seconds` was computed
        self.beginnings: dict[Beginning, RequestId] = {}  # the first request of each

    def delay(self, now: float) -> float:
        """The forecast by how many seconds a new request ends later than on an idle replica."""
        state = (self.scheduler.lifecycle.num_committed, len(self.pool), self.pool.count(WAITING))
        if state != self._state:
            self._state = state
            self._seconds = self._delay.seconds(self.pool, self.scheduler.cost.model, now)
        return self._seconds

    @property
    def restart_seconds(self) -> float:
        """Expected seconds until it computes again, if it has lost its workers."""
        rejection = self.engine.rejection()
        return 0.0 if rejection is None else rejection.retry_after or 0.0

    def arrive(self, request: Request) -> None:
        """A request has come here. Those that begin like it will find what it has computed."""
        beginning = _beginning(request)
        if beginning is None or self.pool.get(self.beginnings.get(beginning)) is not None:
            return
        if len(self.beginnings) > 2 * len(self.pool) + MIN_FIRST:
            live = ((each, first) for each, first in self.beginnings.items() if first in self.pool)
            self.beginnings = dict(live)
        self.beginnings[beginning] = request.request_id

    def _num_expected(self, request: Request) -> int:
        """Tokens that the request has in common with the first live one here that begins like it:
        they are cached, or will be before it starts (`PrefixSearch.is_being_computed`)."""
        beginning = _beginning(request)
        other = None if beginning is None else self.pool.get(self.beginnings.get(beginning))
        kv = self.scheduler.kv
        if other is None or other is request or not kv.keeps_all:
            return 0
        ours, theirs = request.block_hashes, other.block_hashes
        blocks = range(min(len(ours), len(theirs)))  # hashes say what is before a block, too
        num_common = bisect_left(blocks, True, key=lambda index: ours[index] != theirs[index])
        return num_common * kv.block_size

    def prefill(self, request: Request) -> float:
        """Seconds of the request's tokens that it will not find in the cache, as far as it was
        searched. What its own replica has found of it stays noted."""
        found, request.found = request.found, FoundPrefix()
        known = self.scheduler.kv.search.num_known(request)
        request.found = found
        start = min(max(known, self._num_expected(request)), request.num_tokens - 1)
        cost = self.scheduler.cost.model
        return cost.compute(request.num_tokens - start, start) - cost.tokens(0)

    @property
    def has_seat(self) -> bool:
        """Whether nobody waits, and one more request could be in the next iteration."""
        if self.pool.count(WAITING) or self.engine.rejection() is not None:
            return False
        return self.pool.num_admitted < self.scheduler.settings.max_batch_size

    def may_start(self, request: Request) -> bool:
        """Whether there are blocks for a request of another replica, without any from the cache."""
        return not self.scheduler.kv.missing(request, request.spec.max_slots, ()).is_any

    def movable(self, now: float) -> Iterator[Request]:
        """The waiting requests that may move, in their order."""
        is_lost = self.engine.rejection() is not None
        most = MAX_CRASHES if self.engine.failure is None else inf
        for request in self.pool.policy.order(now):
            if request.state is not WAITING or request.found.awaits_lookup or request.num_in_flight:
                continue
            has_started = request.times.admitted_at is not None
            if not has_started or (is_lost and request.num_crashes <= most):
                yield request


def _beginning(request: Request) -> Beginning | None:
    """What requests that follow each other have in common; None if no block is full or hashed."""
    hashes = request.block_hashes
    return (request.spec.caching.key, hashes[0]) if hashes else None
