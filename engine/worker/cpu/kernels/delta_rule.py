"""Gated DeltaNet on the CPU (`engine.worker.model.mamba`): delta rule, gated norm.

Every sum over keys adds in the order of the keys. A chunk of the delta rule is a panel of some
columns of one head's matrix: columns do not depend on each other, so the panel stays in the cache
for all tokens of the run.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import math

import numpy as np
from numba import njit

from engine.worker.cpu.build import fast_leaf, leaf
from engine.worker.cpu.intrinsics import float32s
from engine.worker.cpu.kernels.delta_tiles import (
    DIRECT,
    PANEL,
    WIDE,
    add_direct,
    predict,
    predict_direct,
    predict_wide,
    update,
)
from engine.worker.cpu.kernels.elementwise import BYTES, exp_float
from engine.worker.cpu.kernels.recurrence import (
    keep_panel,
    load_panel,
    matrix_of,
    mixed_row,
    scan,
    scan_operands,
    time_step,
)
from engine.worker.cpu.kernels.vectors import LANES

# A decode predicts from a whole head of its state, some keys after the other, so that memory is
# read nearly in the order of its addresses, and corrects the state after that. On a core of Zen 3
# 8 rows took, by these keys, 16: 0.92, 32: 0.93, 128: 1.03 of the time with 32 columns at a time; a
# plain read and then multiplication of each head's bytes took 0.92. On two cores 16 took 0.92 to
# 0.98, the plain read and multiplication 0.82 to 0.90. With AVX-512 it was not measured.
READS_ALL = LANES == 8
KEYS_AT_ONCE = 16 if READS_ALL else 1 << 30
UNIT_EPS = 1e-6  # as in the model: squares of q and k that are not larger are not brought to 1


@fast_leaf
def _unit(x, factor):
    """`x = factor * x / |x|`."""
    total = np.float32(UNIT_EPS)
    for value in x:
        total += value * value
    scale = factor / np.sqrt(total)
    for i in range(len(x)):
        x[i] *= scale


@leaf
def _decay(a, row, head):
    """What the state of a head is multiplied by: `exp(decay_rate * softplus(a + bias))`."""
    soft = time_step(a, row, head, a.channels + a.heads * a.value_dim + a.heads)
    return np.float32(math.exp(np.float64(float32s(a.decay_rate, a.heads)[head]) * soft))


@leaf
def _rate(a, row, head):
    """How far a token corrects the state of a head: `sigmoid(b)`."""
    place = a.y + (row * a.y_stride + a.channels + a.heads * a.value_dim + head) * BYTES
    return np.float32(1.0 / (1.0 + math.exp(-np.float64(float32s(place, 1)[0]))))


def delta_inputs(operands, chunk, thread):
    """For a run of rows: q and k of unit length, q times `key_dim ** -0.5`, in place; decays and
    rates of the heads."""
    a = scan_operands(operands)
    factor = np.float32(1) / np.sqrt(np.float32(a.key_dim))
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        for part in range(2 * a.key_heads):
            x = float32s(mixed_row(a, row) + part * a.key_dim * BYTES, a.key_dim)
            _unit(x, factor if part < a.key_heads else np.float32(1))
        rates = float32s(mixed_row(a, row) + a.channels * BYTES, 2 * a.heads)
        for head in range(a.heads):
            rates[2 * head] = _decay(a, row, head)
            rates[2 * head + 1] = _rate(a, row, head)


@njit(inline="always")
def _inputs(a, row, head):
    """Addresses of q, k and v of a head; its decay and its rate."""
    mixed, keys = mixed_row(a, row), a.key_heads * a.key_dim * BYTES
    q = mixed + head // (a.heads // a.key_heads) * a.key_dim * BYTES
    rates = float32s(mixed + (a.channels + 2 * head) * BYTES, 2)
    return q, q + keys, mixed + 2 * keys + head * a.value_dim * BYTES, rates[0], rates[1]


@leaf
def _output(a, row, head):
    """The address of the outputs of a head."""
    per_key = a.heads // a.key_heads
    place = head % per_key * a.key_heads + head // per_key if a.tiles_outputs else head
    return a.out + (row * a.heads + place) * a.value_dim * BYTES


@leaf
def _panel(a, first, last, source, head, column, width, panel):
    """All tokens of a run for a panel of one head."""
    keys = a.key_dim
    lines = panel + keys * PANEL * BYTES
    predicted, correction = float32s(lines, PANEL), float32s(lines + PANEL * BYTES, PANEL)
    output = float32s(lines + 2 * PANEL * BYTES, PANEL)
    load_panel(a, panel, source, head, column, width)
    q, k, at, decay, rate = _inputs(a, first, head)
    predict(panel, k, keys, lines)
    for row in range(first, last):
        v = float32s(at + column * BYTES, width)
        for j in range(width):
            correction[j] = (v[j] - decay * predicted[j]) * rate
        for j in range(width, PANEL):
            correction[j] = np.float32(0)
        following = _inputs(a, min(row + 1, last - 1), head)
        update(panel, q, k, following[1], decay, keys, lines)
        q, k, at, decay, rate = following
        out = float32s(_output(a, row, head) + column * BYTES, width)
        for j in range(width):
            out[j] = output[j]
        keep_panel(a, panel, row, head, column, width)


@leaf
def _predict_decoded(known, stride, k, keys, line, columns):
    """`line = sum over i of k[i] * known[i]` of some columns, for some keys after the other."""
    predicted = float32s(line, columns)
    for j in range(columns):
        predicted[j] = np.float32(0)
    for i in range(0, keys, KEYS_AT_ONCE):
        count, place, factors = min(KEYS_AT_ONCE, keys - i), known + i * stride, k + i * BYTES
        for column in range(0, columns, WIDE):
            at = column * BYTES
            if columns - column >= WIDE:
                predict_wide(place + at, stride, factors, count, line + at)
            else:
                predict_direct(place + at, stride, factors, count, line + at)


@leaf
def _decode(a, row, source, target, head, lines):
    """The only token of a run, for one head. Its prediction and its correction are where its output
    is written."""
    q, k, own, decay, rate = _inputs(a, row, head)
    known, new = matrix_of(a, source, head), matrix_of(a, target, head)
    out = _output(a, row, head)
    stride, columns = a.value_dim * BYTES, a.value_dim if READS_ALL else DIRECT
    for first in range(0, stride, columns * BYTES):
        _predict_decoded(known + first, stride, k, a.key_dim, out + first, columns)
        correction, v = float32s(out + first, columns), float32s(own + first, columns)
        for j in range(columns):
            correction[j] = (v[j] - decay * correction[j]) * rate
        for at in range(first, first + columns * BYTES, DIRECT * BYTES):
            place = out + at
            add_direct(known + at, new + at, stride, q, k, place, place, decay, a.key_dim)


def delta_rule(operands, chunk, thread):
    """All tokens of one run for some columns of one head."""
    scan(operands, chunk, thread, _decode, _panel)


@fast_leaf
def _gated_norm(x, gate, weight, eps):
    """`x / sqrt(mean(x²) + eps) * weight * silu(gate)` in place."""
    total = np.float32(0)
    for value in x:
        total += value * value
    scale = np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps)
    for j in range(len(x)):
        z = gate[j]
        x[j] = x[j] * scale * weight[j] * (z / (np.float32(1) + exp_float(-z)))


def delta_norm(operands, chunk, thread):
    """The norm of each head's outputs, times the gate, for a run of rows."""
    a = scan_operands(operands)
    values, eps = a.value_dim, np.float32(a.eps)
    weight = float32s(a.outputs, values)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        for head in range(a.heads):
            out = float32s(_output(a, row, head), values)
            place = row * a.y_stride + a.channels + head * values
            _gated_norm(out, float32s(a.y + place * BYTES, values), weight, eps)


KERNELS = (delta_inputs, delta_rule, delta_norm)
