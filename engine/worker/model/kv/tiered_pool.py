"""TieredPool: the moves between the device and the tiers below, in host memory and in a store."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from engine.kv_store import KVStore
from engine.step import HASH_BYTES, BlockMove, Direction, Page, PageKind, Tier
from engine.worker.model.kv.host_pool import read_blocks
from engine.worker.model.kv.leaving import AfterLeaving, Leaving
from engine.worker.ports import BlockMover, MovesInFlight
from engine.worker.transfers import Transfers


class StoredTensors:
    """Copies between tensors and a store: KV blocks, or recurrent states."""

    def __init__(
        self, tensors: Sequence[Tensor], num_rows: int, store: KVStore, transfers: Transfers
    ) -> None:
        """A copy has row i of each of the tensors, `[num_rows or more, …]` each."""
        self._tensors = tensors
        self._num_rows = num_rows
        self._row_bytes = sum(tensor[:1].numel() * tensor.itemsize for tensor in tensors)
        self._store = store
        self._transfers = transfers

    def write(self, move: BlockMove, leaving: Leaving) -> None:
        """Queue copies of the rows, once they are on the host."""
        device, slots, hashes = self._sides(move)
        rows = self._transfers.put(device.numpy())
        columns = [
            tensor.index_select(0, rows).flatten(1).contiguous().view(torch.uint8)
            for tensor in self._tensors
        ]
        copies = self._transfers.fetch(torch.cat(columns, dim=1))
        leaving.add(copies, partial(self._write, slots, hashes))

    def _write(
        self, slots: Sequence[int], hashes: Sequence[bytes], contents: Sequence[Tensor]
    ) -> None:
        for slot, block_hash, row in zip(slots, hashes, contents[0].numpy(), strict=True):
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
            rows = self._transfers.put(device[list(contents)].numpy())
            self._fill(rows, self._transfers.put(np.stack(list(contents.values()))))
        blocks = device.numpy().tolist()
        return [blocks[number] for number in found if number not in contents]

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
        slots = read_blocks(move.host, self._store.num_slots, str(move.tier)).numpy().tolist()
        cut = range(0, len(move.hashes), HASH_BYTES)
        hashes = [move.hashes[at : at + HASH_BYTES] for at in cut]
        if not len(device) == len(slots) == len(hashes):
            raise ValueError(f"a move of {len(device)} blocks, {len(slots)} slots")
        return device, slots, hashes


class TieredPool:
    """A `BlockMover` over the host tier's mover and the stores of other tiers."""

    def __init__(
        self,
        host: BlockMover,
        stored: Mapping[tuple[Tier, PageKind], StoredTensors],
    ) -> None:
        self._host = host
        self._stored = stored
        self._leaving = Leaving()

    def move(self, moves: Sequence[BlockMove]) -> MovesInFlight:
        """Begin the copies, in the order given."""
        unread: list[Page] = []
        others: list[MovesInFlight] = []
        for is_host, run in groupby(moves, lambda move: move.tier is Tier.HOST):
            if is_host:
                others.append(self._host.move(tuple(run)))
                continue
            for move in run:
                unread += [Page(move.kind, number) for number in self._move(move)]
        return AfterLeaving(self._leaving, tuple(others), tuple(unread))

    def _move(self, move: BlockMove) -> list[int]:
        """Begin a copy; returns the rows that could not be filled."""
        stored = self._stored.get((move.tier, move.kind))
        if stored is None:
            raise ValueError(f"a move to or from the tier {move.tier}, which there is not")
        if move.direction is Direction.OUT:
            stored.write(move, self._leaving)
            return []
        self._leaving.wait()
        return stored.read(move)
