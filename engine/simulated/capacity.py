"""Capacity planning: searches for the highest load that a setup serves within an SLO."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.simulated.figures import Figures
from engine.simulated.run import Setup, simulate
from engine.simulated.trace import Arrival, at_rate

_MAX_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate within the SLO in requests/s, 0 if the lowest one tried already violates
    the SLO, and every run of the search by its rate."""

    rate: float
    runs: dict[float, Figures]


def highest_load(holds: Callable[[float], bool], start: float, tolerance: float = 0.02) -> float:
    """The largest load for which `holds` is true, from below and within a relative `tolerance`.

    `holds` must be true up to some load and false above it. The search doubles or halves `start`
    until that load is bracketed, then bisects. It returns 0 if `holds` is false down to
    `start` / 2 ** 20, and `start` * 2 ** 20 if it is never false.
    """
    low, high = _bracket(holds, start)
    while low > 0.0 and high > low * (1.0 + tolerance):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _bracket(holds: Callable[[float], bool], start: float) -> tuple[float, float]:
    """Two loads a factor of two apart; `holds` is true for the first and false for the second."""
    factor = 2.0 if holds(start) else 0.5
    load = start
    for _ in range(_MAX_DOUBLINGS):
        before, load = load, load * factor
        if holds(load) != (factor > 1.0):
            return min(before, load), max(before, load)
    return (load, load) if factor > 1.0 else (0.0, load)


def capacity(
    setup: Setup,
    arrivals: Sequence[Arrival],
    accepts: Callable[[Figures], bool],
    start: float,
    tolerance: float = 0.02,
) -> Capacity:
    """The highest rate of this arrival pattern at which `accepts` is true of the run's figures."""
    runs: dict[float, Figures] = {}

    def holds(rate: float) -> bool:
        runs[rate] = simulate(setup, at_rate(arrivals, rate))
        return accepts(runs[rate])

    return Capacity(highest_load(holds, start, tolerance), runs)
