"""Kernels of the sampler: the largest logit of a row, and one draw from a filtered row.

They do what `engine.worker.sampling.filters` does in numpy, row by row and each sum in the order
of ids, so a row's token depends on the row alone.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import numpy as np
from numba import njit

from engine.worker.cpu.build import FAST
from engine.worker.cpu.intrinsics import bits, doubles, floats, words
from engine.worker.cpu.kernels.elementwise import exp_float

RUN = 512  # ids that are looked at as one
BUCKETS = 2048
COLDEST_POWER = np.float32(-87)  # e to less than this is no normal float32
BYTES = 4


class LargestOperands(NamedTuple):
    """Per row of logits the largest value and its lowest id; NaN if any is not finite."""

    logits: int
    stride: int
    vocab: int
    values: int
    ids: int


@njit(fastmath={"nnan", "nsz"})
def _largest(x, first, end):
    largest = x[first]
    for i in range(first, end):
        largest = x[i] if x[i] > largest else largest
    return largest


@njit(fastmath=FAST)
def _sum(x, first, end):
    total = np.float64(0)
    for i in range(first, end):
        total += np.float64(x[i])
    return total


@njit(fastmath=FAST)
def _blemish(x, first, end):
    """0, or NaN if something is not finite."""
    total = np.float32(0)
    for i in range(first, end):
        total += x[i] * np.float32(0)
    return total


def largest(operands, chunk, thread):
    """See `LargestOperands`."""
    logits, stride, vocab, values_at, ids_at = words(operands, 5)
    x = floats(logits + chunk * stride * BYTES, vocab)
    best, start, blemish = x[0], 0, np.float32(0)
    for first in range(0, vocab, RUN):
        end = min(first + RUN, vocab)
        blemish += _blemish(x, first, end)
        found = _largest(x, first, end)
        if found > best:
            best, start = found, first
    at = start
    while at < vocab - 1 and x[at] != best:
        at += 1
    floats(values_at, chunk + 1)[chunk] = best + blemish
    words(ids_at, chunk + 1)[chunk] = at


class DrawOperands(NamedTuple):
    """One draw per chunk: `integers` are row and top_k, `reals` the four below, float64."""

    logits: int
    stride: int
    vocab: int
    integers: int  # [draws, 2]
    reals: int  # [draws, 4]: temperature, min_p, top_p, point
    ids: int  # [draws] int64
    scratch: int  # of thread 0: weights of a row, then the buckets
    scratch_bytes: int  # of a thread


@njit(fastmath=FAST)
def _weigh(x, weights, count, largest, temperature, least):
    """`exp((x - largest) / temperature)`, 0 below `least`."""
    for i in range(count):
        power = (x[i] - largest) / temperature
        weight = exp_float(power)
        is_kept = power > COLDEST_POWER and weight >= least
        weights[i] = weight if is_kept else np.float32(0)


@njit
def _border(weights, pattern, count, wanted, is_mass, buckets):
    """Bits of the smallest weight that is wanted, and how much lies above it.

    Weights are not negative, so their bits order them: 11 bits at a time, count or mass per
    bucket, and down from the top until `wanted` is reached.
    """
    prefix, above = 0, 0.0
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        for bucket in range(BUCKETS):
            buckets[bucket] = 0.0
        mask = (1 << width) - 1
        for i in range(count):
            value = np.int64(pattern[i])
            if value >> (shift + width) == prefix:
                buckets[(value >> shift) & mask] += weights[i] if is_mass else 1.0
        bucket = mask
        while bucket > 0 and (buckets[bucket] == 0.0 or above + buckets[bucket] < wanted):
            above += buckets[bucket]
            bucket -= 1
        prefix = (prefix << width) | bucket
    return prefix, above


@njit
def _keep(weights, pattern, count, border, above, wanted):
    """Zero what is below the border, and of its equals those after `wanted` is reached."""
    taken = above
    for i in range(count):
        if pattern[i] < border:
            weights[i] = 0
        elif pattern[i] == border:
            if taken > 0.0 and taken >= wanted:
                weights[i] = 0
            else:
                taken += weights[i]


@njit
def _pick(weights, count, point):
    """The id at which the cumulative weight passes `point` of the total."""
    total, runs = 0.0, (count + RUN - 1) // RUN
    for run in range(runs):
        total += _sum(weights, run * RUN, min(count, (run + 1) * RUN))
    target, passed, run = point * total, 0.0, 0
    while run < runs - 1:
        mass = _sum(weights, run * RUN, min(count, (run + 1) * RUN))
        if passed + mass > target:
            break
        passed += mass
        run += 1
    last = at = run * RUN
    while at < count:
        if weights[at] > 0:
            last = at
            passed += weights[at]
            if passed > target:
                break
        at += 1
    while last > 0 and weights[last] == 0:  # rounding at the very end
        last -= 1
    return last


def draw(operands, chunk, thread):
    """See `DrawOperands`."""
    logits, stride, vocab, integers, reals, ids, scratch, scratch_bytes = words(operands, 8)
    row, top_k = words(integers + chunk * 16, 2)
    temperature, min_p, top_p, point = doubles(reals + chunk * 32, 4)
    x = floats(logits + row * stride * BYTES, vocab)
    at = scratch + thread * scratch_bytes
    buckets = doubles(at, BUCKETS)
    weights, pattern = floats(at + BUCKETS * 8, vocab), bits(at + BUCKETS * 8, vocab)
    largest = _largest(x, 0, vocab)
    _weigh(x, weights, vocab, largest, np.float32(temperature), np.float32(min_p))
    if top_k > 0 and top_k < vocab:
        border, above = _border(weights, pattern, vocab, float(top_k), False, buckets)
        _keep(weights, pattern, vocab, border, 0.0, np.inf)
    if top_p < 1.0:
        wanted = top_p * _sum(weights, 0, vocab)
        border, above = _border(weights, pattern, vocab, wanted, True, buckets)
        _keep(weights, pattern, vocab, border, above, wanted)
    words(ids, chunk + 1)[chunk] = _pick(weights, vocab, point)


KERNELS = (largest, draw)
