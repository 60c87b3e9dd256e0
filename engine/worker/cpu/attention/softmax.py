"""The softmax over one span of the context after another, and how partial results are merged.

A partial result is what one span contributes to some rows: weighted sums of values `[rows, dim]`,
not yet normalized, then each row's largest score and the sum of its weights. Partial results are
merged in the order of their spans (Milakov and Gimelshein, arXiv:1805.02867).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import numpy as np
from numba.extending import register_jitable

from engine.worker.cpu.attention.tiles import KEYS
from engine.worker.cpu.build import fast_leaf, leaf
from engine.worker.cpu.intrinsics import float32s
from engine.worker.cpu.kernels.elementwise import BYTES, exp_float
from engine.worker.cpu.kernels.vectors import largest_of

SPAN = 256  # tokens of context
SCORES = SPAN + KEYS  # floats of a row of scores: a tile may run over the end


@register_jitable
def partial_floats(max_rows: int, dim: int) -> int:
    """Floats of a partial result of at most so many rows."""
    return max_rows * (dim + 2)


@leaf
def clear(address, count):
    """Zero `count` floats."""
    numbers = float32s(address, count)
    for i in range(count):
        numbers[i] = 0


@fast_leaf
def _exponentials(scores, largest):
    """`exp(score - largest)` in place; returns the sum."""
    total = np.float32(0)
    for i in range(len(scores)):
        value = exp_float(scores[i] - largest)
        scores[i] = value
        total += value
    return total


@fast_leaf
def _cap(scores, cap):
    """`cap * tanh(score / cap)` in place.

    tanh is a Padé approximant up to 1, where `1 - 2 / (exp(2x) + 1)` would cancel.
    """
    one, two, inverse = np.float32(1), np.float32(2), np.float32(1) / cap
    for i in range(len(scores)):
        x = scores[i] * inverse
        y = x * x
        top = ((y + np.float32(378)) * y + np.float32(17325)) * y + np.float32(135135)
        under = (np.float32(28) * y + np.float32(3150)) * y + np.float32(62370)
        small = x * top / (under * y + np.float32(135135))
        large = one - two / (exp_float(two * x) + one)
        scores[i] = cap * (small if y < one else large)


@leaf
def cap_scores(scores, rows, length, cap):
    """Soft cap of the first `length` scores of each row, in place."""
    for row in range(rows):
        _cap(float32s(scores + row * SCORES * BYTES, length), cap)


@leaf
def softmax_rows(
    scores, rows, group, position, image_end, start, end, window, ahead, stats, max_rows
):
    """Softmax of each row in place, not normalized, over what its token sees of [start, end).

    Tokens are at `position` and after, and see `ahead` tokens behind themselves, or up to
    `image_end`; `stats` receives the largest scores, then the sums.
    """
    tops, sums = float32s(stats, rows), float32s(stats + max_rows * BYTES, rows)
    for row in range(rows):
        line = scores + row * SCORES * BYTES
        last = min(end, max(image_end, position + row // group + 1 + ahead)) - start
        low = 0 if window == 0 else max(0, position + row // group + 1 - window - start)
        if low < last:
            tops[row] = largest_of(line + low * BYTES, last - low)
            sums[row] = _exponentials(float32s(line + low * BYTES, last - low), tops[row])
            clear(line, low)
            clear(line + last * BYTES, end - start - last)
        else:
            tops[row], sums[row] = np.float32(0), np.float32(0)
            clear(line, end - start)


@leaf
def rescale(weights, scales, length, rows):
    """Multiply the softmax weights of each row by the scales of the int8 values they weigh."""
    factors = float32s(scales, length)
    for row in range(rows):
        line = float32s(weights + row * SCORES * BYTES, length)
        for t in range(length):
            line[t] *= factors[t]


@leaf
def scale_queries(q, q_stride, head, group, dim, scale, scaled, rows):
    """Copy the queries of a task, one after the other, multiplied by the scale of the scores."""
    for row in range(rows):
        place = (row // group) * q_stride + (head * group + row % group) * dim
        source = float32s(q + place * BYTES, dim)
        target = float32s(scaled + row * dim * BYTES, dim)
        for i in range(dim):
            target[i] = source[i] * scale


@leaf
def merge(merged, partial, rows, max_rows, dim):
    """Merge a span's partial result into that of the spans before it."""
    stats = max_rows * dim * BYTES
    tops = float32s(merged + stats, rows)
    sums = float32s(merged + stats + max_rows * BYTES, rows)
    new_tops = float32s(partial + stats, rows)
    new_sums = float32s(partial + stats + max_rows * BYTES, rows)
    for row in range(rows):
        if new_sums[row] == np.float32(0):  # the row's token sees nothing of the span
            continue
        line = float32s(merged + row * dim * BYTES, dim)
        new = float32s(partial + row * dim * BYTES, dim)
        if sums[row] == np.float32(0):
            for i in range(dim):
                line[i] = new[i]
            tops[row], sums[row] = new_tops[row], new_sums[row]
            continue
        top = max(tops[row], new_tops[row])
        old_factor, new_factor = exp_float(tops[row] - top), exp_float(new_tops[row] - top)
        for i in range(dim):
            line[i] = line[i] * old_factor + new[i] * new_factor
        tops[row], sums[row] = top, sums[row] * old_factor + new_sums[row] * new_factor


@leaf
def write_output(merged, max_rows, out, out_stride, head, group, dim, rows, sinks):
    """The weighted values of all spans, divided by the sums of the weights.

    `sinks` is the address of the scores `[group]` that join the sums, or 0.
    """
    tops = float32s(merged + max_rows * dim * BYTES, rows)
    totals = float32s(merged + max_rows * (dim + 1) * BYTES, rows)
    if sinks != 0:
        scores = float32s(sinks, group)
        for row in range(rows):
            totals[row] += exp_float(scores[row % group] - tops[row])
    for row in range(rows):
        place = (row // group) * out_stride + (head * group + row % group) * dim
        target = float32s(out + place * BYTES, dim)
        line = float32s(merged + row * dim * BYTES, dim)
        factor = np.float32(1) / totals[row]
        for i in range(dim):
            target[i] = line[i] * factor
