"""The metrics of a simulated run: latencies, goodput within an SLO, and the state over time.

TTFT: arrival to first token. ITL: gaps between tokens of one request, pooled. TPOT: (JCT - TTFT)
/ (tokens - 1). JCT: arrival to last token. Normalized latency: JCT / tokens (Orca, section 6).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy

from engine.errors import InvalidRequest
from engine.simulated.play import Outcome, PlayResult
from engine.simulated.record import Moment, Recorder
from engine.simulated.trace import mean_rate

MEASURES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "norm": "normalized latency",
    "jct": "JCT",
}


@dataclass(frozen=True, slots=True)
class SLO:
    """Latency limits in seconds which a request must meet to count as good; None is no limit."""

    ttft: float | None = None
    tpot: float | None = None
    norm: float | None = None
    jct: float | None = None

    @classmethod
    def parse(cls, text: str) -> "SLO":
        """Parse text such as `ttft=1,tpot=0.1`. Raises `InvalidRequest` that names the part."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                limits[name] = float(value)
            except ValueError:
                raise InvalidRequest(f"{part!r} is not a limit such as ttft=1", "slo") from None
            if not limits[name] > 0.0:
                raise InvalidRequest(f"{part!r} must be above 0", "slo")
        unknown = limits.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise InvalidRequest(f"unknown limit {min(unknown)!r}; the limits are {known}", "slo")
        return cls(**limits)

    def is_met(self, outcome: Outcome) -> bool:
        limits = (
            (self.ttft, outcome.ttft),
            (self.tpot, outcome.tpot or 0.0),
            (self.norm, outcome.normalized_latency),
            (self.jct, outcome.jct),
        )
        return all(limit is None or seconds <= limit for limit, seconds in limits)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Count, mean, percentiles (linearly interpolated) and maximum of samples in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    highest: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Distribution | None":
        """None if there are no samples."""
        if not len(samples):
            return None
        values = numpy.asarray(samples, dtype=numpy.float64)
        p50, p90, p95, p99 = numpy.percentile(values, (50, 90, 95, 99)).tolist()
        return cls(len(values), float(values.mean()), p50, p90, p95, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class Figures:
    """The metrics of one run. Rates are per second, from the first arrival to the last token."""

    label: str
    offered: float  # requests/s that arrived
    num_arrived: int
    num_finished: int
    seconds: float
    output_tokens: int
    cached_tokens: int  # prompt tokens found in the KV cache
    num_iterations: int
    busy_seconds: float
    num_preempted: int  # preemptions, by recomputation or by swapping out
    num_swapped: int  # preemptions by swapping out
    num_ahead: int  # those swapped out before the space was needed
    swapped_slots: int  # slots moved between device and host, in both directions
    num_good: int  # finished within the SLO
    spreads: dict[str, Distribution | None]
    moments: list[Moment]

    @property
    def throughput(self) -> float:
        """Finished requests/s."""
        return self.num_finished / self.seconds if self.seconds else 0.0

    @property
    def output_rate(self) -> float:
        """Output tokens/s."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float:
        """Requests/s that finished within the SLO."""
        return self.num_good / self.seconds if self.seconds else 0.0

    @property
    def attainment(self) -> float:
        """The fraction of arrived requests which finished within the SLO."""
        return self.num_good / self.num_arrived if self.num_arrived else 0.0

    @property
    def peak_waiting(self) -> int:
        return max((moment.waiting for moment in self.moments), default=0)

    def at(self, measure: str, point: str) -> float | None:
        """A value in seconds, such as `at("ttft", "p99")`; None if there are no samples."""
        spread = self.spreads[measure]
        return None if spread is None else float(getattr(spread, point))

    def as_json(self) -> dict[str, object]:
        """All fields and the derived rates."""
        names = ("throughput", "output_rate", "goodput", "attainment")
        rates = {name: getattr(self, name) for name in names}
        moments = [moment._asdict() for moment in self.moments]
        return asdict(self) | rates | {"moments": moments}


def summarise(label: str, played: PlayResult, recorder: Recorder, slo: SLO) -> Figures:
    """The metrics of the finished requests; rejected and lost ones only lower the attainment."""
    outcomes = played.outcomes
    arrivals = sorted(
        [one.arrival for one in outcomes] + [one.arrival for one in played.lost],
        key=lambda arrival: arrival.at,
    )
    ended = max((one.arrival.at + one.jct for one in outcomes), default=0.0)
    return Figures(
        label=label,
        offered=mean_rate(arrivals),
        num_arrived=len(arrivals),
        num_finished=len(outcomes),
        seconds=ended - arrivals[0].at if outcomes else 0.0,
        output_tokens=sum(one.arrival.output_len for one in outcomes),
        cached_tokens=sum(one.num_cached for one in outcomes),
        num_iterations=recorder.num_iterations,
        busy_seconds=recorder.busy_seconds,
        num_preempted=recorder.num_recomputed + recorder.num_swapped,
        num_swapped=recorder.num_swapped,
        num_ahead=recorder.num_ahead,
        swapped_slots=recorder.swapped_blocks * recorder.block_size,
        num_good=sum(slo.is_met(one) for one in outcomes),
        spreads={
            "ttft": Distribution.of([one.ttft for one in outcomes]),
            "itl": Distribution.of(recorder.gaps),
            "tpot": Distribution.of([one.tpot for one in outcomes if one.tpot is not None]),
            "norm": Distribution.of([one.normalized_latency for one in outcomes]),
            "jct": Distribution.of([one.jct for one in outcomes]),
        },
        moments=recorder.moments,
    )
