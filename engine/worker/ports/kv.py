"""The tensors of the paged KV cache, the memory they may take, and the port that moves blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.step import BlockMove, Page


class KVCapacity(NamedTuple):
    """Bytes available for the KV cache: `most` at most, `usual` unless the settings say, and
    `host` for swapped blocks. `is_shared`: device and host blocks lie in the same memory."""

    most: int
    usual: int
    host: int
    is_shared: bool

    def left_on_host(self, taken: int) -> int:
        """Bytes left for host blocks after the device blocks took `taken` bytes."""
        return self.host - taken if self.is_shared else self.host

    def without(self, num_bytes: int) -> "KVCapacity":
        """What is left if `num_bytes` are used by what was loaded on the same device; one that
        measured its memory has counted them."""
        if not self.is_shared:
            return self
        most = max(0, self.most - num_bytes)
        return KVCapacity(most, min(self.usual, most), max(0, self.host - num_bytes), True)


@dataclass(frozen=True, slots=True)
class KVTensors:
    """Keys and values of each layer, `[num_blocks + num_spare, block_size, kv_heads, dim]` each.

    In int8 each number is multiplied by the scale of its token and head (`[num_blocks, block_size,
    kv_heads]` for each layer); other dtypes have no scales. The device chooses the memory order.
    The last `num_spare` blocks belong to no request: padding rows of a batch write there. Without
    `values` these are dimensions of the keys, `ModelShape.values_from`.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    num_spare: int = 0
    key_scales: tuple[Tensor, ...] = ()
    value_scales: tuple[Tensor, ...] = ()

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[0] - self.num_spare

    @property
    def block_size(self) -> int:
        return self.keys[0].shape[1]

    def of_layers(self, layers: Sequence[int]) -> "KVTensors":
        """The same cache with these layers only."""
        fields = (self.keys, self.values, self.key_scales, self.value_scales)
        keys, values, *scales = (tuple(each[at] for at in layers if each) for each in fields)
        return KVTensors(keys, values, self.num_spare, *scales)

    def narrowed(self, num_heads: int, head_dim: int) -> "KVTensors":
        """Views for layers whose heads take no more room than this cache's."""
        if self.keys[0].shape[2:] == (num_heads, head_dim):
            return self
        keys, values = (
            tuple(_with_heads(each, num_heads, head_dim) for each in part)
            for part in (self.keys, self.values)
        )
        scales = (
            tuple(each[..., :num_heads] for each in part)
            for part in (self.key_scales, self.value_scales)
        )
        return KVTensors(keys, values, self.num_spare, *scales)

    def in_memory_order(self) -> list[Tensor]:
        """All tensors of the cache, `[num_blocks, …]` each, with dimensions in memory order.

        For copying blocks, not for computing: 8-bit floats come as uint8 (see `as_bytes`).
        """
        return [
            as_bytes(one.permute(sorted(range(one.dim()), key=one.stride, reverse=True)))
            for one in (*self.keys, *self.values, *self.key_scales, *self.value_scales)
        ]


def _with_heads(pages: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """A view of the front of each block's memory, `[blocks, block_size, num_heads, head_dim]`, with
    the dimensions in the same memory order."""
    order = sorted((1, 2, 3), key=pages.stride, reverse=True)
    sizes = (pages.shape[1], num_heads, head_dim)
    blocks = pages.permute(0, *order).flatten(1)[:, : sizes[0] * sizes[1] * sizes[2]]
    view = blocks.view(len(blocks), *(sizes[dimension - 1] for dimension in order))
    return view.permute(0, *(1 + order.index(dimension) for dimension in (1, 2, 3)))


def as_bytes(numbers: Tensor) -> Tensor:
    """A view of 8-bit floats as uint8, because few torch kernels copy 8-bit floats.

    Tensors of other dtypes are returned as they are.
    """
    is_small = numbers.is_floating_point() and numbers.itemsize == 1
    return numbers.view(torch.uint8) if is_small else numbers


class MovesInFlight(Protocol):
    """The moves of a step, which may still be under way."""

    def wait(self) -> tuple[Page, ...]:
        """Wait until all are done; what could not be filled from the disk or a store."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Moves that were made at once."""

    unread: tuple[Page, ...] = ()

    def wait(self) -> tuple[Page, ...]:
        return self.unread


class BlockMover(Protocol):
    """Copies KV blocks and states between the device and the tiers below it.

    On a GPU copies run on a stream of their own. Awaited moves are made first, one after the other,
    and the compute stream waits for them by an event; other moves run beside the compute. Moves of
    a step begin after the compute of all earlier steps.
    """

    def move(self, moves: Sequence[BlockMove]) -> MovesInFlight:
        """Begin the moves; work submitted from now on finds the awaited ones done.

        Raises `ValueError` for a block out of range.
        """
