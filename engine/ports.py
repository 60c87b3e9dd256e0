"""The ports of the control plane: clock, executor, cost model. (`engine.policy.base`: policy.)"""

from collections.abc import Callable, Container, Sequence
from typing import Protocol

from engine.lora import LoraReport, LoraSpec
from engine.step import Step, StepResult

Clock = Callable[[], float]  # seconds from a fixed origin; never goes back


class StepFuture(Protocol):
    """The result of a submitted step. `asyncio.Future[StepResult]` is one."""

    def done(self) -> bool: ...

    def result(self) -> StepResult: ...

    def add_done_callback(self, fn: Callable[..., object], /) -> None: ...


class StepExecutor(Protocol):
    """Runs steps on the workers. `submit` sends the step before it returns, and never waits.

    The future ends with a `StepResult`, with `StepFailed` (the requests of this step fail) or with
    `WorkerLost` (all KV on the device is lost). Steps run and return in the order of submission.
    """

    @property
    def is_alive(self) -> bool:
        """Whether steps can run: False from the loss of a worker until `restart` returns."""

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Call `on_lost` whenever a worker is lost, also when no step is in flight."""

    @property
    def depth(self) -> int:
        """How many steps may be in flight at the same time (Orca: `n_workers`)."""

    def submit(self, step: Step) -> StepFuture: ...

    async def restart(self) -> None:
        """Restart the workers after `WorkerLost`.

        Raises `Unavailable` if they crashed too often in a row without completing a step.
        """


class StoreLookup(Protocol):
    """Asks a store of KV that servers share."""

    async def find(self, names: Sequence[bytes]) -> Container[bytes]:
        """The names among these that the store has. Returns within a bounded time, with nothing if
        the store does not answer; does not raise."""


class LoraLoader(Protocol):
    """Loads LoRA adapters in the workers, beside their steps."""

    async def load_lora(self, spec: LoraSpec) -> LoraReport:
        """The report has the error if it cannot be loaded. Raises `WorkerLost`."""

    def unload_lora(self, lora_id: int) -> None:
        """Free an adapter, which no step in flight uses and no later one will use."""

    def watch_loras(self, on_lost: Callable[[LoraReport], object]) -> None:
        """Call `on_lost` for each adapter that restarted workers could not load again, before any
        step is submitted to them."""


class Cost(Protocol):
    """Predicts the duration of iterations, in seconds (`engine.cost.model`)."""

    def compute(self, num_tokens: int, start: int) -> float:
        """An iteration of one request: `num_tokens` tokens from position `start`."""

    def step(self, step: Step) -> float: ...
