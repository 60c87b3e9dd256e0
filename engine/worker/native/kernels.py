"""The operators of a layer, each `kernel(operands, chunk, thread)` over addresses.

`operands` are int64 words; what each kernel takes is the NamedTuple beside it, word for word.
A chunk is a run of columns (linear) or of rows (all others).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import numpy as np
from numba import njit

from engine.worker.native.build import FAST
from engine.worker.native.memory import floats, power_of_two, words
from engine.worker.native.tiles import COLUMNS, MOST_ROWS, make_dot_tile

PANEL = 48  # rows of x that pass over a weight while it is in cache
DEPTH = 1024  # floats of k that a tile walks before it moves on
BYTES = 4

SILU, GELU_TANH = 0, 1

_tile_1, _tile_2, _tile_3 = (make_dot_tile(m, COLUMNS) for m in (1, 2, 3))
_single = make_dot_tile(1, 1)


class LinearOperands(NamedTuple):
    """`y[rows, outputs] = x w^T + bias`, or `+=` with `adds`; weights are row-major."""

    weight: int
    inputs: int
    outputs: int
    bias: int  # an address, or 0 for none
    columns: int  # of a chunk
    x: int
    x_stride: int
    y: int
    y_stride: int
    rows: int
    adds: int


@njit(inline="always")
def _four_columns(w, w_stride, x, x_stride, y, y_stride, length, rows, ahead, adds):
    """Four columns of y, all rows: threes of rows, as even as can be.

    The first tiles prefetch the four lines of what is needed next, so that memory keeps pace with
    arithmetic; the others fetch what is there already.
    """
    groups = (rows + MOST_ROWS - 1) // MOST_ROWS
    line = w_stride * BYTES
    m = 0
    for group in range(groups):
        count = (rows - m + groups - group - 1) // (groups - group)
        at, out = x + m * x_stride * BYTES, y + m * y_stride * BYTES
        first = also = w
        if group == 0:
            first, also = ahead, ahead + line
        elif group == 1:
            first, also = ahead + 2 * line, (ahead + 3 * line if groups == 2 else w)
        elif group == 2:
            first = ahead + 3 * line
        if count == 3:
            _tile_3(w, w_stride, at, x_stride, out, y_stride, length, first, also, adds)
        elif count == 2:
            _tile_2(w, w_stride, at, x_stride, out, y_stride, length, first, also, adds)
        else:
            _tile_1(w, w_stride, at, x_stride, out, y_stride, length, first, also, adds)
        m += count


@njit(inline="always")
def _piece(w, w_stride, x, x_stride, y, y_stride, length, columns, rows, ahead, adds):
    """`length` of k for some columns of y, all rows; weights are prefetched `ahead` bytes on."""
    whole = columns - columns % COLUMNS
    for n in range(0, whole, COLUMNS):
        at, out = w + n * w_stride * BYTES, y + n * BYTES
        _four_columns(at, w_stride, x, x_stride, out, y_stride, length, rows, at + ahead, adds)
    for n in range(whole, columns):
        line = w + n * w_stride * BYTES
        for m in range(rows):
            row, out = x + m * x_stride * BYTES, y + (m * y_stride + n) * BYTES
            _single(line, w_stride, row, x_stride, out, y_stride, length, line, line, adds)


def linear(operands, chunk, thread):
    """See `LinearOperands`. k is cut alike for any number of rows; the order of cuts is free."""
    w, inputs, outputs, bias, columns, x, x_stride, y, y_stride, rows, adds = words(operands, 11)
    first = chunk * columns
    columns = min(columns, outputs - first)
    w += first * inputs * BYTES
    y += first * BYTES
    if bias != 0:
        shift = floats(bias + first * BYTES, columns)
        for m in range(rows):
            out = floats(y + m * y_stride * BYTES, columns)
            for n in range(columns):
                out[n] = shift[n] + (out[n] if adds != 0 else np.float32(0))
        adds = 1
    pieces = (inputs + DEPTH - 1) // DEPTH
    depth = ((inputs + pieces - 1) // pieces + 15) // 16 * 16
    # Few rows: walk along the weights as they lie. Many: keep a piece of them in cache.
    block = COLUMNS if rows <= PANEL else columns
    line = inputs * BYTES
    for n in range(0, columns, block):
        for piece in range(pieces):
            k = piece * depth
            then = piece + (2 if pieces == 1 else 1)  # the piece that is prefetched
            ahead = then // pieces * COLUMNS * line + (then % pieces - piece) * depth * BYTES
            if rows > PANEL:
                ahead = COLUMNS * line
            for m in range(0, rows, PANEL):
                _piece(
                    w + n * line + k * BYTES,
                    inputs,
                    x + (m * x_stride + k) * BYTES,
                    x_stride,
                    y + (m * y_stride + n) * BYTES,
                    y_stride,
                    min(depth, inputs - k),
                    min(block, columns - n),
                    min(PANEL, rows - m),
                    ahead,
                    adds + k,
                )


class NormOperands(NamedTuple):
    """Root mean square norm of `groups` runs of `dim` floats in each row; y may be x."""

    weight: int
    eps: float
    dim: int
    x: int
    x_stride: int
    y: int
    y_stride: int
    rows: int
    groups: int
    rows_per_chunk: int


@njit(fastmath=FAST)
def _mean_square(x):
    total = np.float32(0)
    for value in x:
        total += value * value
    return total / np.float32(len(x))


def rms_norm(operands, chunk, thread):
    """See `NormOperands`."""
    weight_at, _, dim, x_at, x_stride, y_at, y_stride, rows, groups, per = words(operands, 10)
    eps = floats(operands + 8, 1)[0]
    weight = floats(weight_at, dim)
    for row in range(chunk * per, min(rows, (chunk + 1) * per)):
        for group in range(groups):
            x = floats(x_at + (row * x_stride + group * dim) * BYTES, dim)
            y = floats(y_at + (row * y_stride + group * dim) * BYTES, dim)
            scale = np.float32(1) / np.sqrt(_mean_square(x) + eps)
            for k in range(dim):
                y[k] = x[k] * scale * weight[k]


class TurnOperands(NamedTuple):
    """Rotary positions in place: pairs are the halves of each of `heads` heads of a row."""

    x: int
    x_stride: int
    cos: int  # [rows, half]
    sin: int
    rows: int
    heads: int
    half: int
    rows_per_chunk: int


def turn(operands, chunk, thread):
    """See `TurnOperands`."""
    x_at, x_stride, cos_at, sin_at, rows, heads, half, per = words(operands, 8)
    for row in range(chunk * per, min(rows, (chunk + 1) * per)):
        cos = floats(cos_at + row * half * BYTES, half)
        sin = floats(sin_at + row * half * BYTES, half)
        for head in range(heads):
            at = x_at + (row * x_stride + 2 * head * half) * BYTES
            first, second = floats(at, half), floats(at + half * BYTES, half)
            for k in range(half):
                a, b = first[k], second[k]
                first[k] = a * cos[k] - b * sin[k]
                second[k] = b * cos[k] + a * sin[k]


@njit(fastmath=FAST)
def exp_float(x):
    """e to a float32, to about 1e-7 of itself; what is no number stays none."""
    x = x * np.float32(1.44269504)
    x = np.float32(-126) if x < np.float32(-126) else x
    x = np.float32(127) if x > np.float32(127) else x
    whole = np.floor(x + np.float32(0.5))
    part = x - whole
    y = np.float32(1.5353362e-4)
    y = y * part + np.float32(1.3398874e-3)
    y = y * part + np.float32(9.6184373e-3)
    y = y * part + np.float32(5.5503324e-2)
    y = y * part + np.float32(2.4022648e-1)
    y = y * part + np.float32(6.9314720e-1)
    y = y * part + np.float32(1.0)
    return y * power_of_two(whole)


class ActivationOperands(NamedTuple):
    """`y = act(x[:, :width])`, times `x[:, width:]` where the MLP is gated."""

    kind: int
    is_gated: int
    x: int
    x_stride: int
    y: int
    y_stride: int
    rows: int
    width: int
    rows_per_chunk: int


def activation(operands, chunk, thread):
    """See `ActivationOperands`. Both kinds are x times a sigmoid."""
    kind, is_gated, x_at, x_stride, y_at, y_stride, rows, width, per = words(operands, 9)
    one, twice = np.float32(1), np.float32(2 * 0.7978845608028654)
    cubic = np.float32(0.044715)
    for row in range(chunk * per, min(rows, (chunk + 1) * per)):
        x = floats(x_at + row * x_stride * BYTES, width)
        y = floats(y_at + row * y_stride * BYTES, width)
        if kind == SILU:
            for k in range(width):
                y[k] = x[k] / (one + exp_float(-x[k]))
        else:
            for k in range(width):
                inner = twice * (x[k] + cubic * x[k] * x[k] * x[k])
                y[k] = x[k] / (one + exp_float(-inner))
        if is_gated != 0:
            up = floats(x_at + (row * x_stride + width) * BYTES, width)
            for k in range(width):
                y[k] *= up[k]


KERNELS = (linear, rms_norm, turn, activation)
