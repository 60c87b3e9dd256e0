"""The memory of a machine as the `DeviceMemory` of its CPU: one for both tiers of KV."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.worker.model.kv.host_pool import HostPool
from engine.worker.model.kv.kv_tensors import allocate, untouched_zeros
from engine.worker.ports import BlockMover, KVTensors, ModelShape


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Allocates pages that take memory when they are written."""

    block_size: int
    kv_dtype: torch.dtype

    def zeros(self, *sizes: int) -> Tensor:
        return torch.zeros(sizes)

    def states(self, sizes: tuple[int, ...]) -> Tensor:
        return untouched_zeros(sizes, torch.float32)

    def kv(self, shape: ModelShape, num_blocks: int) -> KVTensors:
        return allocate(shape, shape.num_layers, num_blocks, self.block_size, self.kv_dtype)

    def mover(self, cache: KVTensors, shape: ModelShape, num_host_blocks: int) -> BlockMover:
        return HostPool(cache, self.kv(shape, num_host_blocks))
