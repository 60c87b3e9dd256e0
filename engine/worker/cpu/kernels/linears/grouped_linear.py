"""The linear layer over weights in groups, in two kernels: quantize the inputs of each token, then
multiply.

Inputs are quantized as for int8 weights: 8 bits if the CPU has VNNI, else 14, with one scale per
token.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from collections.abc import Callable
from functools import cache
from types import FunctionType

import numpy as np
from numba import njit

from engine.worker.cpu.intrinsics import float32s, int8s, int16s, int32s
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.linears.group_inputs import (
    quantize_group_to_int8,
    quantize_group_to_int16,
)
from engine.worker.cpu.kernels.linears.grouped_panels import (
    INT8_STEPS,
    INT16_STEPS,
    SUM_BYTES,
    Panel,
    StepFormat,
)
from engine.worker.cpu.kernels.linears.grouped_tiles import DEPTH, make_grouped_tile, max_rows
from engine.worker.cpu.kernels.linears.int8_linear import (
    MAX_8_BITS,
    MAX_14_BITS,
    largest_magnitude,
)
from engine.worker.cpu.kernels.linears.linear import begin_row, input_operands, multiply
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.cpu.kernels.linears.tile_outputs import add_group_sums
from engine.worker.weights.formats.grouped import GroupLayout

ACTIVATION_BITS = {INT8_STEPS: 8, INT16_STEPS: 14}
# Set for the format that a kernel is made for
TILE = MAX_ROWS = BLOCK = BLOCK_BYTES = X_BLOCK_BYTES = None


@njit(inline="always")
def _quantize_last_group(x, y, factor):
    """Inputs from x, zeros beyond its end; returns their sum."""
    total = np.int32(0)
    for k in range(len(y)):
        value = np.int32(0)
        if k < len(x):
            number = x[k]
            value = np.int32(number * factor + np.float32(0.5 if number >= 0 else -0.5))
        y[k] = value
        total += value
    return total


@njit(inline="always")
def _quantize_groups(a, x_at, y_at, group, quantize_group, integers, item_bytes, factor):
    """A row of x to y: for each group its sum, then its inputs; zeros beyond the end of x."""
    for first in range(0, a.padded, group):
        x, y = x_at + first * BYTES, y_at + SUM_BYTES
        if first + group <= a.width:
            total = quantize_group(x, y, group, factor)
        else:
            count = max(0, a.width - first)
            total = _quantize_last_group(float32s(x, count), integers(y, group), factor)
        if a.middle != 0:
            int32s(y_at, 1)[0] = -a.middle * total
        else:
            float32s(y_at, 1)[0] = np.float32(total)
        y_at += SUM_BYTES + group * item_bytes


@njit(inline="always")
def _quantize(operands, chunk, quantize_group, integers, item_bytes, most):
    a = input_operands(operands)
    scales = float32s(a.scale, a.rows)
    y_stride = a.padded // a.group * (SUM_BYTES + a.group * item_bytes)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        x, y = a.x + row * a.x_stride * BYTES, a.y + row * y_stride
        largest = largest_magnitude(int32s(x, a.width))
        factor = np.float32(most) / largest if largest > 0 else np.float32(0)
        if a.group == 32:  # a constant, so that the loop over a group is unrolled
            _quantize_groups(a, x, y, 32, quantize_group, integers, item_bytes, factor)
        else:
            _quantize_groups(a, x, y, a.group, quantize_group, integers, item_bytes, factor)
        scales[row] = largest * np.float32(1 / most)


def quantize_groups_to_8_bits(operands, chunk, thread):
    """`InputOperands` with groups as `grouped_tiles` reads them, inputs in int8."""
    _quantize(operands, chunk, quantize_group_to_int8, int8s, 1, MAX_8_BITS)


def quantize_groups_to_14_bits(operands, chunk, thread):
    """`InputOperands` with groups as `grouped_tiles` reads them, inputs in int16."""
    _quantize(operands, chunk, quantize_group_to_int16, int16s, 2, MAX_14_BITS)


@njit(inline="always")
def _finish(sums, scales, bias_at, y_at, y_stride, columns, rows, is_first, adds):
    """Add the sums of a tile, times the scale of each row of x, to y."""
    if columns == WIDTH:
        add_group_sums(sums, *scales, bias_at, y_at, y_stride, rows, is_first, adds)
        return
    bias, x_scales = float32s(bias_at, columns), float32s(scales[2], rows)
    for m in range(rows):
        row = float32s(sums + m * WIDTH * BYTES, columns)
        y = float32s(y_at + m * y_stride * BYTES, columns)
        if is_first:
            begin_row(y, bias, adds)
        scale = x_scales[m]
        for n in range(columns):
            y[n] += row[n] * scale


def _linear(operands, chunk, thread):
    """`LinearOperands` with weights in groups."""
    multiply(operands, chunk, TILE, _finish, MAX_ROWS, DEPTH, BLOCK, BLOCK_BYTES, X_BLOCK_BYTES)


@cache
def linear_kernel(layout: GroupLayout, steps: StepFormat) -> Callable[..., None]:
    """The kernel of `LinearOperands` for one layout and width of inputs.

    It is `_linear` with constants of its own. Its name is part of the name of its compiled code.
    """
    name = f"linear_{layout.name}_{ACTIVATION_BITS[steps]}_bits"
    constants = {
        "TILE": make_grouped_tile(layout, steps),
        "MAX_ROWS": max_rows(steps),
        "BLOCK": layout.block,
        "BLOCK_BYTES": Panel(layout).block_bytes,
        "X_BLOCK_BYTES": layout.groups * steps.x_group_bytes(layout.group),
    }
    function = FunctionType(_linear.__code__, {**globals(), **constants}, name)
    function.__qualname__ = name
    return function
