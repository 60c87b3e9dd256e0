"""Simulated runs as `engine.simulated.run` makes them, with leaps where they are possible."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from engine.errors import EngineError
from engine.iteration import Observer
from engine.request import Request
from engine.research.leaping.leap import Leaps
from engine.research.leaping.replica import OnEnd, Replica
from engine.simulated import run
from engine.simulated.figures import Figures, summarise
from engine.simulated.known_cost import KnownCost
from engine.simulated.play import OnAccepted, Outcome, PlayResult, RequestLost, outcome_of
from engine.simulated.record import Recorder
from engine.simulated.replay import RecordedOutputs, RecordedRequest
from engine.simulated.run import Setup
from engine.simulated.trace import Arrival
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
