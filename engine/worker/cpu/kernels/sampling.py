"""Sampling kernels: the argmax of a row of logits, and one sampled token of a filtered row.

They compute what `engine.worker.sampling.filters` computes in numpy, row by row and each sum in
the order of token ids, so the sampled token depends on its row only.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes

import numpy as np

from engine.worker.cpu.build import fast_leaf, leaf
from engine.worker.cpu.intrinsics import float32s, float64s, int32s, int64s
from engine.worker.cpu.kernels.elementwise import BYTES, exp_float
from engine.worker.cpu.kernels.vectors import largest_of
from engine.worker.cpu.operands import make_reader, operands

RUN = 512  # ids whose sum or maximum is computed at once
BUCKETS = 2048
MIN_EXPONENT = np.float32(-87)  # e to less than this is no normal float32


@operands
class ArgmaxOperands(ctypes.Structure):
    """The largest value and its lowest id of each row; a chunk is a row.

    The value is NaN if the row has NaN or infinity.
    """

    logits: int
    stride: int  # floats
    vocab: int
    values: int  # float32 [rows]
    ids: int  # int64 [rows]


_argmax_operands = make_reader(ArgmaxOperands)


@fast_leaf
def _sum(numbers):
    total = np.float64(0)
    for number in numbers:
        total += np.float64(number)
    return total


@fast_leaf
def _zero_or_nan(numbers):
    """NaN if any number is not finite, else 0."""
    total = np.float32(0)
    for number in numbers:
        total += number * np.float32(0)
    return total


def argmax(operands, chunk, thread):
    """`ArgmaxOperands` for row `chunk`."""
    a = _argmax_operands(operands)
    row = a.logits + chunk * a.stride * BYTES
    x = float32s(row, a.vocab)
    best, start, nan = x[0], 0, np.float32(0)
    for first in range(0, a.vocab, RUN):
        # Views, because LLVM finds no vectors for a loop whose first index it does not know.
        run, count = row + first * BYTES, min(RUN, a.vocab - first)
        nan += _zero_or_nan(float32s(run, count))
        largest = largest_of(run, count)
        if largest > best:
            best, start = largest, first
    at = start
    while at < a.vocab - 1 and x[at] != best:
        at += 1
    float32s(a.values, chunk + 1)[chunk] = best + nan
    int64s(a.ids, chunk + 1)[chunk] = at


@operands
class SampleOperands(ctypes.Structure):
    """One sampled token per chunk, from a row of logits."""

    logits: int
    stride: int  # floats
    vocab: int
    params: int  # array of `SampleParams`
    ids: int  # int64 [samples], the result
    scratch: int  # thread 0's: histogram buckets, then the weights of a row
    scratch_bytes: int  # each thread's


@operands
class SampleParams(ctypes.Structure):
    """The row to sample from, and how."""

    row: int
    top_k: int
    temperature: float
    min_p: float
    top_p: float
    point: float  # in [0, 1): the place in the cumulative distribution


PARAMS_BYTES = ctypes.sizeof(SampleParams)
_sample_operands, _sample_params = make_reader(SampleOperands), make_reader(SampleParams)


def scratch_bytes(vocab: int) -> int:
    """Scratch bytes of a thread, a multiple of 64."""
    return (BUCKETS * 8 + vocab * BYTES + 63) // 64 * 64


@fast_leaf
def _weigh(x, weights, count, largest, temperature, min_p):
    """`weights = exp((x - largest) / temperature)`, 0 below `min_p`."""
    for i in range(count):
        exponent = (x[i] - largest) / temperature
        weight = exp_float(exponent)
        is_kept = exponent > MIN_EXPONENT and weight >= min_p
        weights[i] = weight if is_kept else np.float32(0)


@leaf
def _find_cutoff(weights, pattern, count, wanted, is_mass, buckets):
    """The bits of the smallest weight that is kept, and the count or mass of larger weights.

    Weights are not negative, so they are ordered as their bits are: a radix select, 11 bits at a
    time, from the largest weight down until `wanted` (a count, or a mass) is reached.
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


@leaf
def _filter(weights, pattern, count, cutoff, above, wanted):
    """Zero the weights below the cutoff, and those equal to it once `wanted` is reached."""
    taken = above
    for i in range(count):
        if pattern[i] < cutoff:
            weights[i] = 0
        elif pattern[i] == cutoff:
            if taken > 0.0 and taken >= wanted:
                weights[i] = 0
            else:
                taken += weights[i]


@leaf
def _pick(weights, count, point):
    """The id at which the cumulative weight passes `point` of the total."""
    total, runs = 0.0, (count + RUN - 1) // RUN
    for run in range(runs):
        total += _sum(weights[run * RUN : (run + 1) * RUN])
    target, passed, run = point * total, 0.0, 0
    while run < runs - 1:
        mass = _sum(weights[run * RUN : (run + 1) * RUN])
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


def sample(operands, chunk, thread):
    """Temperature, min-p, top-k, top-p, then the token at `point`, for sample `chunk`."""
    a = _sample_operands(operands)
    params = _sample_params(a.params + chunk * PARAMS_BYTES)
    vocab, top_k, top_p = a.vocab, params.top_k, params.top_p
    row = a.logits + params.row * a.stride * BYTES
    x = float32s(row, vocab)
    buckets_at = a.scratch + thread * a.scratch_bytes
    weights_at = buckets_at + BUCKETS * 8
    buckets = float64s(buckets_at, BUCKETS)
    weights, pattern = float32s(weights_at, vocab), int32s(weights_at, vocab)
    temperature, min_p = np.float32(params.temperature), np.float32(params.min_p)
    _weigh(x, weights, vocab, largest_of(row, vocab), temperature, min_p)
    if top_k > 0 and top_k < vocab:
        cutoff, above = _find_cutoff(weights, pattern, vocab, float(top_k), False, buckets)
        _filter(weights, pattern, vocab, cutoff, 0.0, np.inf)
    if top_p < 1.0:
        wanted = top_p * _sum(weights)
        cutoff, above = _find_cutoff(weights, pattern, vocab, wanted, True, buckets)
        _filter(weights, pattern, vocab, cutoff, above, wanted)
    int64s(a.ids, chunk + 1)[chunk] = _pick(weights, vocab, params.point)


KERNELS = (argmax, sample)
