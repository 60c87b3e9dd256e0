"""Capacity planning for a fleet: the fewest replicas that keep percentiles of latencies in limits.

The search assumes that more replicas are never worse. It begins at the number that the work of the
requests needs without any waiting, doubles it until the goals are met, and bisects.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from engine.errors import InvalidRequest
from engine.research.fleet.figures import FleetFigures
from engine.simulated.run import Setup
from engine.simulated.trace import Arrival

MEASURES = ("ttft", "itl", "tpot", "norm", "jct")
POINTS = ("mean", "p50", "p90", "p95", "p99")


class Goal(NamedTuple):
    """A percentile (or the mean) of a latency must not exceed `seconds`."""

    measure: str
    point: str
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.measure}.{self.point}"


@dataclass(frozen=True, slots=True)
class Goals:
    """Limits that all have to be met."""

    limits: tuple[Goal, ...]

    @classmethod
    def parse(cls, text: str) -> "Goals":
        """Parse text such as `ttft.p99=2,itl.p99=0.1`. Raises `InvalidRequest`."""
        return cls(tuple(_goal(part.strip()) for part in text.split(",")))

    def misses(self, figures: FleetFigures) -> list[str]:
        """The limits that are not met, by name; `done` if some requests did not finish."""
        found = [] if figures.num_finished == figures.num_arrived else ["done"]
        for goal in self.limits:
            value = figures.at(goal.measure, goal.point)
            if value is not None and value > goal.seconds:
                found.append(goal.name)
        return found


def _goal(part: str) -> Goal:
    name, _, value = part.partition("=")
    measure, _, point = name.partition(".")
    if measure not in MEASURES or point not in POINTS:
        raise InvalidRequest(
            f"{part!r} is not a goal such as ttft.p99=2; the latencies are {', '.join(MEASURES)}, "
            f"the points {', '.join(POINTS)}",
            "goal",
        )
    try:
        seconds = float(value)
    except ValueError:
        raise InvalidRequest(f"{part!r} has no number of seconds", "goal") from None
    if not seconds > 0.0:
        raise InvalidRequest(f"{part!r} must be above 0 seconds", "goal")
    return Goal(measure, point, seconds)


@dataclass(frozen=True, slots=True)
class Plan:
    """The fewest replicas that meet the goals, None if `most` do not; every run of the search by
    its number of replicas."""

    replicas: int | None
    runs: dict[int, FleetFigures]


def fewest_replicas(
    simulate: Callable[[int], FleetFigures], goals: Goals, start: int, most: int
) -> Plan:
    """Search from `start` replicas for the fewest that meet the goals, at most `most`."""
    runs: dict[int, FleetFigures] = {}

    def is_enough(replicas: int) -> bool:
        runs[replicas] = simulate(replicas)
        return not goals.misses(runs[replicas])

    low, high = 0, min(start, most)  # low is too few; nothing is known about high
    while not is_enough(high):
        low = high
        if high == most:
            return Plan(None, runs)
        high = min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return Plan(high, runs)


def replicas_for_work(setup: Setup, arrivals: Sequence[Arrival]) -> int:
    """The replicas that are busy all the time if prompts are not cached and every decode runs in
    the largest batch: about the fewest that can serve the load."""
    cost, count = setup.cost, len(arrivals)
    lengths = [one.prompt_len + one.output_len / 2 for one in arrivals]
    context = sum(lengths) / count
    batch = max(1, min(setup.settings.max_batch_size, int(setup.num_slots / context)))
    per_decode = (cost.tokens(batch) + cost.per_slot * context * batch) / batch
    piece = setup.settings.max_batch_tokens
    per_token = cost.tokens(piece) / piece
    seconds = sum([one.prompt_len * per_token + one.output_len * per_decode for one in arrivals])
    span = arrivals[-1].at - arrivals[0].at
    return max(1, ceil(seconds / span)) if span else 1
