"""The cache_aware policy of smg 1.13 for HTTP workers, with its defaults, step by step.

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

import numpy

from engine.cost.model import CostModel
from engine.research.fleet.router import OVERLOADED, Affinity, Loads
from engine.simulated.trace import Arrival

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
