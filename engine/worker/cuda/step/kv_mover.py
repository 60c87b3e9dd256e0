"""Copies of KV blocks between the device and pinned host memory, on a separate stream.

    compute   … step k-1 ──┐             ┌─ step k ─────────────┐  step k+1 …
                           ▼             │                      │
    moves                  awaited moves ┴ other moves of k ─┐  ▼
                                                             └─ awaited moves of k+1 …

Moves of a step begin after the compute of the previous steps and run one after the other. In the
host pool all layers of a block are contiguous, so that a block is one copy; the device gathers and
scatters layers between a staging buffer and the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.step import BlockMove, Direction, Page
from engine.worker.cuda.step.transfers import put
from engine.worker.model.kv.host_pool import read_blocks
from engine.worker.ports import KVTensors, Moved, MovesInFlight, as_bytes
from engine.worker.streams import StreamEvent, Streams

STAGING_BYTES = 64 << 20  # device memory for staging, at least one block


class _Copy(NamedTuple):
    """The blocks of one move: `device[i]` and `host[i]` belong together."""

    direction: Direction
    device: Tensor  # int64, on the host
    host: Tensor  # int64, on the host


@dataclass(frozen=True, slots=True)
class _Moving:
    """Moves that are done when an event is reached."""

    ended: StreamEvent

    def wait(self) -> tuple[Page, ...]:
        self.ended.wait()
        return ()


class DeviceMover:
    """Moves blocks between a KV cache on the device and the pinned `pool`.

    `pool` is `[host blocks, layers, 2, block_size, kv_heads, dim]`, 1 for 2 without values.
    """

    def __init__(self, streams: Streams, cache: KVTensors, pool: Tensor) -> None:
        self._streams = streams
        self._stream = streams.side()
        self._num_blocks = cache.num_blocks
        parts = (cache.keys, cache.values) if cache.values else (cache.keys,)
        self._layers = tuple(tuple(map(as_bytes, each)) for each in zip(*parts, strict=True))
        self._pool = as_bytes(pool)
        block_bytes = pool[:1].numel() * pool.element_size() if len(pool) else 1
        self._max_blocks = max(1, STAGING_BYTES // max(1, block_bytes))

    def move(self, moves: Sequence[BlockMove]) -> MovesInFlight:
        """Submit the moves without waiting; raises `ValueError` before anything is moved."""
        if not moves:
            return Moved()
        copies = [self._checked(move) for move in moves]
        self._stream.wait_for(self._streams.compute.record())
        awaited = [copy for move, copy in zip(moves, copies, strict=True) if move.is_awaited]
        for copy in awaited:
            self._submit(copy)
        if awaited:
            self._streams.compute.wait_for(self._stream.record())
        for move, copy in zip(moves, copies, strict=True):
            if not move.is_awaited:
                self._submit(copy)
        return _Moving(self._stream.record())

    def _checked(self, move: BlockMove) -> _Copy:
        device = read_blocks(move.device, self._num_blocks, "device")
        host = read_blocks(move.host, len(self._pool), "host")
        if len(device) != len(host):
            raise ValueError(f"a move of {len(device)} device and {len(host)} host blocks")
        return _Copy(move.direction, device, host)

    def _submit(self, copy: _Copy) -> None:
        out = copy.direction is Direction.OUT
        for first in range(0, len(copy.device), self._max_blocks):
            part = slice(first, first + self._max_blocks)
            move = self._out if out else self._in
            self._stream.submit(partial(move, copy.device[part], copy.host[part]))

    def _out(self, device: Tensor, host: Tensor) -> None:
        at, staging = put(self._streams, device), self._staging(len(device))
        for layer, tensors in enumerate(self._layers):
            for which, tensor in enumerate(tensors):
                staging[:, layer, which].copy_(tensor.index_select(0, at))
        for place, block in enumerate(host.numpy().tolist()):
            self._streams.copy(self._pool[block], staging[place])

    def _in(self, device: Tensor, host: Tensor) -> None:
        to, staging = put(self._streams, device), self._staging(len(device))
        for place, block in enumerate(host.numpy().tolist()):
            self._streams.copy(staging[place], self._pool[block])
        for layer, tensors in enumerate(self._layers):
            for which, tensor in enumerate(tensors):
                tensor.index_copy_(0, to, staging[:, layer, which])

    def _staging(self, count: int) -> Tensor:
        sizes = (count, *self._pool.shape[1:])
        return torch.empty(sizes, dtype=self._pool.dtype, device=self._streams.device)
