"""Simulated runs as `engine.simulated.run` makes them, with leaps where they are possible.

Capacity planning: searches for the highest load that a setup serves within an SLO.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from engine.errors import EngineError
from engine.iteration import Observer
from engine.request import Request
from engine.research.leaping.leap import Leaps
from engine.research.leaping.replica import OnEnd, Replica
from engine.simulated import run
from engine.simulated.executor import KnownCost
from engine.simulated.figures import Figures, summarise
from engine.simulated.play import OnAccepted, Outcome, PlayResult, RequestLost, outcome_of
from engine.simulated.record import Recorder
from engine.simulated.replay import RecordedOutputs, RecordedRequest
from engine.simulated.run import Setup
from engine.simulated.trace import Arrival, at_rate
from engine.step import RequestId


def simulate(setup: Setup, arrivals: Sequence[Arrival], also: Observer | None = None) -> Figures:
    """The figures of `engine.simulated.run.simulate`, bit for bit, several times as fast if no
    event has to be reported."""
    if also is not None or not may_leap(setup, arrivals):
        return run.simulate(setup, arrivals, also)
    recorder = run.recorder_of(arrivals)
    arrivals = run.prepared(setup, arrivals)
    outputs = RecordedOutputs() if run.is_recorded(arrivals) else None
    on_accepted = outputs.accepted if outputs is not None else None
    played = play_leaping(partial(build_replica, setup, recorder, outputs), arrivals, on_accepted)
    return summarise(setup.label, played, recorder, setup.slo)


def play_leaping(
    replica: Callable[[OnEnd], Replica],
    arrivals: Sequence[Arrival],
    on_accepted: OnAccepted | None = None,
) -> PlayResult:
    """Like `play_all` on a `Replica` with these callbacks, several times as fast. No client
    disconnects and no request has a deadline."""
    outcomes: dict[int, Outcome] = {}
    lost: dict[int, RequestLost] = {}
    numbers: dict[RequestId, int] = {}

    def on_end(request: Request) -> None:
        index = numbers.pop(request.request_id)
        outcomes[index] = outcome_of(arrivals[index], request)

    served = replica(on_end)
    now = 0.0
    for index, arrival in enumerate(arrivals):
        if arrival.at > now:
            now += arrival.at - now  # rounded as the timer of `_Clients.send` is
            served.advance(now)
        try:
            request = served.add(arrival.spec(index), now)
        except EngineError as error:
            lost[index] = RequestLost(arrival, error)
            continue
        numbers[request.request_id] = index
        if on_accepted is not None:
            on_accepted(request, arrival)
    served.advance(inf)
    return PlayResult([outcomes[i] for i in sorted(outcomes)], [lost[i] for i in sorted(lost)])


def build_replica(
    setup: Setup, recorder: Recorder, outputs: RecordedOutputs | None, on_end: OnEnd
) -> Replica:
    """A new replica of the simulated system; `may_leap` is true of its arrivals."""
    cost = KnownCost(setup.cost)
    scheduler = run.build_scheduler(setup, cost, recorder)
    recorder.watch(scheduler)
    leaps = Leaps(scheduler, cost, recorder, outputs)
    return Replica(scheduler, run.build_executor(setup, outputs), leaps, on_end)


def may_leap(setup: Setup, arrivals: Sequence[Arrival]) -> bool:
    """Whether a `Replica` can play these arrivals: one step in flight, and no request that ends
    from outside or is not planned in every iteration."""
    if setup.stages > 1 or setup.lookahead:
        return False
    if setup.num_states or setup.windows != (None,):
        return False
    return all(_is_plain(arrival) for arrival in arrivals)


def _is_plain(arrival: Arrival) -> bool:
    if arrival.patience is not None:
        return False
    params = arrival.params if isinstance(arrival, RecordedRequest) else None
    if params is None:
        return True
    limits = (params.deadline, params.itl_goal, params.grammar)
    return not params.is_background and all(limit is None for limit in limits)


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
