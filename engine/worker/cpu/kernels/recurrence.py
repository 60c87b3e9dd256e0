"""What the kernels of recurrent layers share: the convolution before the recurrence, and the panels
of a head's state.

The tokens of a run are computed one after the other, however many a step has, so the state after a
token has the same bits whether its request was decoded or computed anew.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes
import math

import numpy as np
from numba import njit

from engine.worker.cpu.build import leaf
from engine.worker.cpu.intrinsics import float32s, fma_one, int64s
from engine.worker.cpu.kernels.delta_tiles import DIRECT, LINE_BYTES, PANEL, copy_panel
from engine.worker.cpu.kernels.elementwise import BYTES, exp_float
from engine.worker.cpu.operands import make_reader, operands

CHANNELS = 512  # channels that one chunk of the convolution computes
ITEM = 8  # bytes of an int64


@operands
class ScanOperands(ctypes.Structure):
    """Addresses of float32 tensors. `y` are the inputs: in each row q, k and v (`channels`), the
    gate, and one or two numbers of each head; of a convolution alone, which has no heads, B, C and
    x (`channels` each). `runs` has int64 (first row, last row, source slot) of each run, and
    `writes` two slots per row, or -1. `scratch` has `scratch_floats` for each thread. A DeltaNet's
    decays and rates are behind the channels of `mixed`."""

    y: int
    y_stride: int
    mixed: int  # [rows, channels + 2 * heads], the convolution's outputs
    out: int  # [rows, heads, value_dim]
    tiles_outputs: int  # whether these heads are in the order of `HeadTiles`
    conv: int  # [kernel, channels]
    conv_bias: int  # [channels]; 0 if there is none
    decay_rate: int  # [heads]
    decay_bias: int
    eps: float
    outputs: int  # weights of the outputs: a DeltaNet's norm [value_dim], a Mamba's skip [heads]
    inputs: int  # [slots, kernel - 1, channels]
    matrices: int  # [slots, heads, key_dim, value_dim]
    runs: int
    writes: int
    scratch: int
    channels: int
    kernel: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    rows: int
    rows_per_chunk: int
    panels_per_chunk: int


scan_operands = make_reader(ScanOperands)


def scratch_floats(key_dim: int) -> int:
    """Floats of scratch per thread: a panel and three lines of it, or two lines of `DIRECT`."""
    return max(key_dim * PANEL + 3 * PANEL, 2 * DIRECT)


_scratch_floats = leaf(scratch_floats)


@njit(inline="always")
def mixed_row(a, row):
    """The address of a row of `mixed`."""
    return a.mixed + row * (a.channels + 2 * a.heads) * BYTES


@leaf
def _input(a, first, source, row, channel, count):
    """`count` inputs of a row of a run, which may lie before the run; empty if there are none."""
    if row >= first:
        return float32s(a.y + (row * a.y_stride + channel) * BYTES, count)
    if source < 0:
        return float32s(a.y, 0)
    place = source * (a.kernel - 1) + a.kernel - 1 + row - first
    return float32s(a.inputs + (place * a.channels + channel) * BYTES, count)


@njit(inline="always")
def _part(a, row, number, channel, count):
    """Some channels of B, C or x of a row."""
    return float32s(a.y + (row * a.y_stride + number * a.channels + channel) * BYTES, count)


@leaf
def _multiply(x, by):
    for j in range(len(x)):
        x[j] *= by[j]


@leaf
def _convolve(a, first, source, row, channel, count):
    """The causal convolution of some channels of one row."""
    mixed = float32s(mixed_row(a, row) + channel * BYTES, count)
    bias = float32s(a.conv_bias + channel * BYTES, count if a.conv_bias != 0 else 0)
    for j in range(count):
        mixed[j] = bias[j] if len(bias) > 0 else np.float32(0)
    for tap in range(a.kernel):
        x = _input(a, first, source, row - (a.kernel - 1) + tap, channel, count)
        weight = float32s(a.conv + (tap * a.channels + channel) * BYTES, count)
        for j in range(len(x)):
            mixed[j] = fma_one(x[j], weight[j], mixed[j])
    return mixed


@leaf
def _silu(x):
    for j in range(len(x)):
        x[j] = x[j] / (np.float32(1) + exp_float(-x[j]))


@leaf
def _keep_inputs(a, first, source, row, slot, channel, count):
    """Write the last inputs of some channels up to a row to a slot, which may be the source."""
    for place in range(a.kernel - 1):
        x = _input(a, first, source, row - (a.kernel - 2) + place, channel, count)
        target = a.inputs + ((slot * (a.kernel - 1) + place) * a.channels + channel) * BYTES
        kept = float32s(target, count)
        for j in range(count):
            kept[j] = x[j] if len(x) > 0 else np.float32(0)


def convolution(operands, chunk, thread):
    """Some channels of one run, then SiLU; alone it is between two gates."""
    a = scan_operands(operands)
    blocks = (a.channels + CHANNELS - 1) // CHANNELS
    run = int64s(a.runs + chunk // blocks * 3 * ITEM, 3)
    first, last, source = run[0], run[1], run[2]
    channel = chunk % blocks * CHANNELS
    count = min(CHANNELS, a.channels - channel)
    for row in range(first, last):
        if a.heads == 0:
            _multiply(_part(a, row, 0, channel, count), _part(a, row, 2, channel, count))
        mixed = _convolve(a, first, source, row, channel, count)
        if a.heads == 0:
            _multiply(mixed, _part(a, row, 1, channel, count))
        else:
            _silu(mixed)
        slots = int64s(a.writes + row * 2 * ITEM, 2)
        if slots[1] >= 0:
            _keep_inputs(a, first, source, row, slots[1], channel, count)
        if slots[0] >= 0:
            _keep_inputs(a, first, source, row, slots[0], channel, count)


@leaf
def time_step(a, row, head, place):
    """`softplus(y + bias)` of a head, whose numbers are at `place` in each row; in float64."""
    address = a.y + (row * a.y_stride + place + head) * BYTES
    x = np.float64(float32s(address, 1)[0] + float32s(a.decay_bias, a.heads)[head])
    return x if x > 20.0 else math.log1p(math.exp(x))


@njit(inline="always")
def matrix_of(a, slot, head):
    """The address of a head's matrix."""
    return a.matrices + (slot * a.heads + head) * a.key_dim * a.value_dim * BYTES


@njit(inline="always")
def _columns_of(a, chunk):
    """The first row, the last one and the source of a chunk's run; the head, and its first column
    and the one behind its last."""
    columns = a.panels_per_chunk * PANEL
    shares = (a.value_dim + columns - 1) // columns
    run = int64s(a.runs + chunk // (shares * a.heads) * 3 * ITEM, 3)
    head, start = chunk // shares % a.heads, chunk % shares * columns
    return run[0], run[1], run[2], head, start, min(a.value_dim, start + columns)


@leaf
def load_panel(a, panel, source, head, column, width):
    """A panel of a head's matrix in a slot, padded with zeros on the right."""
    base = matrix_of(a, source, head) + column * BYTES
    if source >= 0 and width == PANEL:
        copy_panel(base, a.value_dim * BYTES, panel, LINE_BYTES, a.key_dim)
        return
    for i in range(a.key_dim):
        line = float32s(panel + i * LINE_BYTES, PANEL)
        known = float32s(base + i * a.value_dim * BYTES, width if source >= 0 else 0)
        for j in range(len(known)):
            line[j] = known[j]
        for j in range(len(known), PANEL):
            line[j] = np.float32(0)


@leaf
def _keep_panel(a, panel, slot, head, column, width):
    """Write a panel of a head's matrix to a slot."""
    base = matrix_of(a, slot, head) + column * BYTES
    if width == PANEL:
        copy_panel(panel, LINE_BYTES, base, a.value_dim * BYTES, a.key_dim)
        return
    for i in range(a.key_dim):
        line = float32s(panel + i * LINE_BYTES, width)
        kept = float32s(base + i * a.value_dim * BYTES, width)
        for j in range(width):
            kept[j] = line[j]


@njit(inline="always")
def keep_panel(a, panel, row, head, column, width):
    """Write a panel of a head's matrix to the slots of a row."""
    slots = int64s(a.writes + row * 2 * ITEM, 2)
    if slots[1] >= 0:
        _keep_panel(a, panel, slots[1], head, column, width)
    if slots[0] >= 0:
        _keep_panel(a, panel, slots[0], head, column, width)


@njit(inline="always")
def _direct_target(a, first, last, source):
    """The slot to which a chunk of a whole head writes the state behind its only token, reading the
    one before where it lies; else -1."""
    slots = int64s(a.writes + first * 2 * ITEM, 2)
    is_whole = a.panels_per_chunk * PANEL >= a.value_dim and a.value_dim % DIRECT == 0
    return slots[0] if is_whole and last == first + 1 and source >= 0 and slots[1] < 0 else -1


@leaf
def scan(operands, chunk, thread, decode, panel):
    """All tokens of one run for some columns of one head: a panel after the other, or `decode` of
    the only token."""
    a = scan_operands(operands)
    first, last, source, head, start, stop = _columns_of(a, chunk)
    if first == last:
        return
    target = _direct_target(a, first, last, source)
    scratch = a.scratch + thread * _scratch_floats(a.key_dim) * BYTES
    if target >= 0:
        decode(a, first, source, target, head, scratch)
        return
    for column in range(start, stop, PANEL):
        panel(a, first, last, source, head, column, min(PANEL, stop - column), scratch)


KERNELS = (convolution,)
