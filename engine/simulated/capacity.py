"""Capacity planning: the highest load that a setup carries within an SLO, by search."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.simulated.run import simulate
from engine.simulated.trace import at_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.simulated.figures import Figures
    from engine.simulated.run import Setup
    from engine.simulated.trace import Arrival

_MAX_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate found within the SLO, 0 if even the lowest tried was beyond it, and
    every run of the search by its rate."""

    rate: float
    runs: "dict[float, Figures]"


def highest(holds: "Callable[[float], bool]", start: float, tolerance: float = 0.02) -> float:
    """The largest load for which `holds`, from below and within `tolerance` of it.

    `holds` is true up to some load and false beyond. Doubles or halves from `start` until the
    load is enclosed, then bisects; 0 if nothing holds down to `start` / 2 ** 20. A load that
    never fails ends the search at `start` * 2 ** 20.
    """
    low, high = _enclose(holds, start)
    while low > 0.0 and high > low * (1.0 + tolerance):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _enclose(holds: "Callable[[float], bool]", start: float) -> tuple[float, float]:
    """Neighbouring loads, of which the first holds and the second does not."""
    factor = 2.0 if holds(start) else 0.5
    load = start
    for _ in range(_MAX_DOUBLINGS):
        before, load = load, load * factor
        if holds(load) != (factor > 1.0):
            return min(before, load), max(before, load)
    return (load, load) if factor > 1.0 else (0.0, load)


def capacity(
    setup: "Setup",
    arrivals: "Sequence[Arrival]",
    accepts: "Callable[[Figures], bool]",
    start: float,
    tolerance: float = 0.02,
) -> Capacity:
    """How many requests a second of this pattern `setup` carries while `accepts` its figures."""
    runs: dict[float, Figures] = {}

    def holds(rate: float) -> bool:
        runs[rate] = simulate(setup, at_rate(arrivals, rate))
        return accepts(runs[rate])

    return Capacity(highest(holds, start, tolerance), runs)
