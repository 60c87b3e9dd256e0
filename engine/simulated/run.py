"""One simulated run: a new scheduler, KV ledger and policy on given hardware, and its metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.iteration import Observer, ObserverGroup
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy.base import Policy
from engine.ports import Cost
from engine.simulated.executor import KnownCost, SimulatedExecutor
from engine.simulated.figures import SLO, Figures, summarise
from engine.simulated.play import play_all
from engine.simulated.record import Recorder
from engine.simulated.replay import RecordedOutputs, RecordedRequest
from engine.simulated.trace import Arrival
from engine.speculation.drafter import Drafter

NO_SLO = SLO()
_NUM_MOMENTS = 500  # samples of the state while requests arrive


@dataclass(frozen=True, slots=True)
class Setup:
    """All inputs of a run except its arrivals; equal setups and arrivals give equal figures.

    `windows` has the window of each layer group; `num_slots` tokens fit if no window gives blocks
    back. `num_states` and `num_host_states` are slots for the states of recurrent layers.
    """

    label: str
    settings: SchedulerSettings
    policy: Callable[[Cost], Policy]
    cost: CostModel
    num_slots: int
    block_size: int = 16
    stages: int = 1
    slo: SLO = NO_SLO
    is_oracle: bool = False  # `max_tokens` is set to the output length, which the policy uses
    lookahead: int = 0
    num_host_slots: int = 0
    saves_on_host: bool = False
    slot_seconds: float = 0.0  # to move one slot's KV between device and host, on every stage
    windows: tuple[int | None, ...] = (None,)
    num_states: int = 0
    num_host_states: int = 0


def simulate(setup: Setup, arrivals: Sequence[Arrival], also: Observer | None = None) -> Figures:
    """Run the arrivals, which are sorted by time, until every request has ended. `also` observes
    all events."""
    recorder = recorder_of(arrivals)
    arrivals = prepared(setup, arrivals)
    outputs = RecordedOutputs() if is_recorded(arrivals) else None
    on_accepted = outputs.accepted if outputs is not None else None
    observer = ObserverGroup(recorder, also) if also is not None else recorder
    scheduler = build_scheduler(setup, KnownCost(setup.cost), observer)
    recorder.watch(scheduler)
    executor = build_executor(setup, outputs)
    played = play_all(scheduler, executor, arrivals, on_accepted, setup.lookahead)
    return summarise(setup.label, played, recorder, setup.slo)


def recorder_of(arrivals: Sequence[Arrival]) -> Recorder:
    """A recorder that samples the state while these requests arrive."""
    return Recorder(period=arrivals[-1].at / _NUM_MOMENTS if arrivals else 1.0)


def prepared(setup: Setup, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
    """The arrivals, of which an oracle knows all lengths."""
    if setup.is_oracle:
        arrivals = [
            one.with_known_length() if isinstance(one, RecordedRequest) else one for one in arrivals
        ]
    return arrivals


def is_recorded(arrivals: Sequence[Arrival]) -> bool:
    """Whether the arrivals say which tokens the outputs have."""
    return any(isinstance(arrival, RecordedRequest) for arrival in arrivals)


def build_scheduler(
    setup: Setup, cost: LiveCost, observer: Observer, drafter: Drafter | None = None
) -> IterationScheduler:
    """A scheduler of the simulated system, without requests."""
    size, num_groups = setup.block_size, len(setup.windows)
    grows = setup.settings.admission is Admission.GROW
    ledger = KVLedger(
        KVShape(
            max(1, setup.num_slots // size) * num_groups,
            size,
            setup.num_host_slots // size * num_groups,
            saves_on_host=setup.saves_on_host,
            windows=setup.windows if grows else (None,) * num_groups,
            chunk=setup.settings.max_batch_tokens * (1 + setup.lookahead),
            num_states=setup.num_states,
            num_host_states=setup.num_host_states,
        )
    )
    return IterationScheduler(setup.settings, ledger, setup.policy(cost), observer, cost, drafter)


def build_executor(setup: Setup, outputs: RecordedOutputs | None) -> SimulatedExecutor:
    """An executor that answers after the seconds that the setup's cost model predicts."""
    block_seconds = setup.slot_seconds * setup.block_size / len(setup.windows)
    return SimulatedExecutor(setup.cost, setup.stages, outputs, setup.lookahead, block_seconds)
