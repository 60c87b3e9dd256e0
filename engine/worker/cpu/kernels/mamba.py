"""The recurrence of Mamba 2 on the CPU (`engine.worker.model.mamba`), with its gate.

As in the delta rule a chunk is a panel of some columns of one head's matrix, for all tokens of a
run.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
import math

import numpy as np

from engine.worker.cpu.build import leaf
from engine.worker.cpu.intrinsics import float32s
from engine.worker.cpu.kernels.delta_tiles import PANEL, add_token
from engine.worker.cpu.kernels.elementwise import BYTES, exp_float
from engine.worker.cpu.kernels.recurrence import (
    columns_of,
    keep_panel,
    load_panel,
    scan_operands,
    time_step,
)


@leaf
def _panel(a, first, last, source, head, column, width, panel):
    """All tokens of a run for a panel of one head."""
    keys, values = a.key_dim, a.value_dim
    lines = panel + keys * PANEL * BYTES
    change = float32s(lines + PANEL * BYTES, PANEL)
    output = float32s(lines + 2 * PANEL * BYTES, PANEL)
    load_panel(a, panel, source, head, column, width)
    place = head * values + column
    rate, skip = float32s(a.decay_rate, a.heads)[head], float32s(a.skip, a.heads)[head]
    for row in range(first, last):
        inputs = a.mixed + row * a.channels * BYTES
        c = inputs + head // (a.heads // a.key_heads) * keys * BYTES
        x = float32s(inputs + (2 * a.key_heads * keys + place) * BYTES, width)
        step = time_step(a, row, head, a.channels + a.heads * values)
        for j in range(width):
            change[j] = np.float32(step) * x[j]
        for j in range(width, PANEL):
            change[j] = np.float32(0)
        decay = np.float32(math.exp(np.float64(rate) * step))
        add_token(panel, c, c + a.key_heads * keys * BYTES, decay, keys, lines)
        z = float32s(a.y + (row * a.y_stride + a.channels + place) * BYTES, width)
        out = float32s(a.out + (row * a.heads * values + place) * BYTES, width)
        for j in range(width):
            gate = z[j] / (np.float32(1) + exp_float(-z[j]))
            out[j] = (output[j] + skip * x[j]) * gate
        keep_panel(a, panel, row, head, column, width)


def mamba_scan(operands, chunk, thread):
    """All tokens of one run for some columns of one head."""
    a = scan_operands(operands)
    first, last, source, head, start, stop = columns_of(a, chunk)
    scratch = a.scratch + thread * a.scratch_stride * BYTES
    for column in range(start, stop, PANEL):
        _panel(a, first, last, source, head, column, min(PANEL, stop - column), scratch)


KERNELS = (mamba_scan,)
