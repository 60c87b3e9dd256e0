"""How much of a GPU's memory is left for KV: what `--gpu-memory-utilization` allows, less all else.

total ─ × utilization ─▶ allowed = weights and what else is there now │ largest step │ graphs │ KV
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from engine.errors import StartupError
from engine.worker.cuda.gpu import Gpu

GRAPHS_BYTES = (
    512 << 20
)  # CUDA graphs of all batch sizes, which are captured when the cache is there
MIB = 1 << 20


class MemoryBudget(NamedTuple):
    """Bytes of one GPU. `used` is there for good, `step` comes and goes with the largest step."""

    total: int
    utilization: float
    used: int
    step: int
    graphs: int

    @property
    def left(self) -> int:
        """For KV; negative where there is too little for the rest."""
        return int(self.total * self.utilization) - self.used - self.step - self.graphs

    def __str__(self) -> str:
        parts = ("weights and context", self.used), ("a step", self.step), ("graphs", self.graphs)
        taken = ", ".join(f"{what} {size // MIB:,} MiB" for what, size in parts)
        return f"{self.utilization:g} of {self.total // MIB:,} MiB, less {taken}"


@contextmanager
def fitting(gpu: Gpu) -> Iterator[None]:
    """What is run inside are largest steps: where they do not fit, the start is refused."""
    before = gpu.held_bytes()
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"the largest step does not fit on {gpu.place} ({gpu.model}): {before // MIB:,} of "
            f"{gpu.total_bytes // MIB:,} MiB hold weights; lower --max-batch-tokens or "
            "--max-batch-size, or share the model among more GPUs"
        ) from error


def measure(gpu: Gpu, utilization: float, rehearse: Callable[[], None]) -> MemoryBudget:
    """Run the largest step and see what is left; raises `StartupError` where nothing is."""
    gpu.give_back()
    gpu.forget_peak()
    before = gpu.held_bytes()
    with fitting(gpu):
        rehearse()
    step = gpu.peak_bytes() - before
    gpu.give_back()
    budget = MemoryBudget(gpu.total_bytes, utilization, gpu.used_bytes(), step, GRAPHS_BYTES)
    if budget.left <= 0:
        raise StartupError(
            f"no memory is left for KV on {gpu.place} ({gpu.model}): {budget}; raise "
            "--gpu-memory-utilization, lower --max-batch-tokens or share the model among more GPUs"
        )
    return budget
