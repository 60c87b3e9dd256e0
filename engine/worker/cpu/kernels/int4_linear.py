"""The int4 linear in two kernels: quantize the inputs of each token, then multiply.

Weights have 16 steps and a scale for each 32 inputs of an output channel. Inputs are quantized as
for int8 weights: 8 bits if the CPU has VNNI, else 14, with one scale per token.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import numpy as np
from numba import njit

from engine.worker.cpu.intrinsics import float32s, int8s, int16s, int32s
from engine.worker.cpu.kernels import grouped_tiles
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.grouped_tiles import GROUP, MAX_ROWS, MIDDLE, int8_tile, int16_tile
from engine.worker.cpu.kernels.int8_linear import (
    MAX_8_BITS,
    MAX_14_BITS,
    largest_magnitude,
)
from engine.worker.cpu.kernels.linear import begin_row, input_operands, multiply
from engine.worker.cpu.kernels.packed_tiles import WIDTH

DEPTH = 1024  # of k
INT8_X_BYTES = grouped_tiles.INT8_NIBBLES.x_group_bytes
INT16_X_BYTES = grouped_tiles.INT16_NIBBLES.x_group_bytes


@njit(inline="always")
def _quantize_group(x, first, y, factor):
    """Round up to `GROUP` floats from `first` on to y, zeros beyond; returns their sum."""
    total = np.int32(0)
    for k in range(len(y)):
        value = np.int32(0)
        if first + k < len(x):
            number = x[first + k]
            value = np.int32(number * factor + np.float32(0.5 if number >= 0 else -0.5))
        y[k] = value
        total += value
    return total


def quantize_groups_to_8_bits(operands, chunk, thread):
    """`InputOperands` with groups as `grouped_tiles` reads them, inputs in int8."""
    a = input_operands(operands)
    scales = float32s(a.scale, a.rows)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        x_at = a.x + row * a.x_stride * BYTES
        x = float32s(x_at, a.width)
        largest = largest_magnitude(int32s(x_at, a.width))
        factor = np.float32(MAX_8_BITS) / largest if largest > 0 else np.float32(0)
        for group in range(a.padded // GROUP):
            y = a.y + (row * (a.padded // GROUP) + group) * INT8_X_BYTES
            total = _quantize_group(x, group * GROUP, int8s(y + 4, GROUP), factor)
            int32s(y, 1)[0] = -MIDDLE * total
        scales[row] = largest * np.float32(1 / MAX_8_BITS)


def quantize_groups_to_14_bits(operands, chunk, thread):
    """`InputOperands` with groups as `grouped_tiles` reads them, inputs in int16."""
    a = input_operands(operands)
    scales = float32s(a.scale, a.rows)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        x_at = a.x + row * a.x_stride * BYTES
        x = float32s(x_at, a.width)
        largest = largest_magnitude(int32s(x_at, a.width))
        factor = np.float32(MAX_14_BITS) / largest if largest > 0 else np.float32(0)
        for group in range(a.padded // GROUP):
            y = a.y + (row * (a.padded // GROUP) + group) * INT16_X_BYTES
            total = _quantize_group(x, group * GROUP, int16s(y + 4, GROUP), factor)
            int32s(y, 1)[0] = -MIDDLE * total
        scales[row] = largest * np.float32(1 / MAX_14_BITS)


@njit(inline="always")
def _finish(sums, scales, bias_at, y_at, y_stride, columns, rows, is_first, adds):
    """Add the sums of a tile, times the scale of each row of x, to y."""
    bias, x_scales = float32s(bias_at, columns), float32s(scales[2], rows)
    for m in range(rows):
        row = float32s(sums + m * WIDTH * BYTES, columns)
        y = float32s(y_at + m * y_stride * BYTES, columns)
        if is_first:
            begin_row(y, bias, adds)
        scale = x_scales[m]
        for n in range(columns):
            y[n] += row[n] * scale


def linear_int4_8_bits(operands, chunk, thread):
    """`LinearOperands` with int4 weights and inputs of 8 bits."""
    multiply(
        operands,
        chunk,
        int8_tile,
        _finish,
        MAX_ROWS,
        DEPTH,
        GROUP,
        grouped_tiles.GROUP_BYTES,
        INT8_X_BYTES,
    )


def linear_int4_14_bits(operands, chunk, thread):
    """`LinearOperands` with int4 weights and inputs of 14 bits."""
    multiply(
        operands,
        chunk,
        int16_tile,
        _finish,
        MAX_ROWS,
        DEPTH,
        GROUP,
        grouped_tiles.GROUP_BYTES,
        INT16_X_BYTES,
    )
