"""The host tier of one stage: KV blocks in host memory, and the copies to and from them.

Only the scheduler's ledger knows which request owns which host block.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.errors import StartupError
from engine.step import BlockMove, Direction
from engine.worker.model.kv.kv_tensors import size_text
from engine.worker.ports import KVTensors, Moved
from engine.worker_settings import WorkerSettings


def choose_num_host_blocks(settings: WorkerSettings, block_bytes: int, available: int) -> int:
    """The number of host blocks in `host_kv_memory`; raises `StartupError` if none or too many."""
    setting = settings.tiers.host_kv_memory
    if setting == 0:
        return 0
    if setting < block_bytes:
        raise StartupError(
            f"--host-kv-memory {size_text(setting)} is less than one block of "
            f"{settings.kv.block_size} slots ({size_text(block_bytes)})"
        )
    if setting > available:
        raise StartupError(
            f"--host-kv-memory {size_text(setting)} is more than the {size_text(available)} of "
            "host memory that are available; lower it"
        )
    return setting // block_bytes


class HostPool:
    """A `BlockMover` that copies synchronously, whatever devices the tiers are on."""

    def __init__(self, device: KVTensors, host: KVTensors) -> None:
        self._device = device
        self._host = host

    def move(self, moves: Sequence[BlockMove]) -> Moved:
        """Make the copies, in the order given. Raises `ValueError` for a block out of range."""
        for move in moves:
            device = read_blocks(move.device, self._device.num_blocks, "device")
            host = read_blocks(move.host, self._host.num_blocks, "host")
            if len(device) != len(host):
                raise ValueError(f"a move of {len(device)} device and {len(host)} host blocks")
            if move.direction is Direction.OUT:
                _copy(self._device, device, self._host, host)
            else:
                _copy(self._host, host, self._device, device)
        return Moved()


def read_blocks(table: bytes, limit: int, tier: str) -> Tensor:
    """The block ids of one side of a move, int64; raises `ValueError` if one is out of range."""
    blocks = np.frombuffer(table, dtype="<i4")
    if len(blocks) and not (int(blocks.min()) >= 0 and int(blocks.max()) < limit):
        raise ValueError(f"{tier} block ids out of range [0, {limit})")
    return torch.from_numpy(blocks.astype(np.int64))


def _copy(source: KVTensors, at: Tensor, target: KVTensors, to: Tensor) -> None:
    """Layer by layer, so that only one layer's blocks exist twice at a time."""
    for read, write in zip(source.in_memory_order(), target.in_memory_order(), strict=True):
        blocks = read.index_select(0, at.to(read.device))
        write.index_copy_(0, to.to(write.device), blocks.to(write.device))
