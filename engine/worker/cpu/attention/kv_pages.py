"""The pages of the KV cache as kernels see them.

Pages of a layer are stored head by head: keys `[blocks, heads, dim, slots]`, values `[blocks,
heads, slots, dim]`. In int8 each token and head has a scale, `[blocks, heads, slots]`. Keys of
which the values are a part are stored as values are.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes
from typing import NamedTuple

from numba import njit

from engine.worker.cpu.intrinsics import float32s, int8s, int16s, int64s
from engine.worker.cpu.kernels.dtypes import ITEM_BYTES, WITH_SCALES
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.vectors import LANES, LINE, make_prefetch
from engine.worker.cpu.operands import make_reader, operands


@operands
class LayerPages(ctypes.Structure):
    """The pages of one layer."""

    block_size: int
    page_stride: int  # items between blocks of keys or values
    head_stride: int  # items between heads in a block; 0 if there is one
    scale_head_stride: int  # floats between the scales of heads; 0 if there is one
    slot_stride: int  # items between slots of values
    key_slot_stride: int  # items between slots of keys
    key_stride: int  # items between dimensions of keys
    has_values: int  # whether values are not a part of the keys
    scale_stride: int  # floats between the scales of blocks
    keys: int
    values: int
    key_scales: int
    value_scales: int


ITEM = 2  # bytes of a number of 16 bits
prefetch_line = make_prefetch(LINE)

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


class Keys(NamedTuple):
    """Addresses of 16 keys of a page."""

    address: int
    scales: int
    ahead: int  # how far ahead keys are prefetched


@njit(inline="always")
def keys_at(dtype, pages, at, distance):
    """The keys of 16 tokens of the request from token `at` on, which are on one page; prefetches
    those `distance` tokens further."""
    number, offset = at // pages.block_size, at % pages.block_size
    then, then_offset = (at + distance) // pages.block_size, (at + distance) % pages.block_size
    block = int64s(pages.table + number * 8, 1)[0]
    return Keys(
        pages.base + block * pages.page_bytes + offset * ITEM_BYTES[dtype],
        pages.scales + block * pages.scale_bytes + offset * BYTES,
        page_at(pages, then) + then_offset * ITEM_BYTES[dtype],
    )


@njit(inline="always")
def prefetch_scales(dtype, keys, values, start, end):
    """Prefetch the scales of the tokens in [start, end)."""
    for at in range(start, end, min(keys.block_size, LINE // BYTES)):
        prefetch_line(keys_at(dtype, keys, at, 0).scales)
        prefetch_line(keys_at(dtype, values, at, 0).scales)


@njit(inline="always")
def copy_keys(dtype, pages, at, seen, end, dim, copy):
    """Copy 16 keys from token `at` on, of those in [seen, end), from their pages to `[dim, 16]` at
    an address, and their scales behind them."""
    item, scales = ITEM_BYTES[dtype], copy + dim * LANES * ITEM_BYTES[dtype]
    for token in range(max(at, seen), min(at + LANES, end)):
        key, lane = keys_at(dtype, pages, token, 0), token - at
        for d in range(dim):
            source = key.address + d * pages.block_size * item
            place = copy + (d * LANES + lane) * item
            if item == 1:
                int8s(place, 1)[0] = int8s(source, 1)[0]
            else:
                int16s(place, 1)[0] = int16s(source, 1)[0]
        if dtype in WITH_SCALES:
            float32s(scales, LANES)[lane] = float32s(key.scales, 1)[0]
