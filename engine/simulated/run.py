"""One simulated run: a new scheduler, KV ledger and policy on given hardware, and its metrics."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.events import ObserverGroup
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy import lengths_of
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.figures import SLO, Figures, summarise
from engine.simulated.known_cost import KnownCost
from engine.simulated.leap import Leaps
from engine.simulated.play import play_all, play_leaping
from engine.simulated.record import Recorder
from engine.simulated.replay import (
    RecordedOutputs,
    RecordedRequest,
    with_unknown_lengths,
)
from engine.simulated.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.control.settings import SchedulerSettings
    from engine.cost.model import CostModel
    from engine.events import Observer
    from engine.policy.port import Policy
    from engine.ports import Cost
    from engine.simulated.replica import OnEnd
    from engine.simulated.trace import Arrival

NO_SLO = SLO()
_NUM_MOMENTS = 500  # samples of the state while requests arrive


@dataclass(frozen=True, slots=True)
class Setup:
    """All inputs of a run except its arrivals; equal setups and arrivals give equal figures.

    `windows` has the window of each layer group; `num_slots` tokens fit if no window gives blocks
    back. `num_states` and `num_host_states` are slots for the states of recurrent layers.
    """

    label: str
    settings: "SchedulerSettings"
    policy: "Callable[[Cost], Policy]"
    cost: "CostModel"
    num_slots: int
    block_size: int = 16
    stages: int = 1
    slo: SLO = NO_SLO
    is_oracle: bool = False  # `max_tokens` is set to the output length, which the policy uses
    lookahead: int = 0
    num_host_slots: int = 0
    slot_seconds: float = 0.0  # to move one slot's KV between device and host, on every stage
    windows: "tuple[int | None, ...]" = (None,)
    num_states: int = 0
    num_host_states: int = 0
    state_seconds: float = 0.0  # to move one state between device and host, on every stage
    leaps: bool = True  # compute many iterations of the same decodes at once, if possible


def simulate(
    setup: Setup, arrivals: "Sequence[Arrival]", also: "Observer | None" = None
) -> Figures:
    """Run the arrivals, which are sorted by time, until every request has ended. `also` observes
    all events."""
    recorder = Recorder(period=arrivals[-1].at / _NUM_MOMENTS if arrivals else 1.0)
    arrivals = prepared(setup, arrivals)
    outputs = RecordedOutputs() if is_recorded(arrivals) else None
    on_accepted = outputs.accepted if outputs is not None else None
    if also is None and may_leap(setup, arrivals):
        replica = partial(build_replica, setup, recorder, outputs)
        played = play_leaping(replica, arrivals, on_accepted)
    else:
        observer = ObserverGroup(recorder, also) if also is not None else recorder
        scheduler = _scheduler(setup, KnownCost(setup.cost), observer)
        recorder.watch(scheduler)
        executor = _executor(setup, outputs)
        played = play_all(scheduler, executor, arrivals, on_accepted, setup.lookahead)
    return summarise(setup.label, played, recorder, setup.slo)


def prepared(setup: Setup, arrivals: "Sequence[Arrival]") -> "Sequence[Arrival]":
    """The arrivals with the lengths that the policy may know: none in advance if it learns them,
    all of them if it is an oracle."""
    if lengths_of(setup.policy(KnownCost(setup.cost))) is not None:
        arrivals = with_unknown_lengths(arrivals, setup.settings.max_model_len)
    if setup.is_oracle:
        arrivals = [
            one.with_known_length() if isinstance(one, RecordedRequest) else one for one in arrivals
        ]
    return arrivals


def is_recorded(arrivals: "Sequence[Arrival]") -> bool:
    """Whether the arrivals say which tokens the outputs have."""
    return any(isinstance(arrival, RecordedRequest) for arrival in arrivals)


def build_replica(
    setup: Setup, recorder: Recorder, outputs: RecordedOutputs | None, on_end: "OnEnd"
) -> Replica:
    """A new replica of the simulated system; `may_leap` is true of its arrivals."""
    cost = KnownCost(setup.cost)
    scheduler = _scheduler(setup, cost, recorder)
    recorder.watch(scheduler)
    leaps = Leaps(scheduler, cost, recorder, outputs)
    return Replica(scheduler, _executor(setup, outputs), leaps, on_end)


def _scheduler(setup: Setup, cost: KnownCost, observer: "Observer") -> IterationScheduler:
    size, num_groups = setup.block_size, len(setup.windows)
    grows = setup.settings.admission is Admission.GROW
    ledger = KVLedger(
        KVShape(
            max(1, setup.num_slots // size) * num_groups,
            size,
            setup.num_host_slots // size * num_groups,
            windows=setup.windows if grows else (None,) * num_groups,
            chunk=setup.settings.max_batch_tokens * (1 + setup.lookahead),
            num_states=setup.num_states,
            num_host_states=setup.num_host_states,
        )
    )
    return IterationScheduler(setup.settings, ledger, setup.policy(cost), observer, cost)


def _executor(setup: Setup, outputs: RecordedOutputs | None) -> SimulatedExecutor:
    block_seconds = setup.slot_seconds * setup.block_size / len(setup.windows)
    return SimulatedExecutor(
        setup.cost, setup.stages, outputs, setup.lookahead, block_seconds, setup.state_seconds
    )


def may_leap(setup: Setup, arrivals: "Sequence[Arrival]") -> bool:
    """Whether a `Replica` can play these arrivals: one step in flight, and no request that ends
    from outside or is not planned in every iteration."""
    if not setup.leaps or setup.stages > 1 or setup.lookahead:
        return False
    if setup.num_states or setup.windows != (None,):
        return False
    return all(_is_plain(arrival) for arrival in arrivals)


def _is_plain(arrival: "Arrival") -> bool:
    if arrival.patience is not None:
        return False
    params = arrival.params if isinstance(arrival, RecordedRequest) else None
    if params is None:
        return True
    limits = (params.deadline, params.itl_goal, params.grammar)
    return not params.is_background and all(limit is None for limit in limits)
