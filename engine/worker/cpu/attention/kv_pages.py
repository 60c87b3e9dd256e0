"""The pages of the KV cache as kernels see them.

Pages of a layer are stored head by head: keys `[blocks, heads, dim, slots]`, values `[blocks,
heads, slots, dim]`. In int8 each token and head has a scale, `[blocks, heads, slots]`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes
from typing import Any, NamedTuple

from numba import njit

from engine.worker.cpu.intrinsics import int64s
from engine.worker.cpu.operands import make_reader, operands
from engine.worker.ports import KVTensors


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


read_layer_pages = make_reader(LayerPages)


def pages_of_layers(cache: KVTensors) -> Any:
    """An array with the `LayerPages` of each layer."""
    page_stride, _, head_stride, _ = cache.keys[0].stride()
    is_scaled = bool(cache.key_scales)
    return (LayerPages * len(cache.keys))(
        *(
            LayerPages(
                block_size=cache.block_size,
                page_stride=page_stride,
                head_stride=head_stride,
                slot_stride=cache.values[0].stride(1),
                scale_stride=cache.key_scales[0].stride(0) if is_scaled else 0,
                keys=keys.data_ptr(),
                values=values.data_ptr(),
                key_scales=cache.key_scales[layer].data_ptr() if is_scaled else 0,
                value_scales=cache.value_scales[layer].data_ptr() if is_scaled else 0,
            )
            for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True))
        )
    )


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
