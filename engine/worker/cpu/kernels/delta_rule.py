"""Gated DeltaNet on the CPU (`engine.worker.model.delta_net`): convolution, delta rule, gated norm.

The tokens of a run are computed one after the other, however many a step has, so the state after a
token has the same bits whether its request was decoded or computed anew. Every sum over keys adds
in the order of the keys. A chunk of the delta rule is a panel of some columns of one head's matrix:
columns do not depend on each other, so the panel stays in the cache for all tokens of the run.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes
import math

import numpy as np

from engine.worker.cpu.build import fast_leaf, leaf
from engine.worker.cpu.intrinsics import float32s, fma_one, int64s
from engine.worker.cpu.kernels.delta_tiles import PANEL, predict, update
from engine.worker.cpu.kernels.elementwise import BYTES, exp_float
from engine.worker.cpu.operands import make_reader, operands

CHANNELS = 512  # that one chunk of the convolution computes
ITEM = 8  # bytes of an int64
UNIT_EPS = 1e-6  # as in the model: squares of q and k that are not larger are not brought to 1


@operands
class DeltaOperands(ctypes.Structure):
    """Addresses of float32 tensors. `y` are the inputs: in each row q, k and v (`channels`), the
    gate, b and a. `runs` has int64 (first row, last row, source slot) of each run, and `writes` two
    slots per row, or -1. `scratch` has `scratch_stride` floats for each thread."""

    y: int
    y_stride: int
    mixed: int  # [rows, channels], the convolution's outputs
    out: int  # [rows, heads, value_dim]
    conv: int  # [kernel, channels]
    decay_rate: int  # [heads]
    decay_bias: int
    norm: int  # [value_dim]
    eps: float
    inputs: int  # [slots, kernel - 1, channels]
    matrices: int  # [slots, heads, key_dim, value_dim]
    runs: int
    writes: int
    scratch: int
    scratch_stride: int
    channels: int
    kernel: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    rows: int
    rows_per_chunk: int


_delta_operands = make_reader(DeltaOperands)


def scratch_floats(key_dim: int) -> int:
    """Floats of scratch per thread: a panel, q and k of two rows, and three lines of the panel."""
    return key_dim * PANEL + 4 * key_dim + 3 * PANEL


@leaf
def _input(a, first, source, row, channel, count):
    """`count` inputs of a row of a run, which may lie before the run; empty if there are none."""
    if row >= first:
        return float32s(a.y + (row * a.y_stride + channel) * BYTES, count)
    if source < 0:
        return float32s(a.y, 0)
    place = source * (a.kernel - 1) + a.kernel - 1 + row - first
    return float32s(a.inputs + (place * a.channels + channel) * BYTES, count)


@leaf
def _convolve(a, first, source, row, channel, count):
    """The causal convolution of some channels of one row, then SiLU."""
    mixed = float32s(a.mixed + (row * a.channels + channel) * BYTES, count)
    for j in range(count):
        mixed[j] = np.float32(0)
    for tap in range(a.kernel):
        x = _input(a, first, source, row - (a.kernel - 1) + tap, channel, count)
        weight = float32s(a.conv + (tap * a.channels + channel) * BYTES, count)
        for j in range(len(x)):
            mixed[j] = fma_one(x[j], weight[j], mixed[j])
    for j in range(count):
        mixed[j] = mixed[j] / (np.float32(1) + exp_float(-mixed[j]))


@leaf
def _keep_inputs(a, first, source, row, slot, channel, count):
    """Write the last inputs of some channels up to a row to a slot, which may be the source."""
    for place in range(a.kernel - 1):
        x = _input(a, first, source, row - (a.kernel - 2) + place, channel, count)
        target = a.inputs + ((slot * (a.kernel - 1) + place) * a.channels + channel) * BYTES
        kept = float32s(target, count)
        for j in range(count):
            kept[j] = x[j] if len(x) > 0 else np.float32(0)


def delta_convolution(operands, chunk, thread):
    """Some channels of one run."""
    a = _delta_operands(operands)
    blocks = (a.channels + CHANNELS - 1) // CHANNELS
    run = int64s(a.runs + chunk // blocks * 3 * ITEM, 3)
    first, last, source = run[0], run[1], run[2]
    channel = chunk % blocks * CHANNELS
    count = min(CHANNELS, a.channels - channel)
    for row in range(first, last):
        _convolve(a, first, source, row, channel, count)
        slots = int64s(a.writes + row * 2 * ITEM, 2)
        if slots[1] >= 0:
            _keep_inputs(a, first, source, row, slots[1], channel, count)
        if slots[0] >= 0:
            _keep_inputs(a, first, source, row, slots[0], channel, count)


@fast_leaf
def _unit(x, factor, y):
    """`y = factor * x / |x|`."""
    total = np.float32(UNIT_EPS)
    for value in x:
        total += value * value
    scale = factor / np.sqrt(total)
    for i in range(len(x)):
        y[i] = x[i] * scale


@leaf
def _units(a, row, head, address):
    """q and k of one head of a row, of unit length, q times `key_dim ** -0.5`."""
    key_head = head // (a.heads // a.key_heads)
    q = a.mixed + (row * a.channels + key_head * a.key_dim) * BYTES
    k = q + a.key_heads * a.key_dim * BYTES
    factor = np.float32(1) / np.sqrt(np.float32(a.key_dim))
    _unit(float32s(q, a.key_dim), factor, float32s(address, a.key_dim))
    _unit(float32s(k, a.key_dim), np.float32(1), float32s(address + a.key_dim * BYTES, a.key_dim))


@leaf
def _decay(a, row, head):
    """What the state of a head is multiplied by: `exp(decay_rate * softplus(a + bias))`."""
    place = a.y + (row * a.y_stride + a.channels + a.heads * a.value_dim + a.heads + head) * BYTES
    x = np.float64(float32s(place, 1)[0] + float32s(a.decay_bias, a.heads)[head])
    soft = x if x > 20.0 else math.log1p(math.exp(x))
    return np.float32(math.exp(np.float64(float32s(a.decay_rate, a.heads)[head]) * soft))


@leaf
def _rate(a, row, head):
    """How far a token corrects the state of a head: `sigmoid(b)`."""
    place = a.y + (row * a.y_stride + a.channels + a.heads * a.value_dim + head) * BYTES
    return np.float32(1.0 / (1.0 + math.exp(-np.float64(float32s(place, 1)[0]))))


@leaf
def _load_panel(a, panel, source, head, column, width):
    """A panel of a head's matrix in a slot, padded with zeros on the right."""
    base = a.matrices + ((source * a.heads + head) * a.key_dim * a.value_dim + column) * BYTES
    for i in range(a.key_dim):
        line = float32s(panel + i * PANEL * BYTES, PANEL)
        known = float32s(base + i * a.value_dim * BYTES, width if source >= 0 else 0)
        for j in range(len(known)):
            line[j] = known[j]
        for j in range(len(known), PANEL):
            line[j] = np.float32(0)


@leaf
def _keep_panel(a, panel, slot, head, column, width):
    """Write a panel of a head's matrix to a slot."""
    base = a.matrices + ((slot * a.heads + head) * a.key_dim * a.value_dim + column) * BYTES
    for i in range(a.key_dim):
        line = float32s(panel + i * PANEL * BYTES, width)
        kept = float32s(base + i * a.value_dim * BYTES, width)
        for j in range(width):
            kept[j] = line[j]


def delta_rule(operands, chunk, thread):
    """All tokens of one run for some columns of one head."""
    a = _delta_operands(operands)
    keys, values = a.key_dim, a.value_dim
    panels = (values + PANEL - 1) // PANEL
    run = int64s(a.runs + chunk // (panels * a.heads) * 3 * ITEM, 3)
    first, last, source = run[0], run[1], run[2]
    head, column = chunk // panels % a.heads, chunk % panels * PANEL
    width = min(PANEL, values - column)
    panel = a.scratch + thread * a.scratch_stride * BYTES
    units = panel + keys * PANEL * BYTES
    lines = units + 4 * keys * BYTES
    predicted, correction = float32s(lines, PANEL), float32s(lines + PANEL * BYTES, PANEL)
    output = float32s(lines + 2 * PANEL * BYTES, PANEL)
    _load_panel(a, panel, source, head, column, width)
    _units(a, first, head, units)
    predict(panel, units + keys * BYTES, keys, lines)
    v_start = 2 * a.key_heads * keys + head * values + column
    for row in range(first, last):
        own = units + (row - first) % 2 * 2 * keys * BYTES
        following = own
        if row + 1 < last:
            following = units + (row + 1 - first) % 2 * 2 * keys * BYTES
            _units(a, row + 1, head, following)
        decay, rate = _decay(a, row, head), _rate(a, row, head)
        v = float32s(a.mixed + (row * a.channels + v_start) * BYTES, width)
        for j in range(width):
            correction[j] = (v[j] - decay * predicted[j]) * rate
        for j in range(width, PANEL):
            correction[j] = np.float32(0)
        update(panel, own, own + keys * BYTES, following + keys * BYTES, decay, keys, lines)
        out = float32s(a.out + ((row * a.heads + head) * values + column) * BYTES, width)
        for j in range(width):
            out[j] = output[j]
        slots = int64s(a.writes + row * 2 * ITEM, 2)
        if slots[1] >= 0:
            _keep_panel(a, panel, slots[1], head, column, width)
        if slots[0] >= 0:
            _keep_panel(a, panel, slots[0], head, column, width)


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
    a = _delta_operands(operands)
    values, eps = a.value_dim, np.float32(a.eps)
    weight = float32s(a.norm, values)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        for head in range(a.heads):
            out = float32s(a.out + (row * a.heads + head) * values * BYTES, values)
            place = row * a.y_stride + a.channels + head * values
            _gated_norm(out, float32s(a.y + place * BYTES, values), weight, eps)


KERNELS = (delta_convolution, delta_rule, delta_norm)
