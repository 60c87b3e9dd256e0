"""The 8-bit linear in two kernels: round the activations of each token, then multiply.

Weights have 127 steps either way and a scale per output channel; activations have 14 bits and a
scale per token, as fine as sums of `DEPTH` products allow in 32 bits. So nearly all of the error
is that of the weights.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import numpy as np
from numba import njit

from engine.worker.native.build import FAST
from engine.worker.native.int8_tiles import TURN, make_int8_tile
from engine.worker.native.kernels import BYTES, PANEL
from engine.worker.native.memory import floats, octets, shorts, words
from engine.worker.native.tiles import COLUMNS, MOST_ROWS

MOST_WEIGHT = 127
MOST_ACTIVATION = (1 << 14) - 1
DEPTH = 1024  # of k: 127 * (2^14 - 1) * 1024 is just below 2^31

_tile_1, _tile_2, _tile_3 = (make_int8_tile(m) for m in (1, 2, 3))


class RoundOperands(NamedTuple):
    """`y = round(x / scale)` in int16, each row with its own `scale`, and zeros up to `padded`."""

    x: int
    x_stride: int
    width: int
    y: int
    padded: int
    scale: int
    rows: int
    rows_per_chunk: int


@njit(fastmath=FAST)
def _largest_size(x):
    """The largest absolute value; no number if any is none or infinite."""
    largest = blemish = np.float32(0)
    for value in x:
        size = abs(value)
        largest = size if size > largest else largest
        blemish += value * np.float32(0)
    return largest + blemish


def round_rows(operands, chunk, thread):
    """See `RoundOperands`. The scale of a row with what is no number is none either."""
    x_at, x_stride, width, y_at, padded, scale_at, rows, per = words(operands, 8)
    scales = floats(scale_at, rows)
    for row in range(chunk * per, min(rows, (chunk + 1) * per)):
        x = floats(x_at + row * x_stride * BYTES, width)
        y = shorts(y_at + row * padded * 2, padded)
        largest = _largest_size(x)
        scales[row] = largest * np.float32(1 / MOST_ACTIVATION)
        steps = np.float32(0)
        if largest > 0:
            steps = np.float32(MOST_ACTIVATION) / largest
        for k in range(width):
            y[k] = np.int32(x[k] * steps + np.float32(0.5 if x[k] >= 0 else -0.5))
        for k in range(width, padded):
            y[k] = 0


class Int8LinearOperands(NamedTuple):
    """`y[rows, outputs] = x w^T + bias`, or `+=` with `adds`; int8 weights, int16 x, row-major.

    `inputs` is a multiple of 64 and the stride of both.
    """

    weight: int
    weight_scale: int
    inputs: int
    outputs: int
    bias: int  # an address, or 0 for none
    columns: int  # of a chunk
    x: int
    x_scale: int
    y: int
    y_stride: int
    rows: int
    adds: int


@njit(inline="always")
def _four_columns(w, w_stride, w_scale, x, x_scale, y, y_stride, length, rows, ahead, adds):
    """Four columns of y, all rows, at most three at a time; the first prefetch what comes next."""
    m = 0
    while m < rows:
        count = min(MOST_ROWS, rows - m)
        at, scale, out = x + m * w_stride * 2, x_scale + m * BYTES, y + m * y_stride * BYTES
        far = ahead if m == 0 else w
        if count == 3:
            _tile_3(w, w_stride, w_scale, at, w_stride, scale, out, y_stride, length, far, adds)
        elif count == 2:
            _tile_2(w, w_stride, w_scale, at, w_stride, scale, out, y_stride, length, far, adds)
        else:
            _tile_1(w, w_stride, w_scale, at, w_stride, scale, out, y_stride, length, far, adds)
        m += count


@njit(inline="always")
def _one_column(w, w_stride, w_scale, x, x_scale, y, y_stride, length, rows, adds):
    """What is left where the columns are no multiple of four."""
    weights, scales = octets(w, length), floats(x_scale, rows)
    for m in range(rows):
        values = shorts(x + m * w_stride * 2, length)
        total = np.int32(0)
        for k in range(length):
            total += np.int32(weights[k]) * np.int32(values[k])
        out = floats(y + m * y_stride * BYTES, 1)
        value = np.float32(total) * (w_scale * scales[m])
        out[0] = value + (out[0] if adds != 0 else np.float32(0))


@njit(inline="always")
def _piece(w, w_stride, w_scale, x, x_scale, y, y_stride, length, columns, rows, ahead, adds):
    """`length` of k for some columns of y, all rows."""
    whole = columns - columns % COLUMNS
    for n in range(0, whole, COLUMNS):
        at, scale, out = w + n * w_stride, w_scale + n * BYTES, y + n * BYTES
        _four_columns(
            at, w_stride, scale, x, x_scale, out, y_stride, length, rows, at + ahead, adds
        )
    scales = floats(w_scale, columns)
    for n in range(whole, columns):
        at, out = w + n * w_stride, y + n * BYTES
        _one_column(at, w_stride, scales[n], x, x_scale, out, y_stride, length, rows, adds)


def int8_linear(operands, chunk, thread):
    """See `Int8LinearOperands`. k is cut alike for any number of rows."""
    w, w_scale, inputs, outputs, bias, columns, x, x_scale, y, y_stride, rows, adds = words(
        operands, 12
    )
    first = chunk * columns
    columns = min(columns, outputs - first)
    w += first * inputs
    w_scale += first * BYTES
    y += first * BYTES
    if bias != 0:
        shift = floats(bias + first * BYTES, columns)
        for m in range(rows):
            out = floats(y + m * y_stride * BYTES, columns)
            for n in range(columns):
                out[n] = shift[n] + (out[n] if adds != 0 else np.float32(0))
        adds = 1
    pieces = (inputs + DEPTH - 1) // DEPTH
    depth = ((inputs + pieces - 1) // pieces + TURN - 1) // TURN * TURN
    # Few rows: walk along the weights as they lie. Many: keep a piece of them in cache.
    block = COLUMNS if rows <= PANEL else columns
    for n in range(0, columns, block):
        for piece in range(pieces):
            k = piece * depth
            ahead = depth if piece + 1 < pieces else COLUMNS * inputs - k
            if rows > PANEL:
                ahead = COLUMNS * inputs
            for m in range(0, rows, PANEL):
                _piece(
                    w + n * inputs + k,
                    inputs,
                    w_scale + n * BYTES,
                    x + (m * inputs + k) * 2,
                    x_scale + m * BYTES,
                    y + (m * y_stride + n) * BYTES,
                    y_stride,
                    min(depth, inputs - k),
                    min(block, columns - n),
                    min(PANEL, rows - m),
                    ahead,
                    adds + k,
                )


KERNELS = (round_rows, int8_linear)
