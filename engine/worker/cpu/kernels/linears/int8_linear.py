"""The int8 linear in two kernels: quantize the inputs of each token, then multiply.

Weights have 127 steps in each direction and a scale per output channel. Inputs have a scale per
token and 14 bits, the most for which sums of `DEPTH` products fit in 32 bits, so that nearly all of
the error is that of the weights; or 8 bits, for which the CPU may have a faster instruction (VNNI).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import numpy as np
from numba import njit

from engine.worker.cpu.intrinsics import float32s, float_of_bits, int8s, int16s, int32s
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.linears.amx_tiles import amx_uint8_tile, release_tiles
from engine.worker.cpu.kernels.linears.linear import begin_row, input_operands, multiply
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH, int16_tile, uint8_tile
from engine.worker.cpu.kernels.linears.tile_formats import (
    AMX_ROWS,
    HAS_AMX,
    MAX_ROWS,
    PAIR,
    QUAD,
)
from engine.worker.cpu.kernels.linears.tile_outputs import add_int8_sums

MAX_14_BITS = (1 << 14) - 1
MAX_8_BITS = 127
ZERO_UINT8 = 128  # what stands for 0: VNNI takes unsigned inputs
DEPTH = 1024  # k is added up in so many: 127 * (2^14 - 1) * 1024 is just below 2^31
# Up to so many rows VNNI mostly reads weights faster than AMX, by up to 15 % on an Intel Xeon.
VECTOR_ROWS = 4


@njit(inline="always")
def largest_magnitude(x):
    """The largest absolute value of the bits of floats; not finite if any is not.

    Magnitudes of floats are ordered as their bits are, and integers are compared in vectors.
    """
    largest = np.int32(0)
    for one in x:
        magnitude = np.int32(one & 0x7FFFFFFF)
        largest = magnitude if magnitude > largest else largest
    return float_of_bits(largest)


@njit(inline="always")
def quantize_row(x_at, width, y, steps, zero):
    """Round floats to multiples of the scale, which is returned; `steps` in each direction."""
    x = float32s(x_at, width)
    largest = largest_magnitude(int32s(x_at, width))
    factor = np.float32(steps) / largest if largest > 0 else np.float32(0)
    for k in range(len(x)):
        y[k] = np.int32(x[k] * factor + np.float32(0.5 if x[k] >= 0 else -0.5)) + zero
    for k in range(len(x), len(y)):
        y[k] = 0
    return largest * np.float32(1 / steps)


def quantize_to_14_bits(operands, chunk, thread):
    """`InputOperands` with y in int16. Rows with NaN or infinity get a scale that is not finite."""
    a = input_operands(operands)
    scales = float32s(a.scale, a.rows)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        y = int16s(a.y + row * a.padded * 2, a.padded)
        scales[row] = quantize_row(a.x + row * a.x_stride * BYTES, a.width, y, MAX_14_BITS, 0)


def quantize_to_8_bits(operands, chunk, thread):
    """`InputOperands` with y in uint8 around `ZERO_UINT8`; scales as above."""
    a = input_operands(operands)
    scales = float32s(a.scale, a.rows)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        y, x = int8s(a.y + row * a.padded, a.padded), a.x + row * a.x_stride * BYTES
        scales[row] = quantize_row(x, a.width, y, MAX_8_BITS, ZERO_UINT8)


@njit(inline="always")
def _finish(sums, scales, bias_at, y_at, y_stride, columns, rows, is_first, adds):
    """Add the scaled sums of a tile to y."""
    if columns == WIDTH:
        add_int8_sums(sums, *scales, bias_at, y_at, y_stride, rows, is_first, adds)
        return
    offsets, w_scales = int32s(scales[0], columns), float32s(scales[1], columns)
    bias, x_scales = float32s(bias_at, columns), float32s(scales[2], rows)
    for m in range(rows):
        row = int32s(sums + m * WIDTH * BYTES, columns)
        y = float32s(y_at + m * y_stride * BYTES, columns)
        if is_first:
            begin_row(y, bias, adds)
        scale = x_scales[m]
        for n in range(columns):
            y[n] += np.float32(row[n] - offsets[n]) * (w_scales[n] * scale)


@njit(inline="always")
def _amx_or_vectors(w, x, x_stride, rows, groups, sums, ahead, ahead_step, tiles):
    """The same integers by either."""
    if rows <= VECTOR_ROWS:
        uint8_tile(w, x, x_stride, rows, groups, sums, ahead, ahead_step, tiles)
    else:
        amx_uint8_tile(w, x, x_stride, rows, groups, sums, ahead, ahead_step, tiles)


UINT8_TILE, UINT8_ROWS = (_amx_or_vectors, AMX_ROWS) if HAS_AMX else (uint8_tile, MAX_ROWS)


def linear_14_bits(operands, chunk, thread):
    """`LinearOperands` with int8 weights and inputs of 14 bits."""
    multiply(operands, chunk, int16_tile, _finish, MAX_ROWS, DEPTH, PAIR, PAIR * WIDTH, 4)


def linear_8_bits(operands, chunk, thread):
    """`LinearOperands` with int8 weights and inputs of 8 bits."""
    multiply(operands, chunk, UINT8_TILE, _finish, UINT8_ROWS, DEPTH, QUAD, QUAD * WIDTH, 4)
    release_tiles()
