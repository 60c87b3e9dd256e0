"""The 8-bit linear in two kernels: round the activations of each token, then multiply.

Weights have 127 steps either way and a scale per output channel. Activations have a scale per
token and 14 bits, as fine as sums of `DEPTH` products allow in 32 bits, so that nearly all of the
error is that of the weights; or 8 bits, where the machine multiplies those faster.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import numpy as np
from numba import njit

from engine.worker.cpu.intrinsics import bits, float_of_bits, floats, octets, shorts, words
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.linear import begin_row, multiply
from engine.worker.cpu.kernels.packed_tiles import (
    HAS_QUADS,
    INT_ROWS,
    PAIR,
    QUAD,
    WIDTH,
    pair_tile,
    quad_tile,
)

MOST_SHORT = (1 << 14) - 1
MOST_OCTET = 127
ZERO_OCTET = 128  # an activation of zero: octets are unsigned
DEPTH = 1024  # of k: 127 * (2^14 - 1) * 1024 is just below 2^31


class RoundOperands(NamedTuple):
    """`y = round(x / scale)` in `padded` int16 or uint8, each row with its own `scale`.

    What lies beyond `width` is of no account, but is written.
    """

    x: int
    x_stride: int
    width: int
    y: int
    padded: int
    scale: int
    rows: int
    rows_per_chunk: int


@njit(inline="always")
def _largest_size(x):
    """The largest absolute value; no finite number if any is none. Floats in order of size have
    bits in that order, and whole numbers are compared in vectors."""
    largest = np.int32(0)
    for one in x:
        size = np.int32(one & 0x7FFFFFFF)
        largest = size if size > largest else largest
    return float_of_bits(largest)


@njit(inline="always")
def _round_row(x_at, width, y, most, zero):
    """Round to whole steps, `most` of them either way of `zero`; the size of a step."""
    x = floats(x_at, width)
    largest = _largest_size(bits(x_at, width))
    steps = np.float32(most) / largest if largest > 0 else np.float32(0)
    for k in range(len(x)):
        y[k] = np.int32(x[k] * steps + np.float32(0.5 if x[k] >= 0 else -0.5)) + zero
    for k in range(len(x), len(y)):
        y[k] = 0
    return largest * np.float32(1 / most)


def round_to_shorts(operands, chunk, thread):
    """See `RoundOperands`. The scale of a row with what is no number is none either."""
    x_at, x_stride, width, y_at, padded, scale_at, rows, per = words(operands, 8)
    scales = floats(scale_at, rows)
    for row in range(chunk * per, min(rows, (chunk + 1) * per)):
        y = shorts(y_at + row * padded * 2, padded)
        scales[row] = _round_row(x_at + row * x_stride * BYTES, width, y, MOST_SHORT, 0)


def round_to_octets(operands, chunk, thread):
    """The same with fewer steps."""
    x_at, x_stride, width, y_at, padded, scale_at, rows, per = words(operands, 8)
    scales = floats(scale_at, rows)
    for row in range(chunk * per, min(rows, (chunk + 1) * per)):
        y = octets(y_at + row * padded, padded)
        scales[row] = _round_row(x_at + row * x_stride * BYTES, width, y, MOST_OCTET, ZERO_OCTET)


@njit(inline="always")
def _finish(sums, scales, bias, y, y_stride, columns, rows, is_first, adds):
    """The scaled sums of a tile into y; see `multiply`."""
    offsets, w_scales = bits(scales[0], columns), floats(scales[1], columns)
    shift, x_scales = floats(bias, columns), floats(scales[2], rows)
    for m in range(rows):
        row = bits(sums + m * WIDTH * BYTES, columns)
        out = floats(y + m * y_stride * BYTES, columns)
        if is_first:
            begin_row(out, shift, adds)
        scale = x_scales[m]
        for n in range(columns):
            out[n] += np.float32(row[n] - offsets[n]) * (w_scales[n] * scale)


def linear_of_shorts(operands, chunk, thread):
    """See `LinearOperands`."""
    multiply(operands, chunk, pair_tile, _finish, INT_ROWS, DEPTH, PAIR, PAIR)


def linear_of_octets(operands, chunk, thread):
    """See `LinearOperands`."""
    multiply(operands, chunk, quad_tile, _finish, INT_ROWS, DEPTH, QUAD, QUAD)


KERNELS = (round_to_octets, linear_of_octets) if HAS_QUADS else (round_to_shorts, linear_of_shorts)
