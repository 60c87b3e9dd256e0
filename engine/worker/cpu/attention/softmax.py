"""The softmax over one span of context after the other, and how its parts are joined.

A part is what one span gives to some rows: mixed values `[rows, dim]`, not divided yet, then each
row's largest score and the sum of its shares. Parts are joined in the order of their spans (Milakov
and Gimelshein, arXiv:1805.02867).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import numpy as np
from numba import njit
from numba.extending import register_jitable

from engine.worker.cpu.attention.tiles import KEYS, largest_of
from engine.worker.cpu.build import FAST
from engine.worker.cpu.intrinsics import floats
from engine.worker.cpu.kernels.elementwise import exp_float

BYTES = 4
SPAN = 256  # tokens of context
SCORES = SPAN + KEYS  # floats of a row of scores: a tile may run over the end


@register_jitable
def part_floats(most_rows: int, dim: int) -> int:
    """Of a part of at most so many rows."""
    return most_rows * (dim + 2)


@njit
def clear(at, count):
    """Zeros."""
    numbers = floats(at, count)
    for i in range(count):
        numbers[i] = 0


@njit(fastmath=FAST)
def _soften(scores, largest):
    """e to (score - largest) in place; the sum."""
    total = np.float32(0)
    for i in range(len(scores)):
        value = exp_float(scores[i] - largest)
        scores[i] = value
        total += value
    return total


@njit
def soften_rows(scores, rows, group, position, start, end, window, stats, most_rows):
    """Softmax of each row, not divided by its sum, over what its token sees of [start, end)."""
    tops, sums = floats(stats, rows), floats(stats + most_rows * BYTES, rows)
    for row in range(rows):
        line = scores + row * SCORES * BYTES
        last = min(end, position + row // group + 1) - start
        low = 0 if window == 0 else max(0, position + row // group + 1 - window - start)
        if low < last:
            tops[row] = largest_of(line + low * BYTES, last - low)
            sums[row] = _soften(floats(line + low * BYTES, last - low), tops[row])
            clear(line, low)
            clear(line + last * BYTES, end - start - last)
        else:
            tops[row], sums[row] = np.float32(0), np.float32(0)
            clear(line, end - start)


@njit
def rescale(p, scales, length, rows):
    """Shares times the scales of the values that they are shares of."""
    factors = floats(scales, length)
    for row in range(rows):
        line = floats(p + row * SCORES * BYTES, length)
        for t in range(length):
            line[t] *= factors[t]


@njit
def scale_queries(q, q_stride, head, group, dim, scale, scaled, rows):
    """Queries of a task, row by row and times the scale."""
    for row in range(rows):
        place = (row // group) * q_stride + (head * group + row % group) * dim
        source, target = floats(q + place * BYTES, dim), floats(scaled + row * dim * BYTES, dim)
        for i in range(dim):
            target[i] = source[i] * scale


@njit
def join(whole, part, rows, most_rows, dim):
    """Add a span's part to those before it; both are laid out as the module says."""
    stats = most_rows * dim * BYTES
    tops, sums = floats(whole + stats, rows), floats(whole + stats + most_rows * BYTES, rows)
    new_tops, new_sums = floats(part + stats, rows), floats(part + stats + most_rows * BYTES, rows)
    for row in range(rows):
        if new_sums[row] == np.float32(0):  # the row's token sees nothing of the span
            continue
        line = floats(whole + row * dim * BYTES, dim)
        new = floats(part + row * dim * BYTES, dim)
        if sums[row] == np.float32(0):
            for i in range(dim):
                line[i] = new[i]
            tops[row], sums[row] = new_tops[row], new_sums[row]
            continue
        top = max(tops[row], new_tops[row])
        old_share, new_share = exp_float(tops[row] - top), exp_float(new_tops[row] - top)
        for i in range(dim):
            line[i] = line[i] * old_share + new[i] * new_share
        tops[row], sums[row] = top, sums[row] * old_share + new_sums[row] * new_share


@njit
def write_out(whole, most_rows, out, out_stride, head, group, dim, rows):
    """The mixed values of all spans, divided by the sums of the shares."""
    totals = floats(whole + most_rows * (dim + 1) * BYTES, rows)
    for row in range(rows):
        place = (row // group) * out_stride + (head * group + row % group) * dim
        target, line = floats(out + place * BYTES, dim), floats(whole + row * dim * BYTES, dim)
        share = np.float32(1) / totals[row]
        for i in range(dim):
            target[i] = line[i] * share
