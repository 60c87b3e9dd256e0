"""Panels of packed weights, see `packed_tiles`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.cpu.kernels.linears.packing import PackingOperands, pack_16_bits, pack_32_bits
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool


def packing_kernel(dtype: torch.dtype) -> Callable[..., None]:
    """The kernel that packs items of this dtype."""
    return pack_16_bits if dtype.itemsize == 2 else pack_32_bits


def pack(parts: Sequence[Tensor], items: int, pages: WeightPages, pool: NativeThreadPool) -> Tensor:
    """Matrices `[out, at most items]` of one dtype of 16 or 32 bits, stacked along out, as panels
    `[panels, items, WIDTH]`. The last panel and missing items are zeros."""
    dtype = parts[0].dtype
    packed = pages.take((num_panels(sum(map(len, parts))), items, WIDTH), dtype)
    packed[-1].zero_()
    packed[:, parts[0].shape[1] :].zero_()
    first = 0
    with pool.awake():
        for part in parts:
            rows = part if part.stride(1) == 1 else part.contiguous()
            operands = PackingOperands(
                x=rows.data_ptr(),
                x_stride=rows.stride(0) * rows.itemsize,
                rows=len(rows),
                first=first,
                items=rows.shape[1],
                y=packed.data_ptr(),
                y_items=items,
            )
            KernelCall(pool, packing_kernel(dtype), operands)(chunks_of(first, len(rows)))
            first += len(rows)
    return packed


def in_items(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix whose rows are in items of `dtype`, the last one filled with zeros."""
    missing = -values.shape[1] % (dtype.itemsize // values.itemsize)
    whole = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return whole.contiguous().view(dtype)


def num_panels(outputs: int) -> int:
    return -(-outputs // WIDTH)


def chunks_of(first: int, rows: int) -> int:
    """The number of panels that `rows` channels from `first` on are in."""
    return num_panels(first + rows) - first // WIDTH
