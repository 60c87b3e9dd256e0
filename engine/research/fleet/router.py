"""Routers: which replica gets a request, from what a router in front of real replicas knows.

A router sees the load reports of the last epoch, and counts what it has routed since. It knows no
replica's KV cache: it remembers which prompts it sent where, as the cache-aware routers of SGLang
and vLLM do, in the named blocks of a trace (512 tokens, or those of a recording).

The cache_aware policy of smg 1.13 for HTTP workers, with its defaults, step by step.

Source: `model_gateway/src/policies/cache_aware.rs` and `least_load.rs` in smg's source release.

1. Load reports are polled every 10 s. A worker with 8 waiting requests or more in its last report
   is left out until the next one, unless all workers have as many; then one with the fewest
   requests in flight is used.
2. The workers that were sent the longest matching prefix are the holders, if that prefix is more
   than 0.3 of the prompt. A holder is skipped if its requests in flight are more than 1.5 times
   the mean and more than a margin above it.
3. Among the remaining holders (or, without any, among all workers that are not above the mean in
   this way) the worker with the least expected wait gets the request: the tokens of the last
   report and of the requests sent since, divided by the reported throughput, and a penalty for a
   full KV cache. smg does not know prompt lengths of HTTP requests, so each counts as 1,024 tokens,
   also when it has ended: until the next report a worker's wait can only grow. A worker that was
   added since the last poll has the least wait of the others, and one for its requests in flight.

Workers with an equal wait are chosen at random. Matches are counted in blocks of tokens here, in
characters there.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from random import Random
from typing import Protocol

import numpy

from engine.cost.model import CostModel
from engine.replicas.placement import growth
from engine.research.fleet.shard import LoadReport
from engine.simulated.replay import RecordedRequest
from engine.simulated.trace import SHARED_BLOCK, Arrival

CACHE_THRESHOLD = 0.3  # share of a prompt that must match for affinity to decide
SPILL_ABS, SPILL_REL, MIN_SPILL = 64.0, 1.5, 4.0  # requests above the mean, and times the mean
OVERLOADED = 8  # waiting requests from which on a replica gets no more if another has fewer


class Loads:
    """The last report of each replica, and what was routed to it since."""

    def __init__(self, most: int, seed: int = 0) -> None:
        self.random = Random(seed)  # for routers that choose among equal replicas at random
        self.penalty = numpy.full(most, numpy.inf)  # infinite for a replica that takes no requests
        self.live = numpy.zeros(most)
        self.tokens = numpy.zeros(most)
        self.delay = numpy.zeros(most)
        self.waiting = numpy.zeros(most)
        self.waiting_tokens = numpy.zeros(most)
        self.throughput = numpy.zeros(most)
        self.usage = numpy.zeros(most)
        self.active: list[int] = []

    def activate(self, replicas: Iterable[int]) -> None:
        """Let these replicas, and no others, take requests from now on."""
        self.active = sorted(replicas)
        self.penalty[:] = numpy.inf
        self.penalty[self.active] = 0.0

    def report(self, report: LoadReport) -> None:
        """A replica has reported its load."""
        at = report.replica
        self.live[at] = report.num_live
        self.tokens[at] = report.tokens
        self.waiting[at] = report.waiting
        self.waiting_tokens[at] = report.waiting_tokens
        self.delay[at] = report.delay
        self.throughput[at] = report.throughput
        self.usage[at] = report.usage

    def least(self, load: "numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]") -> int:
        """The active replica of least load, the first one if several have it."""
        return int((load + self.penalty).argmin())


class Router(Protocol):
    """Chooses an active replica for each request. Routers are made with the loads, the replicas'
    cost model, and the number of 512-token blocks that fit into a replica's KV cache."""

    def route(self, arrival: Arrival) -> int: ...


class RoundRobin:
    """Each active replica in turn."""

    def __init__(self, loads: Loads, cost: CostModel, cache_blocks: int) -> None:
        self._loads = loads
        self._next = 0

    def route(self, arrival: Arrival) -> int:
        active = self._loads.active
        self._next = (self._next + 1) % len(active)
        return active[self._next]


class LeastTokens:
    """The replica with the fewest tokens of live requests."""

    def __init__(self, loads: Loads, cost: CostModel, cache_blocks: int) -> None:
        self._loads = loads

    def route(self, arrival: Arrival) -> int:
        replica = self._loads.least(self._loads.tokens)
        self._loads.tokens[replica] += arrival.prompt_len
        return replica


class _Sent:
    """The prompts that were sent to each replica: for each block, after those before it, the
    replicas that got it. Of each replica the `most` blocks that were sent last are kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._holders: dict[tuple[int, int], set[int]] = {}
        self._recent: dict[int, OrderedDict[tuple[int, int], None]] = {}

    def matches(self, arrival: Arrival) -> dict[int, int]:
        """The number of leading blocks that were sent to each replica, if any was."""
        found: dict[int, int] = {}
        holders: set[int] | None = None
        for depth, block in enumerate(_blocks(arrival)):
            here = self._holders.get((depth, block), set())
            holders = here if holders is None else holders & here
            if not holders:
                break
            found.update(dict.fromkeys(holders, depth + 1))
        return found

    def add(self, arrival: Arrival, replica: int) -> None:
        """The prompt was sent to this replica."""
        recent = self._recent.setdefault(replica, OrderedDict())
        for key in enumerate(_blocks(arrival)):
            recent[key] = None
            recent.move_to_end(key)
            self._holders.setdefault(key, set()).add(replica)
        while len(recent) > self._most:
            key, _ = recent.popitem(last=False)
            self._holders[key].discard(replica)
            if not self._holders[key]:
                del self._holders[key]


def _blocks(arrival: Arrival) -> Sequence[int]:
    names = arrival.names if isinstance(arrival, RecordedRequest) else arrival.blocks
    return names[: arrival.prompt_len // block_size_of(arrival)]


def block_size_of(arrival: Arrival) -> int:
    """Tokens of a named block of the arrival's prompt."""
    return arrival.block_size if isinstance(arrival, RecordedRequest) else SHARED_BLOCK


class Affinity:
    """The active replicas that hold a prompt's longest prefix, and whether one has too many
    requests: the rules of smg's cache_aware policy, with its defaults."""

    def __init__(self, loads: Loads, cache_blocks: int) -> None:
        self._loads = loads
        self._sent = _Sent(cache_blocks)

    def sent(self, arrival: Arrival, replica: int) -> None:
        """The prompt was sent to this replica."""
        self._sent.add(arrival, replica)

    def holders(self, arrival: Arrival, replicas: Sequence[int]) -> list[int]:
        """The replicas among these that were sent the longest prefix of the prompt that any replica
        was sent; none if it is not long enough."""
        matches = self._sent.matches(arrival)
        deepest = max(matches.values(), default=0)
        if deepest * block_size_of(arrival) <= CACHE_THRESHOLD * arrival.prompt_len:
            return []
        return [replica for replica in replicas if matches.get(replica) == deepest]

    def spills(self, replica: int, mean: float) -> bool:
        """Whether the replica has too many requests beside a mean of `mean`. The margin is at most
        two standard deviations of a Poisson number with this mean, but at least `MIN_SPILL`."""
        margin = min(SPILL_ABS, max(MIN_SPILL, ceil(2.0 * mean**0.5)))
        live = float(self._loads.live[replica])
        return live > mean + margin and live > SPILL_REL * mean


class PrefixAffinity:
    """The replica that was sent the longest prefix of the prompt, if it is long enough and the
    replica is not far above the mean load; else the one with the fewest requests. Loads are those
    of the last epoch (`SmgCacheAware` has reports that are up to 10 s old)."""

    def __init__(self, loads: Loads, cost: CostModel, cache_blocks: int) -> None:
        self._loads = loads
        self._affinity = Affinity(loads, cache_blocks)

    def route(self, arrival: Arrival) -> int:
        loads = self._loads
        overload = numpy.where(loads.waiting >= OVERLOADED, 1e9, 0.0)
        replica = self._holder(arrival)
        if replica is None or overload[replica]:
            replica = loads.least(loads.live + overload)
        loads.live[replica] += 1
        self._affinity.sent(arrival, replica)
        return replica

    def _holder(self, arrival: Arrival) -> int | None:
        """The holder with the fewest requests, unless it has too many."""
        loads = self._loads
        holders = self._affinity.holders(arrival, loads.active)
        if not holders:
            return None
        best = min(holders, key=lambda replica: (loads.live[replica], replica))
        mean = float(loads.live[loads.active].mean())
        return None if self._affinity.spills(best, mean) else best


class LeastForecast:
    """Two tiers that share one cost model: a replica forecasts how much later a new request would
    end there, and the router adds what it has sent since, the uncached part of this prompt, and
    the time by which that part delays each live request. It takes the replica where the sum of all
    completion times grows least."""

    def __init__(self, loads: Loads, cost: CostModel, cache_blocks: int) -> None:
        self._loads = loads
        self._cost = cost
        self._sent = _Sent(cache_blocks)

    def route(self, arrival: Arrival) -> int:
        loads = self._loads
        seconds = self._prefill(arrival, 0)
        replica = loads.least(loads.delay + seconds * loads.live)
        least = growth(loads.delay[replica], seconds, loads.live[replica])
        for other, blocks in sorted(self._sent.matches(arrival).items()):
            own = self._prefill(arrival, blocks)
            delay = loads.delay[other] + loads.penalty[other]
            grows = growth(delay, own, loads.live[other])
            if grows < least:
                replica, seconds, least = other, own, grows
        loads.delay[replica] += seconds
        loads.live[replica] += 1
        self._sent.add(arrival, replica)
        return replica

    def _prefill(self, arrival: Arrival, num_cached: int) -> float:
        """Seconds that the rest of the prompt adds to iterations."""
        start = min(num_cached * block_size_of(arrival), arrival.prompt_len - 1)
        return self._cost.compute(arrival.prompt_len - start, start) - self._cost.tokens(0)


POLL_SECONDS = 10.0
REQUEST_TOKENS = 1024.0  # assumed for a request of unknown length
THROUGHPUT = 2000.0  # tokens/s of a worker that reports none
KV_WEIGHT = 0.15  # seconds
TIE = 1e-6  # seconds

Workers = list[int]
Floats = numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]
Booleans = numpy.ndarray[tuple[int], numpy.dtype[numpy.bool_]]


class SmgCacheAware:
    """Keeps the last polled report of each worker, and the number of requests sent since."""

    def __init__(self, loads: Loads, cost: CostModel, cache_blocks: int) -> None:
        self._loads = loads
        self._affinity = Affinity(loads, cache_blocks)
        self._poll_at = 0.0
        self._has_report = numpy.zeros_like(loads.live, dtype=bool)
        self._reported = loads.live.copy()  # requests, running and waiting
        self._is_overloaded = loads.waiting >= OVERLOADED
        self._rate = loads.throughput.copy()  # tokens/s; 0 if none is reported
        self._kv_wait = numpy.zeros_like(loads.live)  # seconds
        self._sent = numpy.zeros_like(loads.live)  # since the report

    def route(self, arrival: Arrival) -> int:
        loads = self._loads
        if arrival.at >= self._poll_at:
            self._poll(arrival.at)
        eligible = [worker for worker in loads.active if not self._is_overloaded[worker]]
        if eligible:
            worker = self._least_wait(self._candidates(arrival, eligible))
            self._affinity.sent(arrival, worker)
        else:
            worker = self._fewest_in_flight()
        self._sent[worker] += 1
        loads.live[worker] += 1
        return worker

    def _fewest_in_flight(self) -> int:
        live = self._loads.live[self._loads.active]
        return self._loads.active[self._any_of(live <= live.min())]

    def _any_of(self, choices: Booleans) -> int:
        """One of the places that are true, at random."""
        (places,) = numpy.nonzero(choices)
        return int(places[self._loads.random.randrange(len(places))])

    def _poll(self, now: float) -> None:
        """The active workers report their loads."""
        loads = self._loads
        while self._poll_at <= now:
            self._poll_at += POLL_SECONDS
        self._has_report = loads.penalty == 0.0
        self._reported[:] = loads.live
        self._is_overloaded = loads.waiting >= OVERLOADED
        self._rate[:] = loads.throughput
        usage = numpy.minimum(loads.usage, 0.999)
        self._kv_wait = KV_WEIGHT * usage / (1.0 - usage)
        self._sent[:] = 0.0

    def _candidates(self, arrival: Arrival, eligible: Workers) -> Workers:
        """The holders; without any, the workers that are not above the mean."""
        affinity = self._affinity
        mean = float(self._loads.live[eligible].mean())
        holders = affinity.holders(arrival, eligible)
        found = [worker for worker in holders if not affinity.spills(worker, mean)]
        if not found and holders:
            found = [worker for worker in eligible if not affinity.spills(worker, mean)]
        return found or eligible

    def _least_wait(self, workers: Workers) -> int:
        """The worker with the least expected wait; one of them at random if several have it."""
        if len(workers) == 1:
            return workers[0]
        waits = self._waits(workers)
        return workers[self._any_of(waits <= waits.min() + TIE)]

    def _waits(self, workers: Workers) -> Floats:
        """The expected wait of each worker in seconds; requests in flight if none has a report."""
        live, has_report = self._loads.live[workers], self._has_report[workers]
        if not has_report.any():
            return live
        rates = self._rate[workers]
        requests = numpy.maximum(live, self._reported[workers] + self._sent[workers])
        seconds = requests * REQUEST_TOKENS / numpy.where(rates > 0.0, rates, THROUGHPUT)
        waits = seconds + self._kv_wait[workers]
        if has_report.all():
            return waits
        known = rates[has_report & (rates > 0.0)]
        mean_rate = float(known.mean()) if len(known) else THROUGHPUT
        least = float(waits[has_report].min())
        return numpy.where(has_report, waits, least + live * REQUEST_TOKENS / mean_rate)


ROUTERS: dict[str, Callable[[Loads, CostModel, int], Router]] = {
    "round-robin": RoundRobin,
    "least-tokens": LeastTokens,
    "prefix": PrefixAffinity,
    "smg-cache-aware": SmgCacheAware,
    "forecast": LeastForecast,
}
FORECASTING = frozenset({"forecast"})  # routers that use `LoadReport.delay`
