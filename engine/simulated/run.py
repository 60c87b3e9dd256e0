"""One simulated run: a new scheduler, KV ledger and policy on given hardware, and its metrics."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from engine.control.scheduler import IterationScheduler
from engine.events import ObserverGroup
from engine.kv.ledger import KVLedger
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
    from engine.simulated.trace import Arrival

NO_SLO = SLO()
_NUM_MOMENTS = 500  # samples of the state while requests arrive


@dataclass(frozen=True, slots=True)
class Setup:
    """All inputs of a run except its arrivals; equal setups and arrivals give equal figures."""

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
    leaps: bool = True  # compute many iterations of the same decodes at once, if possible


def simulate(
    setup: Setup, arrivals: "Sequence[Arrival]", also: "Observer | None" = None
) -> Figures:
    """Run the arrivals, which are sorted by time, until every request has ended. `also` observes
    all events."""
    recorder = Recorder(period=arrivals[-1].at / _NUM_MOMENTS if arrivals else 1.0)
    observer = ObserverGroup(recorder, also) if also is not None else recorder
    cost = KnownCost(setup.cost)
    size = setup.block_size
    ledger = KVLedger(max(1, setup.num_slots // size), size, setup.num_host_slots // size)
    scheduler = IterationScheduler(setup.settings, ledger, setup.policy(cost), observer, cost)
    recorder.watch(scheduler)
    if lengths_of(scheduler.policy) is not None:
        arrivals = with_unknown_lengths(arrivals, setup.settings.max_model_len)
    if setup.is_oracle:
        arrivals = [
            one.with_known_length() if isinstance(one, RecordedRequest) else one for one in arrivals
        ]
    outputs = (
        RecordedOutputs()
        if any(isinstance(arrival, RecordedRequest) for arrival in arrivals)
        else None
    )
    on_accepted = outputs.accepted if outputs is not None else None
    executor = SimulatedExecutor(
        setup.cost, setup.stages, outputs, setup.lookahead, setup.slot_seconds * size
    )
    if also is None and _may_leap(setup, arrivals):
        leaps = Leaps(scheduler, cost, recorder, outputs)
        replica = partial(Replica, scheduler, executor, leaps)
        played = play_leaping(replica, arrivals, on_accepted)
    else:
        played = play_all(scheduler, executor, arrivals, on_accepted, setup.lookahead)
    return summarise(setup.label, played, recorder, setup.slo)


def _may_leap(setup: Setup, arrivals: "Sequence[Arrival]") -> bool:
    """Whether a `Replica` can play these arrivals: one step in flight, and no request that ends
    from outside or is not planned in every iteration."""
    if not setup.leaps or setup.stages > 1 or setup.lookahead:
        return False
    if any(arrival.patience is not None for arrival in arrivals):
        return False
    recorded = [one.params for one in arrivals if isinstance(one, RecordedRequest)]
    return not any(
        params is not None
        and (
            params.deadline is not None
            or params.itl_goal is not None
            or params.is_background
            or params.grammar is not None
        )
        for params in recorded
    )
