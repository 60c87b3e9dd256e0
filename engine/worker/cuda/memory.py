"""How much GPU memory the KV cache gets: what `--gpu-memory-utilization` allows, less everything
else.

total ─ × utilization ─▶ allowed = in use now (weights, context) │ largest step │ graphs │ KV
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.worker.cuda.gpu import Gpu
from engine.worker.cuda.step.kv_mover import DeviceMover
from engine.worker.device import Formats
from engine.worker.model.kv.kv_tensors import size_text
from engine.worker.ports import BlockMover, KVTensors, ModelShape
from engine.worker.streams import Streams

# Reserved for CUDA graphs, which are captured after the cache exists, beside their largest step
GRAPHS_BYTES = 512 << 20
MIB = 1 << 20


class MemoryBudget(NamedTuple):
    """Bytes of one GPU. `used` is permanent; `step` is what the largest step allocates in
    passing."""

    total: int
    utilization: float
    used: int
    step: int
    graphs: int

    @property
    def left(self) -> int:
        """Bytes for the KV cache; negative if the rest does not fit."""
        return int(self.total * self.utilization) - self.used - self.step - self.graphs

    def __str__(self) -> str:
        parts = ("weights and context", self.used), ("a step", self.step), ("graphs", self.graphs)
        taken = ", ".join(f"{what} {size // MIB:,} MiB" for what, size in parts)
        return f"{self.utilization:g} of {self.total // MIB:,} MiB, less {taken}"


def check_weights(gpu: Gpu, utilization: float, num_bytes: int) -> None:
    """Raise `StartupError` if weights of so many bytes exceed the share of the GPU that is free."""
    left = int(gpu.total_bytes * utilization) - gpu.used_bytes()
    if num_bytes > left:
        raise StartupError(
            f"the model's weights need {size_text(num_bytes)}, but on {gpu.place} ({gpu.model}) "
            f"{size_text(max(0, left))} are left of --gpu-memory-utilization {utilization:g}; use "
            "8-bit weights (--weights), more GPUs (--tensor-ranks, --pipeline-stages) or a smaller "
            "model"
        )


@contextmanager
def fitting(gpu: Gpu) -> Iterator[None]:
    """Turn running out of memory in the largest step into a `StartupError` that names the
    flags."""
    before = gpu.tensor_bytes()
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"the largest step does not fit on {gpu.place} ({gpu.model}): weights take "
            f"{before // MIB:,} of {gpu.total_bytes // MIB:,} MiB; lower --max-batch-tokens or "
            "--max-batch-size, or use more GPUs (--tensor-ranks, --pipeline-stages)"
        ) from error


def measure(
    gpu: Gpu, utilization: float, captured: float, rehearse: Callable[[], None]
) -> MemoryBudget:
    """Run the largest step and compute the budget; raises `StartupError` if nothing is left for
    KV. `captured` is the share of the largest step's tokens that the largest graph has."""
    gpu.release_cached()
    gpu.reset_peak()
    before = gpu.tensor_bytes()
    with fitting(gpu):
        rehearse()
    step = gpu.peak_bytes() - before
    gpu.release_cached()
    graphs = GRAPHS_BYTES + int(captured * step)
    budget = MemoryBudget(gpu.total_bytes, utilization, gpu.used_bytes(), step, graphs)
    if budget.left <= 0:
        raise StartupError(
            f"no memory is left for the KV cache on {gpu.place} ({gpu.model}): {budget}; raise "
            "--gpu-memory-utilization, lower --max-batch-tokens or use more GPUs "
            "(--tensor-ranks, --pipeline-stages)"
        )
    return budget


NUM_SPARE = 1  # blocks that padding rows write to
MIN_KERNEL_DIM = 64  # the heads of attention kernels are powers of two from here on


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Allocates on a GPU, and pinned memory of the host."""

    place: torch.device
    streams: Streams
    formats: Formats
    block_size: int

    def zeros(self, *sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=self.formats.dtype, device=self.place)

    def states(self, sizes: tuple[int, ...]) -> Tensor:
        return torch.zeros(sizes, dtype=torch.float32, device=self.place)

    def kv(self, shape: ModelShape, num_blocks: int) -> KVTensors:
        """A zeroed KV cache `[layers, 2, blocks, block_size, kv_heads, head_dim]`, with a spare
        block; 1 for 2 if values are a part of the keys. Else there is behind each block what its
        last head is narrower than a kernel's."""
        layers, parts, blocks, *block = self._sizes(shape, num_blocks + NUM_SPARE)
        behind = max(MIN_KERNEL_DIM, 1 << (shape.head_dim - 1).bit_length()) - shape.head_dim
        behind = behind if parts == 2 else 0
        sizes = (layers, parts, blocks, prod(block) + behind)
        whole = torch.zeros(sizes, dtype=self.formats.kv_dtype, device=self.place)
        cache = whole[..., : prod(block)].view(layers, parts, blocks, *block)
        return KVTensors(tuple(cache[:, 0]), tuple(cache[:, 1]) if parts == 2 else (), NUM_SPARE)

    def mover(self, cache: KVTensors, shape: ModelShape, num_host_blocks: int) -> BlockMover:
        """Moves KV blocks to pinned host memory, where all layers of a block are contiguous."""
        layers, parts, _, *block = self._sizes(shape, num_host_blocks)
        sizes = (num_host_blocks, layers, parts, *block)
        pinned = self.streams.pinned(sizes, self.formats.kv_dtype)
        return DeviceMover(self.streams, cache, pinned)

    def _sizes(self, shape: ModelShape, num_blocks: int) -> tuple[int, ...]:
        size, parts = self.block_size, 2 if shape.values_from is None else 1
        return (shape.num_layers, parts, num_blocks, size, shape.num_kv_heads, shape.head_dim)
