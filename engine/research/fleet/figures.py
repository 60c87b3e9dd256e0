"""The metrics of a simulated fleet: latencies of all requests, cache, balance and cost."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy

from engine.research.fleet.shard import GAP_RATIO, ShardResult
from engine.simulated.figures import SLO, Distribution
from engine.simulated.trace import Arrival

Floats = numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]


class FleetMoment(NamedTuple):
    """The fleet at one time, as the router knows it."""

    at: float
    active: int  # replicas that take requests
    live: int  # requests
    waiting_tokens: int
    most_live: int  # requests of the replica that has most


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """The metrics of one run. Seconds; ITL is within 1 % of its true value."""

    label: str
    offered: float  # requests/s that arrived
    num_arrived: int
    num_finished: int
    num_good: int  # finished within the SLO
    seconds: float  # from the first arrival to the last token
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_iterations: int
    num_preempted: int
    replica_hours: float  # while requests arrive
    peak_replicas: int
    busy_mean: float  # share of the time, over the replicas
    busy_p5: float
    busy_p95: float
    requests_by_replica: list[int]  # finished ones, of replicas that got any
    spreads: dict[str, Distribution | None]
    moments: list[FleetMoment]

    @property
    def attainment(self) -> float:
        """The fraction of arrived requests which finished within the SLO."""
        return self.num_good / self.num_arrived if self.num_arrived else 0.0

    @property
    def throughput(self) -> float:
        """Finished requests/s."""
        return self.num_finished / self.seconds if self.seconds else 0.0

    @property
    def cached_share(self) -> float:
        """The fraction of prompt tokens that were found in a cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def at(self, measure: str, point: str) -> float | None:
        """A value in seconds, such as `at("ttft", "p99")`; None if there are no samples."""
        spread = self.spreads[measure]
        return None if spread is None else float(getattr(spread, point))

    def as_json(self) -> dict[str, object]:
        """All fields and the derived rates."""
        names = ("throughput", "attainment", "cached_share")
        rates = {name: getattr(self, name) for name in names}
        moments = [moment._asdict() for moment in self.moments]
        return asdict(self) | rates | {"moments": moments}


def summarise_fleet(
    label: str,
    arrivals: Sequence[Arrival],
    results: Sequence[ShardResult],
    moments: list[FleetMoment],
    seconds: float,
    slo: SLO,
) -> FleetFigures:
    """The metrics of all shards together, which do not depend on how replicas were divided."""
    numbers = numpy.concatenate([numpy.asarray(one.numbers, dtype=numpy.int64) for one in results])
    order = numpy.argsort(numbers)
    ttft, jct, cached = (
        numpy.concatenate([numpy.asarray(getattr(one, name)) for one in results])[order]
        for name in ("ttft", "jct", "cached")
    )
    numbers = numbers[order]
    lengths = numpy.array([arrivals[number].output_len for number in numbers], dtype=float)
    at = numpy.array([arrivals[number].at for number in numbers])
    tpot = (jct - ttft)[lengths > 1] / (lengths - 1)[lengths > 1]
    first = arrivals[0].at if arrivals else 0.0
    ended = float((at + jct).max()) - first if len(numbers) else 0.0
    span = arrivals[-1].at - first if arrivals else 0.0
    peak = max((moment.active for moment in moments), default=0)
    busy = [shard.busy[number] / ended for shard in results for number in shard.busy]
    busy += [0.0] * (peak - len(busy))
    shares = numpy.percentile(busy, (5, 95)) if busy else (0.0, 0.0)
    finished = {number: count for one in results for number, count in one.finished.items()}
    gaps: Counter[int] = Counter()
    for one in results:
        gaps.update(one.gaps)
    return FleetFigures(
        label=label,
        offered=(len(arrivals) - 1) / span if span else 0.0,
        num_arrived=len(arrivals),
        num_finished=len(numbers),
        num_good=_num_good(slo, ttft, jct, lengths),
        seconds=ended,
        prompt_tokens=sum(arrivals[number].prompt_len for number in numbers),
        cached_tokens=int(cached.sum()),
        output_tokens=int(lengths.sum()),
        num_iterations=sum(one.num_iterations for one in results),
        num_preempted=sum(one.num_preempted for one in results),
        replica_hours=seconds / 3600.0,
        peak_replicas=peak,
        busy_mean=float(numpy.sort(busy).mean()) if busy else 0.0,
        busy_p5=float(shares[0]),
        busy_p95=float(shares[1]),
        requests_by_replica=[count for _, count in sorted(finished.items())],
        spreads={
            "ttft": Distribution.of(ttft.tolist()),
            "itl": _distribution(gaps),
            "tpot": Distribution.of(tpot.tolist()),
            "norm": Distribution.of((jct / lengths).tolist()),
            "jct": Distribution.of(jct.tolist()),
        },
        moments=moments,
    )


def _num_good(slo: SLO, ttft: Floats, jct: Floats, lengths: Floats) -> int:
    """How many requests met all limits."""
    good = numpy.ones(len(ttft), dtype=bool)
    tpot = (jct - ttft) / numpy.maximum(1.0, lengths - 1)
    values = {"ttft": ttft, "tpot": tpot, "norm": jct / lengths, "jct": jct}
    for name, seconds in values.items():
        limit = getattr(slo, name)
        if limit is not None:
            good &= seconds <= limit
    return int(good.sum())


def _distribution(gaps: Counter[int]) -> Distribution | None:
    """The distribution of counts by bin; a bin stands for its middle."""
    if not gaps:
        return None
    bins = sorted(gaps)
    values = [float(GAP_RATIO ** (number + 0.5)) for number in bins]
    below = list(accumulate(gaps[number] for number in bins))
    count = below[-1]

    def point(share: float) -> float:
        return next(value for value, total in zip(values, below, strict=True) if total >= share)

    mean = sum(value * gaps[number] for value, number in zip(values, bins, strict=True)) / count
    p50, p90, p95, p99 = (point(percent / 100 * count) for percent in (50, 90, 95, 99))
    return Distribution(count, mean, p50, p90, p95, p99, values[-1])
