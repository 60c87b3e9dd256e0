"""Packs weights into panels, in the order in which the tiles of `packed_tiles` read them, and adds
up those of int8."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes

import numpy as np

from engine.worker.cpu.build import leaf
from engine.worker.cpu.intrinsics import int8s, int16s, int32s
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.cpu.kernels.vectors import LINE
from engine.worker.cpu.operands import make_reader, operands


@operands
class PackingOperands(ctypes.Structure):
    """Rows of items, and the panels `[panels, y_items, WIDTH]` of which they become channels
    `first` and following."""

    x: int
    x_stride: int  # bytes
    rows: int
    first: int
    items: int
    y: int
    y_items: int


_read_operands = make_reader(PackingOperands)


@leaf
def _pack(operands, chunk, items_of, item_bytes):
    """A chunk is the part of a panel that its rows are in; a cache line of each row at a time."""
    a = _read_operands(operands)
    panel = a.first // WIDTH + chunk
    start = max(a.first, panel * WIDTH)
    stop = min(a.first + a.rows, (panel + 1) * WIDTH)
    for at in range(0, a.items, LINE // item_bytes):
        count = min(LINE // item_bytes, a.items - at)
        target = a.y + (panel * a.y_items + at) * WIDTH * item_bytes
        for row in range(start, stop):
            x = items_of(a.x + (row - a.first) * a.x_stride + at * item_bytes, count)
            y = items_of(target + (row - panel * WIDTH) * item_bytes, count * WIDTH)
            for k in range(count):
                y[k * WIDTH] = x[k]


def pack_16_bits(operands, chunk, thread):
    """`PackingOperands` with items of 16 bits."""
    _pack(operands, chunk, int16s, 2)


def pack_32_bits(operands, chunk, thread):
    """`PackingOperands` with items of 32 bits."""
    _pack(operands, chunk, int32s, 4)


@operands
class SumOperands(ctypes.Structure):
    """`y = factor * sum(x)` over every `depth` inputs of a row."""

    x: int  # int8 [rows, width]
    x_stride: int  # bytes
    width: int
    depth: int
    factor: int
    y: int  # int32 [pieces, outputs], of which it is the first `rows`
    outputs: int
    rows: int
    rows_per_chunk: int


_read_sums = make_reader(SumOperands)


def sum_int8(operands, chunk, thread):
    """`SumOperands`."""
    a = _read_sums(operands)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        for piece in range((a.width + a.depth - 1) // a.depth):
            first, total = piece * a.depth, np.int32(0)
            x = int8s(a.x + row * a.x_stride + first, min(a.depth, a.width - first))
            for k in range(len(x)):
                total += np.int32(x[k])
            int32s(a.y + (piece * a.outputs + row) * BYTES, 1)[0] = total * a.factor
