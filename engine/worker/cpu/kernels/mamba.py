"""The recurrence of Mamba 2 on the CPU (`engine.worker.model.mamba`), with its gate.

As in the delta rule a chunk is a panel of some columns of one head's matrix, for all tokens of a
run.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
import math

import numpy as np
from numba import njit

from engine.worker.cpu.build import leaf
from engine.worker.cpu.intrinsics import float32s
from engine.worker.cpu.kernels.delta_tiles import DIRECT, PANEL, add_direct, add_token
from engine.worker.cpu.kernels.elementwise import BYTES, exp_float
from engine.worker.cpu.kernels.recurrence import (
    keep_panel,
    load_panel,
    matrix_of,
    mixed_row,
    scan,
    time_step,
)


@leaf
def _change(a, row, head, column, width, change):
    """What a token adds to columns of a head's state, for each key; returns the state's decay."""
    step = time_step(a, row, head, a.channels + a.heads * a.value_dim)
    x = _values(a, row, head, column, width)
    for j in range(width):
        change[j] = np.float32(step) * x[j]
    return np.float32(math.exp(np.float64(float32s(a.decay_rate, a.heads)[head]) * step))


@leaf
def _values(a, row, head, column, width):
    """x of a token, for columns of a head."""
    place = 2 * a.key_heads * a.key_dim + head * a.value_dim + column
    return float32s(mixed_row(a, row) + place * BYTES, width)


@leaf
def _write(a, row, head, column, width, output):
    """The outputs of columns of a head, with `output` of its state."""
    place = head * a.value_dim + column
    x, skip = _values(a, row, head, column, width), float32s(a.outputs, a.heads)[head]
    z = float32s(a.y + (row * a.y_stride + a.channels + place) * BYTES, width)
    out = float32s(a.out + (row * a.heads * a.value_dim + place) * BYTES, width)
    for j in range(width):
        gate = z[j] / (np.float32(1) + exp_float(-z[j]))
        out[j] = (output[j] + skip * x[j]) * gate


@njit(inline="always")
def _keys(a, row, head):
    """The addresses of C and B of a head."""
    c = mixed_row(a, row) + head // (a.heads // a.key_heads) * a.key_dim * BYTES
    return c, c + a.key_heads * a.key_dim * BYTES


@leaf
def _panel(a, first, last, source, head, column, width, panel):
    """All tokens of a run for a panel of one head."""
    lines = panel + a.key_dim * PANEL * BYTES
    change = float32s(lines + PANEL * BYTES, PANEL)
    output = float32s(lines + 2 * PANEL * BYTES, PANEL)
    load_panel(a, panel, source, head, column, width)
    for j in range(width, PANEL):
        change[j] = np.float32(0)
    for row in range(first, last):
        decay = _change(a, row, head, column, width, change)
        c, b = _keys(a, row, head)
        add_token(panel, c, b, decay, a.key_dim, lines)
        _write(a, row, head, column, width, output)
        keep_panel(a, panel, row, head, column, width)


@leaf
def _decode(a, row, source, target, head, lines):
    """The only token of a run, for one head."""
    known, new = matrix_of(a, source, head), matrix_of(a, target, head)
    change, output = float32s(lines, DIRECT), float32s(lines + DIRECT * BYTES, DIRECT)
    stride = a.value_dim * BYTES
    c, b = _keys(a, row, head)
    for column in range(0, a.value_dim, DIRECT):
        decay = _change(a, row, head, column, DIRECT, change)
        at, read = column * BYTES, lines + DIRECT * BYTES
        add_direct(known + at, new + at, stride, c, b, lines, read, decay, a.key_dim)
        _write(a, row, head, column, DIRECT, output)


def mamba_scan(operands, chunk, thread):
    """All tokens of one run for some columns of one head."""
    scan(operands, chunk, thread, _decode, _panel)


KERNELS = (mamba_scan,)
