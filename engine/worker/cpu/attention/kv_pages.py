"""The pages of the KV cache as kernels see them.

Pages of a layer are stored head by head: keys `[blocks, heads, dim, slots]`, values `[blocks,
heads, slots, dim]`. In int8 each token and head has a scale, `[blocks, heads, slots]`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes
from typing import NamedTuple

from numba import njit

from engine.worker.cpu.intrinsics import int16s, int64s
from engine.worker.cpu.kernels.vectors import LANES
from engine.worker.cpu.operands import make_reader, operands


@operands
class LayerPages(ctypes.Structure):
    """The pages of one layer."""

    block_size: int
    page_stride: int  # items between blocks of keys or values
    head_stride: int  # items between heads in a block
    slot_stride: int  # items between slots of values
    scale_stride: int  # floats between the scales of blocks
    keys: int
    values: int
    key_scales: int
    value_scales: int


ITEM = 2  # bytes of a number of 16 bits

read_layer_pages = make_reader(LayerPages)


class KVPages(NamedTuple):
    """The pages of one KV head of a layer, and which of them a request has."""

    base: int
    scales: int
    page_bytes: int  # between pages of a head
    scale_bytes: int
    block_size: int
    table: int  # block ids, int64
    num_pages: int


@njit(inline="always")
def page_at(pages, number):
    """Address of page `number` of the request; of the last one for numbers beyond it."""
    block = int64s(pages.table + min(number, pages.num_pages - 1) * 8, 1)[0]
    return pages.base + block * pages.page_bytes


@njit(inline="always")
def copy_keys(pages, at, seen, end, dim, copy):
    """Copy 16 keys of 16 bits from token `at` on, of those in [seen, end), from their pages to
    `[dim, 16]` at an address."""
    size = pages.block_size
    for token in range(max(at, seen), min(at + LANES, end)):
        source = page_at(pages, token // size) + token % size * ITEM
        for d in range(dim):
            place = copy + (d * LANES + token - at) * ITEM
            int16s(place, 1)[0] = int16s(source + d * size * ITEM, 1)[0]
