"""Pipelined iterations against microbatches, on 1 to 8 simulated stages.

Orca (section 4.2) has a separate batch in every stage. FasterTransformer divides one batch into
microbatches that pass through the stages one after the other, and starts the next iteration when
the last of them has ended.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy.fcfs import FirstComeFirstServed
from engine.research.hardware.catalogue import DEVICES, Deployment, ModelSpec
from engine.simulated.play import play_all
from engine.simulated.trace import Arrival
from engine.step import Step, StepResult

MODEL = ModelSpec.gpt("GPT-3 101B", layers=80, hidden=10240)  # Orca's model, on 8 GPUs per stage
UNBOUNDED = 10**9


class Pipeline:
    """A `StepExecutor` of `stages` equal stages, with `depth` steps in flight, each cut into at
    most `parts` microbatches of whole requests."""

    def __init__(self, cost: CostModel, stages: int, depth: int, parts: int) -> None:
        self.is_alive = True
        self.depth = depth
        self.busy = 0.0  # seconds, over all stages
        self.ended = 0.0
        self._cost = cost
        self._parts = parts
        self._free_at = [0.0] * stages

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Never calls `on_lost`: there is no worker to lose."""

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        loop = asyncio.get_running_loop()
        at, stages = loop.time(), len(self._free_at)
        for part in microbatches(step, self._parts):
            done, seconds = loop.time(), self._cost.step(part) / stages
            for stage in range(stages):
                done = max(done, self._free_at[stage]) + seconds
                self._free_at[stage] = done
            self.busy += stages * seconds
            at = max(at, done)
        self.ended = at
        num_samples = sum(entry.sample is not None for entry in step.entries)
        future: asyncio.Future[StepResult] = loop.create_future()
        result = StepResult(step.step_id, (0,) * num_samples, at - loop.time())
        loop.call_at(at, future.set_result, result)
        return future

    async def restart(self) -> None:
        """There is no worker to restart."""

    @property
    def bubbles(self) -> float:
        """The share of all stages' time without computation."""
        return 1 - self.busy / (len(self._free_at) * self.ended)


def microbatches(step: Step, parts: int) -> list[Step]:
    """The step's requests divided into at most `parts` steps, with prompts and decodes in each."""
    count = min(parts, len(step.entries))
    return [Step(step.step_id, step.entries[part::count]) for part in range(count)]


@dataclass(frozen=True, slots=True)
class System:
    """A schedule: whether each stage has its own batch, and when requests may join a batch."""

    name: str
    admission: Admission
    is_pipelined: bool
    is_cut: bool = True


@dataclass(frozen=True, slots=True)
class Flow:
    """Output tokens per second, and the share of bubbles."""

    rate: float
    bubbles: float


SYSTEMS = (
    System("pipelined iterations (Orca)", Admission.RESERVE, is_pipelined=True),
    System("iterations, one batch in microbatches", Admission.RESERVE, is_pipelined=False),
    System("request level, one batch in microbatches", Admission.REQUEST, is_pipelined=False),
    System("request level, one batch uncut", Admission.REQUEST, is_pipelined=False, is_cut=False),
)


def flow(system: System, stages: int, batch: int, arrivals: Sequence[Arrival]) -> Flow:
    """The throughput of a full queue with `batch` requests in flight per stage."""
    hardware = Deployment(DEVICES["a100-40gb"], MODEL, stages=stages, ranks=8)
    settings = SchedulerSettings(
        max_model_len=2048,
        max_batch_size=batch if system.is_pipelined else stages * batch,
        max_batch_tokens=UNBOUNDED,
        admission=system.admission,
        max_queue_requests=UNBOUNDED,
        max_queue_tokens=UNBOUNDED,
        reuses_prefixes=False,
    )
    depth, parts = (stages, 1) if system.is_pipelined else (1, stages if system.is_cut else 1)
    executor = Pipeline(hardware.cost(), stages, depth, parts)
    ledger = KVLedger(KVShape(hardware.num_slots, block_size=1))
    played = play_all(
        IterationScheduler(settings, ledger, FirstComeFirstServed()), executor, arrivals
    )
    tokens = sum(one.arrival.output_len for one in played.outcomes)
    return Flow(tokens / executor.ended, executor.bubbles)
