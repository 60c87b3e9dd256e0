"""Norms, RoPE and activations, each `kernel(operands, chunk, thread)`. A chunk is a run of rows.

All arguments are int64; `operands` is the address of the structure that stands beside the kernel.
Strides are in floats.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes

import numpy as np

from engine.worker.cpu.build import fast_leaf, leaf
from engine.worker.cpu.intrinsics import float32s, power_of_two
from engine.worker.cpu.operands import make_reader, operands

BYTES = 4  # bytes of a float

SILU, GELU_TANH, RELU, GELU, RELU_SQUARED = 0, 1, 2, 3, 4


@operands
class NormOperands(ctypes.Structure):
    """A norm over `groups` runs of `dim` floats in each row; y may be x, unless the kernel adds."""

    weight: int
    bias: int  # layer_norm only
    eps: float
    dim: int
    x: int
    x_stride: int
    y: int
    y_stride: int
    rows: int
    groups: int
    adds: int  # whether the result is added to y
    rows_per_chunk: int


_norm_operands = make_reader(NormOperands)


# Sums are loops over indices: of loops over items LLVM makes no wide vectors.
@fast_leaf
def _mean_square(x):
    total = np.float32(0)
    for k in range(len(x)):
        total += x[k] * x[k]
    return total / np.float32(len(x))


@fast_leaf
def _mean(x):
    total = np.float32(0)
    for k in range(len(x)):
        total += x[k]
    return total / np.float32(len(x))


@fast_leaf
def _variance(x, mean):
    total = np.float32(0)
    for k in range(len(x)):
        total += (x[k] - mean) * (x[k] - mean)
    return total / np.float32(len(x))


def layer_norm(operands, chunk, thread):
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over each group of each row."""
    a = _norm_operands(operands)
    eps, dim = np.float32(a.eps), a.dim
    weight, bias = float32s(a.weight, dim), float32s(a.bias, dim)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        for group in range(a.groups):
            x = float32s(a.x + (row * a.x_stride + group * dim) * BYTES, dim)
            y = float32s(a.y + (row * a.y_stride + group * dim) * BYTES, dim)
            mean = _mean(x)
            scale = np.float32(1) / np.sqrt(_variance(x, mean) + eps)
            if a.adds != 0:
                for k in range(dim):
                    y[k] += (x[k] - mean) * scale * weight[k] + bias[k]
            else:
                for k in range(dim):
                    y[k] = (x[k] - mean) * scale * weight[k] + bias[k]


def rms_norm(operands, chunk, thread):
    """`x / sqrt(mean(x²) + eps) * weight` over each group of each row."""
    a = _norm_operands(operands)
    eps, dim = np.float32(a.eps), a.dim
    weight = float32s(a.weight, dim)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        for group in range(a.groups):
            x = float32s(a.x + (row * a.x_stride + group * dim) * BYTES, dim)
            y = float32s(a.y + (row * a.y_stride + group * dim) * BYTES, dim)
            scale = np.float32(1) / np.sqrt(_mean_square(x) + eps)
            if a.adds != 0:
                for k in range(dim):
                    y[k] += x[k] * scale * weight[k]
            else:
                for k in range(dim):
                    y[k] = x[k] * scale * weight[k]


@operands
class RopeOperands(ctypes.Structure):
    """RoPE in place on `heads` heads of each row; pairs are made of a head's two halves."""

    x: int
    x_stride: int
    cos: int  # [rows, half]
    sin: int
    rows: int
    heads: int
    half: int  # head dim / 2
    rows_per_chunk: int


_rope_operands = make_reader(RopeOperands)


@leaf
def rotate_head(head, cos, sin, half):
    """RoPE in place on one head of `2 * half` floats at an address."""
    first, second = float32s(head, half), float32s(head + half * BYTES, half)
    for k in range(half):
        a, b = first[k], second[k]
        first[k] = a * cos[k] - b * sin[k]
        second[k] = b * cos[k] + a * sin[k]


def apply_rope(operands, chunk, thread):
    """RoPE on all heads of a run of rows."""
    a = _rope_operands(operands)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        cos = float32s(a.cos + row * a.half * BYTES, a.half)
        sin = float32s(a.sin + row * a.half * BYTES, a.half)
        for head in range(a.heads):
            rotate_head(a.x + (row * a.x_stride + 2 * head * a.half) * BYTES, cos, sin, a.half)


@fast_leaf
def exp_float(x):
    """e to a float32 with a relative error of about 1e-7; NaN gives NaN."""
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


@fast_leaf
def _gelu(x):
    """`x * Φ(x)`, by the complementary error function `erfcc` of Numerical Recipes, section 6.2,
    which has a relative error below 2e-7."""
    one, half = np.float32(1), np.float32(0.5)
    z = np.abs(x) * np.float32(0.70710678)
    t = one / (one + half * z)
    y = np.float32(0.17087277)
    y = y * t - np.float32(0.82215223)
    y = y * t + np.float32(1.48851587)
    y = y * t - np.float32(1.13520398)
    y = y * t + np.float32(0.27886807)
    y = y * t - np.float32(0.18628806)
    y = y * t + np.float32(0.09678418)
    y = y * t + np.float32(0.37409196)
    y = y * t + np.float32(1.00002368)
    y = y * t - np.float32(1.26551223)
    tail = half * t * exp_float(y - z * z)  # 1 - Φ(|x|)
    return x * (tail if x < np.float32(0) else one - tail)


@operands
class ActivationOperands(ctypes.Structure):
    """`y = act(x[:, :width])`, times `by[:, :width]` if it is gated."""

    function: int  # SILU, GELU_TANH, RELU, GELU or RELU_SQUARED
    is_gated: int
    by: int  # what a gated activation is multiplied by
    by_stride: int
    x: int
    x_stride: int
    y: int
    y_stride: int
    rows: int
    width: int
    rows_per_chunk: int


_activation_operands = make_reader(ActivationOperands)


@fast_leaf
def _activate(function, x, y):
    """SiLU or GELU in its tanh form, which are x times a sigmoid; ReLU and its square; GELU."""
    one, twice = np.float32(1), np.float32(2 * 0.7978845608028654)
    cubic = np.float32(0.044715)
    if function == SILU:
        for k in range(len(x)):
            y[k] = x[k] / (one + exp_float(-x[k]))
    elif function == RELU:
        for k in range(len(x)):
            y[k] = np.float32(0) if x[k] < np.float32(0) else x[k]
    elif function == RELU_SQUARED:
        for k in range(len(x)):
            y[k] = np.float32(0) if x[k] < np.float32(0) else x[k] * x[k]
    elif function == GELU:
        for k in range(len(x)):
            y[k] = _gelu(x[k])
    else:
        for k in range(len(x)):
            inner = twice * (x[k] + cubic * x[k] * x[k] * x[k])
            y[k] = x[k] / (one + exp_float(-inner))


def activation(operands, chunk, thread):
    """The activation of a run of rows, times their second half if the MLP is gated."""
    a = _activation_operands(operands)
    width = a.width
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        x = float32s(a.x + row * a.x_stride * BYTES, width)
        y = float32s(a.y + row * a.y_stride * BYTES, width)
        _activate(a.function, x, y)
        if a.is_gated != 0:
            up = float32s(a.by + row * a.by_stride * BYTES, width)
            for k in range(width):
                y[k] *= up[k]


@operands
class SwigluOperands(ctypes.Structure):
    """`y = g * sigmoid(alpha * g) * (u + 1)`: g is `x[:, :width]`, at most `limit`, and u is
    `x[:, width:]`, at most `limit` in size."""

    alpha: float
    limit: float
    x: int
    x_stride: int
    y: int
    y_stride: int
    rows: int
    width: int
    rows_per_chunk: int


_swiglu_operands = make_reader(SwigluOperands)


def clamped_swiglu(operands, chunk, thread):
    """`SwigluOperands` for a run of rows (gpt-oss)."""
    a = _swiglu_operands(operands)
    alpha, limit, one = np.float32(a.alpha), np.float32(a.limit), np.float32(1)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        gate = float32s(a.x + row * a.x_stride * BYTES, a.width)
        up = float32s(a.x + (row * a.x_stride + a.width) * BYTES, a.width)
        y = float32s(a.y + row * a.y_stride * BYTES, a.width)
        for k in range(a.width):
            g, u = gate[k], up[k]
            g = limit if g > limit else g
            u = limit if u > limit else (-limit if u < -limit else u)
            y[k] = g / (one + exp_float(-alpha * g)) * (u + one)


@operands
class ScaleOperands(ctypes.Structure):
    """`x *= factor` in place."""

    factor: float
    x: int
    x_stride: int
    rows: int
    width: int
    rows_per_chunk: int


_scale_operands = make_reader(ScaleOperands)


def scale(operands, chunk, thread):
    """Multiply a run of rows by a factor."""
    a = _scale_operands(operands)
    factor = np.float32(a.factor)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        x = float32s(a.x + row * a.x_stride * BYTES, a.width)
        for k in range(a.width):
            x[k] *= factor


@operands
class GateRowsOperands(ctypes.Structure):
    """`x *= sigmoid(score)` for each row."""

    x: int
    x_stride: int
    scores: int
    scores_stride: int
    width: int
    rows: int
    rows_per_chunk: int


_gate_rows_operands = make_reader(GateRowsOperands)


def gate_rows(operands, chunk, thread):
    """`GateRowsOperands` for a run of rows."""
    a = _gate_rows_operands(operands)
    one = np.float32(1)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        x = float32s(a.x + row * a.x_stride * BYTES, a.width)
        score = float32s(a.scores + row * a.scores_stride * BYTES, 1)[0]
        share = one / (one + exp_float(-score))
        for k in range(a.width):
            x[k] *= share


@operands
class HeadGateOperands(ctypes.Structure):
    """Rows `y` of `heads` pairs of a head and its gate, then `rest` floats.

    `without_gates` copies the heads and the rest to `x`; `gate_heads` multiplies the heads in `x`
    by the sigmoids of their gates.
    """

    x: int
    x_stride: int
    y: int
    y_stride: int
    heads: int
    dim: int
    rest: int
    rows: int
    rows_per_chunk: int


_head_gate_operands = make_reader(HeadGateOperands)


def without_gates(operands, chunk, thread):
    """`HeadGateOperands` for a run of rows."""
    a = _head_gate_operands(operands)
    dim = a.dim
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        x, y = a.x + row * a.x_stride * BYTES, a.y + row * a.y_stride * BYTES
        for head in range(a.heads):
            to = float32s(x + head * dim * BYTES, dim)
            source = float32s(y + 2 * head * dim * BYTES, dim)
            for k in range(dim):
                to[k] = source[k]
        to = float32s(x + a.heads * dim * BYTES, a.rest)
        source = float32s(y + 2 * a.heads * dim * BYTES, a.rest)
        for k in range(a.rest):
            to[k] = source[k]


def gate_heads(operands, chunk, thread):
    """`HeadGateOperands` for a run of rows."""
    a = _head_gate_operands(operands)
    dim, one = a.dim, np.float32(1)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        for head in range(a.heads):
            x = float32s(a.x + (row * a.x_stride + head * dim) * BYTES, dim)
            gates = a.y + (row * a.y_stride + (2 * head + 1) * dim) * BYTES
            gate = float32s(gates, dim)
            for k in range(dim):
                x[k] /= one + exp_float(-gate[k])


KERNELS = (
    scale,
    clamped_swiglu,
    gate_rows,
    without_gates,
    gate_heads,
    layer_norm,
    rms_norm,
    apply_rope,
    activation,
)
