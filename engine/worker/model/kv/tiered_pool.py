"""TieredPool: the moves between the device and the tiers below, in host memory and in a store."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kv_store import KVStore
from engine.step import HASH_BYTES, BlockMove, Direction, Page, PageKind, Tier
from engine.worker.model.kv.host_pool import read_blocks
from engine.worker.ports import BlockMover, Moved


class StoredTensors:
    """Copies between tensors in host memory and a store: KV blocks, or recurrent states."""

    def __init__(self, tensors: Sequence[Tensor], num_rows: int, store: KVStore) -> None:
        """A copy has row i of each of the tensors, `[num_rows or more, …]` each."""
        self._tensors = tensors
        self._num_rows = num_rows
        self._row_bytes = sum(tensor[:1].numel() * tensor.itemsize for tensor in tensors)
        self._store = store

    def write(self, move: BlockMove) -> None:
        """Queue copies of the rows."""
        device, slots, hashes = self._sides(move)
        columns = [
            tensor.index_select(0, device).flatten(1).contiguous().view(torch.uint8)
            for tensor in self._tensors
        ]
        content = torch.cat(columns, dim=1).numpy()
        for slot, block_hash, row in zip(slots, hashes, content, strict=True):
            self._store.write(slot, block_hash, row)

    def read(self, move: BlockMove) -> list[int]:
        """Fill the rows; returns those that could not be filled."""
        device, slots, hashes = self._sides(move)
        found = dict(enumerate(self._store.read(slots, hashes)))
        contents = {
            number: content
            for number, content in found.items()
            if content is not None and len(content) == self._row_bytes
        }
        if contents:
            stacked = torch.from_numpy(np.stack(list(contents.values())))
            self._fill(device[list(contents)], stacked)
        return [int(device[number]) for number in found if number not in contents]

    def _fill(self, rows: Tensor, content: Tensor) -> None:
        start = 0
        for tensor in self._tensors:
            width = tensor[0].numel() * tensor.itemsize
            column = content[:, start : start + width].contiguous().view(tensor.dtype)
            tensor.index_copy_(0, rows, column.view(len(rows), *tensor.shape[1:]))
            start += width

    def _sides(self, move: BlockMove) -> tuple[Tensor, list[int], list[bytes]]:
        """Rows, slots and hashes of a move; raises `ValueError` if out of range."""
        device = read_blocks(move.device, self._num_rows, "device")
        slots = read_blocks(move.host, self._store.num_slots, str(move.tier)).tolist()
        cut = range(0, len(move.hashes), HASH_BYTES)
        hashes = [move.hashes[at : at + HASH_BYTES] for at in cut]
        if not len(device) == len(slots) == len(hashes):
            raise ValueError(f"a move of {len(device)} blocks, {len(slots)} slots")
        return device, slots, hashes


class TieredPool:
    """A `BlockMover` over the host tier's mover and the stores of other tiers, for KV in host
    memory."""

    def __init__(
        self,
        host: BlockMover,
        stored: Mapping[tuple[Tier, PageKind], StoredTensors],
    ) -> None:
        self._host = host
        self._stored = stored

    def move(self, moves: Sequence[BlockMove]) -> Moved:
        """Make the copies, in the order given."""
        unread: list[Page] = []
        for move in moves:
            if move.tier is Tier.HOST:
                self._host.move([move])
                continue
            stored = self._stored.get((move.tier, move.kind))
            if stored is None:
                raise ValueError(f"a move to or from the tier {move.tier}, which there is not")
            if move.direction is Direction.OUT:
                stored.write(move)
            else:
                unread += [Page(move.kind, number) for number in stored.read(move)]
        return Moved(tuple(unread))
