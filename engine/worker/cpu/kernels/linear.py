"""The linear layer: packed weights times rows, in whatever form numbers have.

A chunk is a run of panels. k is cut in pieces, alike for any number of rows, and each row's sums
are its own: so its result has the same bits in any company.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import numpy as np
from numba import njit

from engine.worker.cpu.intrinsics import floats, words
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.packed_tiles import MOST_ROWS, WIDTH, float_tile, sums_of_tile

PANEL = 48  # rows of x that pass over weights while they are in cache
FLOAT_DEPTH = 512  # of k, floats that are added up in registers


class LinearOperands(NamedTuple):
    """`y[rows, outputs] = x w^T + bias`, or `+=` with `adds`; w is packed."""

    weight: int
    weight_scale: int  # where both are rounded; else 0
    offset: int  # int32 [pieces of k, panels * WIDTH], which are taken from the sums; or 0
    bias: int
    inputs: int  # with padding, if the form asks for some
    outputs: int
    columns: int  # of a chunk, whole panels
    x: int
    x_stride: int  # bytes
    x_scale: int
    y: int
    y_stride: int
    rows: int
    adds: int


@njit(inline="always")
def begin_row(out, shift, adds):
    """What the products are added to."""
    for n in range(len(out)):
        out[n] = shift[n] + (out[n] if adds != 0 else np.float32(0))


@njit(inline="always")
def multiply(operands, chunk, tile, finish, most_rows, depth, group, lane_bytes):
    """See `LinearOperands`; `group` of k have 4 bytes in x and `lane_bytes` in w.

    `finish(sums, scales, bias, y, y_stride, columns, rows, is_first, adds)` adds the sums of a
    tile to y, where `scales` are the addresses of offsets and scales.
    """
    (
        w, w_scale, offset, bias, inputs, outputs, columns, x, x_stride, x_scale, y, y_stride,
        rows, adds,
    ) = words(operands, 14)  # fmt: skip
    sums = sums_of_tile()
    group_bytes = WIDTH * lane_bytes  # of a panel
    panel_bytes = inputs // group * group_bytes
    padded = (outputs + WIDTH - 1) // WIDTH * WIDTH
    first, last = chunk * columns, min(outputs, (chunk + 1) * columns)
    # Few rows: walk along the weights as they lie. Many: keep a piece of them in cache.
    block = WIDTH if rows <= PANEL else columns
    for start in range(first, last, block):
        for k in range(0, inputs, depth):
            groups = min(depth, inputs - k) // group
            for top in range(0, rows, PANEL):
                bottom = min(top + PANEL, rows)
                tiles = (bottom - top + most_rows - 1) // most_rows
                for n in range(start, min(start + block, last), WIDTH):
                    place = w + n // WIDTH * panel_bytes + k // group * group_bytes
                    m = top
                    for left in range(tiles, 0, -1):  # as even as can be
                        count = (bottom - m + left - 1) // left
                        # Each tile prefetches its share of what comes next.
                        ahead = groups * group_bytes // tiles * (2 * tiles - left)
                        tile(
                            place,
                            x + m * x_stride + k // group * 4,
                            x_stride,
                            count,
                            groups,
                            sums,
                            place + ahead,
                            group_bytes // tiles,
                        )
                        finish(
                            sums,
                            (
                                offset + (k // depth * padded + n) * BYTES,
                                w_scale + n * BYTES,
                                x_scale + m * BYTES,
                            ),
                            bias + n * BYTES,
                            y + (m * y_stride + n) * BYTES,
                            y_stride,
                            min(WIDTH, outputs - n),
                            count,
                            k == 0,
                            adds,
                        )
                        m += count


@njit(inline="always")
def _finish_floats(sums, scales, bias, y, y_stride, columns, rows, is_first, adds):
    shift = floats(bias, columns)
    for m in range(rows):
        row = floats(sums + m * WIDTH * BYTES, columns)
        out = floats(y + m * y_stride * BYTES, columns)
        if is_first:
            begin_row(out, shift, adds)
        for n in range(columns):
            out[n] += row[n]


def linear_of_floats(operands, chunk, thread):
    """See `LinearOperands`."""
    multiply(operands, chunk, float_tile, _finish_floats, MOST_ROWS, FLOAT_DEPTH, 1, 4)


KERNELS = (linear_of_floats,)
