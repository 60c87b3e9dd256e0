"""Kernels that quantize float32 weights, with the numbers of `engine.worker.weights.formats`.

A chunk is a run of output channels.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes

import numpy as np

from engine.worker.cpu.build import fast_leaf, leaf
from engine.worker.cpu.intrinsics import float32s, int8s, int32s
from engine.worker.cpu.kernels.dtypes import FLOAT16, load_one, store_one
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.linears.int8_linear import largest_magnitude
from engine.worker.cpu.operands import make_reader, operands
from engine.worker.weights.formats.int4 import FRACTIONS, GROUP, MIDDLE
from engine.worker.weights.formats.int8 import MAX_INT8

HALF_BYTES = 2


@operands
class QuantizeOperands(ctypes.Structure):
    """`values * scales` are the weights x, of int4 in groups of `GROUP` inputs."""

    x: int  # float32 [rows, width], contiguous
    width: int  # for int4 a multiple of GROUP
    values: int  # int8 [rows, width], or two of int4 in a byte
    scales: int  # float32 [rows], or float16 [rows, groups]
    rows: int
    rows_per_chunk: int


_read_operands = make_reader(QuantizeOperands)


def quantize_int8(operands, chunk, thread):
    """`QuantizeOperands` with a scale per row."""
    a = _read_operands(operands)
    scales = float32s(a.scales, a.rows)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        at = a.x + row * a.width * BYTES
        x, values = float32s(at, a.width), int8s(a.values + row * a.width, a.width)
        scale = largest_magnitude(int32s(at, a.width)) / np.float32(MAX_INT8)
        step = scale if scale > 0 else np.float32(1)
        for k in range(len(x)):
            values[k] = np.int8(np.rint(x[k] / step))
        scales[row] = scale


@fast_leaf
def _squared_error(x, scale, inverse):
    """The squared error of a group that is quantized in steps of `scale`."""
    least, most, total = np.float32(-MIDDLE), np.float32(MIDDLE - 1), np.float32(0)
    for k in range(GROUP):
        step = np.rint(x[k] * inverse)
        step = least if step < least else step
        step = most if step > most else step
        error = step * scale - x[k]
        total += error * error
    return total


@leaf
def _largest(x):
    """The first of the numbers with the largest magnitude."""
    largest = np.float32(0)
    for number in x:
        largest = number if abs(number) > abs(largest) else largest
    return largest


@leaf
def _nibble(step):
    """A step, rounded, as an unsigned number of 4 bits."""
    least, most = np.int32(0), np.int32(2 * MIDDLE - 1)
    nibble = np.int32(np.rint(step)) + np.int32(MIDDLE)
    nibble = least if nibble < least else nibble
    return most if nibble > most else nibble


@leaf
def _quantize_group(x, nibbles, scale_at):
    largest, best_error, best_scale = _largest(x), np.float32(np.inf), np.float32(0)
    for fraction in FRACTIONS:
        store_one(FLOAT16, scale_at, largest * np.float32(-fraction / MIDDLE))
        scale = load_one(FLOAT16, scale_at)
        inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
        error = _squared_error(x, scale, inverse)
        if error < best_error:
            best_error, best_scale = error, scale
    store_one(FLOAT16, scale_at, best_scale)
    inverse = np.float32(1) / best_scale if best_scale != 0 else np.float32(0)
    for pair in range(GROUP // 2):
        low, high = _nibble(x[2 * pair] * inverse), _nibble(x[2 * pair + 1] * inverse)
        nibbles[pair] = np.int8(low | high << 4)


def quantize_int4(operands, chunk, thread):
    """`QuantizeOperands` with a scale per group: of several ranges, that of the least error."""
    a = _read_operands(operands)
    groups = a.width // GROUP
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        for group in range(row * groups, (row + 1) * groups):
            x = float32s(a.x + group * GROUP * BYTES, GROUP)
            nibbles = int8s(a.values + group * GROUP // 2, GROUP // 2)
            _quantize_group(x, nibbles, a.scales + group * HALF_BYTES)
