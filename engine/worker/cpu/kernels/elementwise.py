"""The operators of a layer, each `kernel(operands, chunk, thread)` over addresses.

`operands` are int64 words; what each kernel takes is the NamedTuple beside it, word for word.
A chunk is a run of rows.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import numpy as np
from numba import njit

from engine.worker.cpu.build import FAST
from engine.worker.cpu.intrinsics import floats, power_of_two, words

BYTES = 4

SILU, GELU_TANH = 0, 1


class NormOperands(NamedTuple):
    """A norm of `groups` runs of `dim` floats in each row; y may be x."""

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
    bias: int  # not of the root mean square norm


@njit(fastmath=FAST)
def _mean_square(x):
    total = np.float32(0)
    for value in x:
        total += value * value
    return total / np.float32(len(x))


@njit(fastmath=FAST)
def _mean(x):
    total = np.float32(0)
    for value in x:
        total += value
    return total / np.float32(len(x))


@njit(fastmath=FAST)
def _variance(x, mean):
    total = np.float32(0)
    for value in x:
        total += (value - mean) * (value - mean)
    return total / np.float32(len(x))


def layer_norm(operands, chunk, thread):
    """See `NormOperands`; of mean and variance."""
    weight_at, _, dim, x_at, x_stride, y_at, y_stride, rows, groups, per, bias_at = words(
        operands, 11
    )
    eps = floats(operands + 8, 1)[0]
    weight, bias = floats(weight_at, dim), floats(bias_at, dim)
    for row in range(chunk * per, min(rows, (chunk + 1) * per)):
        for group in range(groups):
            x = floats(x_at + (row * x_stride + group * dim) * BYTES, dim)
            y = floats(y_at + (row * y_stride + group * dim) * BYTES, dim)
            mean = _mean(x)
            scale = np.float32(1) / np.sqrt(_variance(x, mean) + eps)
            for k in range(dim):
                y[k] = (x[k] - mean) * scale * weight[k] + bias[k]


def rms_norm(operands, chunk, thread):
    """See `NormOperands`; of the root mean square."""
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


class RopeOperands(NamedTuple):
    """Rotary positions in place: pairs are the halves of each of `heads` heads of a row."""

    x: int
    x_stride: int
    cos: int  # [rows, half]
    sin: int
    rows: int
    heads: int
    half: int
    rows_per_chunk: int


def apply_rope(operands, chunk, thread):
    """See `RopeOperands`."""
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


KERNELS = (layer_norm, rms_norm, apply_rope, activation)
