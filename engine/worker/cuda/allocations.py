"""The memory of a GPU as a `DeviceMemory`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.worker.cuda.step.kv_mover import DeviceMover
from engine.worker.device import Formats
from engine.worker.ports import BlockMover, KVTensors, ModelShape
from engine.worker.streams import Streams

NUM_SPARE = 1  # blocks that padding rows write to


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
        block."""
        sizes = self._sizes(shape, num_blocks + NUM_SPARE)
        cache = torch.zeros(sizes, dtype=self.formats.kv_dtype, device=self.place)
        return KVTensors(tuple(cache[:, 0]), tuple(cache[:, 1]), NUM_SPARE)

    def mover(self, cache: KVTensors, shape: ModelShape, num_host_blocks: int) -> BlockMover:
        """Moves KV blocks to pinned host memory, where all layers of a block are contiguous."""
        layers, both, _, *block = self._sizes(shape, num_host_blocks)
        sizes = (num_host_blocks, layers, both, *block)
        pinned = self.streams.pinned(sizes, self.formats.kv_dtype)
        return DeviceMover(self.streams, cache, pinned)

    def _sizes(self, shape: ModelShape, num_blocks: int) -> tuple[int, ...]:
        size = self.block_size
        return (shape.num_layers, 2, num_blocks, size, shape.num_kv_heads, shape.head_dim)
