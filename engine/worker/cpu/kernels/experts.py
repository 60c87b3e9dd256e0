"""Mixtures of experts: choose each row's experts, sort rows by expert, multiply, add up.

A *pair* is a row and one of its experts; pair `r * top_k + k` is row r and its expert with the k-th
largest logit. `sort_pairs` brings the pairs of an expert together, so that its weights are read
once for all of its rows. `expert_linear` runs the kernel of the dense linear for each expert, so
results have the same bits as those of a dense linear, whatever other rows a step has.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
import ctypes

import numpy as np
from numba import njit

from engine.worker.cpu.intrinsics import call_kernel, float32s, int32s, int64s
from engine.worker.cpu.kernels.elementwise import BYTES, exp_float
from engine.worker.cpu.kernels.linears.linear import LinearOperands
from engine.worker.cpu.operands import make_reader, operands

WORD = 8  # bytes of an operand
LINEAR_WORDS = ctypes.sizeof(LinearOperands) // WORD
SCRATCH_BYTES = -(-ctypes.sizeof(LinearOperands) // 64) * 64  # a thread's scratch memory
_PLACES = {field[0]: place for place, field in enumerate(LinearOperands._fields_)}
X, X_STRIDE, X_SCALE = _PLACES["x"], _PLACES["x_stride"], _PLACES["x_scale"]
Y, Y_STRIDE = _PLACES["y"], _PLACES["y_stride"]
ROWS, COLUMNS = _PLACES["rows"], _PLACES["columns"]


@operands
class RouteOperands(ctypes.Structure):
    """Choose `top_k` of `num_experts` for each row."""

    logits: int  # float32
    logits_stride: int
    num_experts: int
    top_k: int
    renormalizes: int
    scales: int  # float32 [num_experts], or 0
    bias: int  # the same
    has_sigmoids: int
    groups: int  # 0: experts are chosen among all
    top_groups: int  # not more than top_k
    num_best: int  # experts of a group, whose keys are its score
    ids: int  # int32 [pairs], the result
    weights: int  # float32 [pairs], the result
    rows: int
    rows_per_chunk: int


_route_operands = make_reader(RouteOperands)


@njit(inline="always")
def _scale(weights, ids, scales, num_experts):
    """Multiply the weights of a row by the experts' own, if there are any."""
    if scales != 0:
        own = float32s(scales, num_experts)
        for k in range(len(weights)):
            weights[k] *= own[ids[k]]


@njit(inline="always")
def _sigmoid(x):
    return np.float32(1) / (np.float32(1) + exp_float(-x))


@njit(inline="always")
def _probability(a, logit, largest, total):
    """The sigmoid of an expert's logit, or its share of `total`."""
    return _sigmoid(logit) if a.has_sigmoids != 0 else exp_float(logit - largest) / total


@njit(inline="always")
def _key(a, logits, expert, largest, total):
    """What experts are chosen by; logits have the order of probabilities."""
    if a.bias == 0:
        return logits[expert]
    probability = _probability(a, logits[expert], largest, total)
    return probability + float32s(a.bias, a.num_experts)[expert]


@njit(inline="always")
def _insert(key, number, keys, numbers, count):
    """Insert a number into those of the largest keys, of which there are `count`, if there is room
    or its key is larger than the last; returns their new count."""
    if count == len(keys) and not key > keys[count - 1]:
        return count
    place = count if count < len(keys) else count - 1
    while place > 0 and key > keys[place - 1]:
        keys[place], numbers[place] = keys[place - 1], numbers[place - 1]
        place -= 1
    keys[place], numbers[place] = key, number
    return min(count + 1, len(keys))


@njit(inline="always")
def _group_score(a, logits, group, largest, total):
    """The largest key of a group, or the sum of its two largest ones."""
    size = a.num_experts // a.groups
    first = second = np.float32(-np.inf)
    for expert in range(group * size, (group + 1) * size):
        key = _key(a, logits, expert, largest, total)
        if key > first:
            first, second = key, first
        elif key > second:
            second = key
    return first if a.num_best == 1 else first + second


@njit(inline="always")
def _chosen_groups(a, logits, largest, total, keys, numbers):
    """A bit for each of the groups with the largest scores; `keys` and `numbers` are scratch."""
    if a.groups == 0:
        return -1
    keys, numbers, count = keys[: a.top_groups], numbers[: a.top_groups], 0
    for group in range(a.groups):
        score = _group_score(a, logits, group, largest, total)
        count = _insert(score, group, keys, numbers, count)
    bits = 0
    for place in range(count):
        bits |= 1 << numbers[place]
    return bits


@njit(inline="always")
def _sum_of_exponentials(a, logits, largest):
    """What softmax divides by; 1 for sigmoids, which need none."""
    if a.has_sigmoids != 0:
        return np.float32(1)
    total = np.float32(0)
    for expert in range(len(logits)):
        total += exp_float(logits[expert] - largest)
    return total


@njit(inline="always")
def _largest(logits):
    largest = logits[0]
    for expert in range(1, len(logits)):
        largest = max(largest, logits[expert])
    return largest


def route(operands, chunk, thread):
    """The experts with the largest keys, of equal ones the lowest number, and their weights.

    A row with NaN gets any experts, and weights that are NaN.
    """
    a = _route_operands(operands)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        logits = float32s(a.logits + row * a.logits_stride * BYTES, a.num_experts)
        ids = int32s(a.ids + row * a.top_k * BYTES, a.top_k)
        weights = float32s(a.weights + row * a.top_k * BYTES, a.top_k)
        largest = _largest(logits)
        total = _sum_of_exponentials(a, logits, largest)
        groups = _chosen_groups(a, logits, largest, total, weights, ids)
        size = a.num_experts // max(a.groups, 1)
        count = 0
        for expert in range(a.num_experts):
            if groups == -1 or (groups >> (expert // size)) & 1:
                key = _key(a, logits, expert, largest, total)
                count = _insert(key, expert, weights, ids, count)
        chosen = np.float32(0)
        for k in range(a.top_k):
            weights[k] = _probability(a, logits[ids[k]], largest, total)
            chosen += weights[k]
        if a.renormalizes != 0:
            for k in range(a.top_k):
                weights[k] /= chosen
        _scale(weights, ids, a.scales, a.num_experts)


@operands
class SortOperands(ctypes.Structure):
    """Sort pairs by expert, keeping the order of rows within each expert.

    `plan` is int64: the number of experts in use, then their numbers (`max_in_use` places), then
    for each of all experts the first of its sorted pairs, and at last the number of pairs.
    """

    ids: int  # int32 [pairs]
    pairs: int
    num_experts: int
    max_in_use: int
    plan: int  # the result
    order: int  # int32 [pairs], the result: the pair at each sorted place
    places: int  # int32 [pairs], the result: the sorted place of each pair


_sort_operands = make_reader(SortOperands)


def sort_pairs(operands, chunk, thread):
    """`SortOperands` in one chunk: a counting sort."""
    a = _sort_operands(operands)
    ids, places, order = int32s(a.ids, a.pairs), int32s(a.places, a.pairs), int32s(a.order, a.pairs)
    plan = int64s(a.plan, 1 + a.max_in_use)
    starts = int64s(a.plan + (1 + a.max_in_use) * WORD, a.num_experts + 1)
    for expert in range(a.num_experts + 1):
        starts[expert] = 0
    for pair in range(a.pairs):
        starts[ids[pair]] += 1
    in_use, first = 0, 0
    for expert in range(a.num_experts):
        count = starts[expert]
        if count > 0:
            in_use += 1
            plan[in_use] = expert
        starts[expert] = first
        first += count
    plan[0], starts[a.num_experts] = in_use, first
    for pair in range(a.pairs):
        place = starts[ids[pair]]
        starts[ids[pair]] = place + 1
        places[pair], order[place] = place, pair
    for expert in range(a.num_experts - 1, 0, -1):  # each start has moved to the next one's
        starts[expert] = starts[expert - 1]
    starts[0] = 0


@operands
class GatherOperands(ctypes.Structure):
    """Copy each sorted pair's row of converted inputs, and its scale."""

    order: int
    top_k: int
    x: int
    x_scale: int  # or 0
    row_bytes: int  # a multiple of 4
    y: int
    y_scale: int
    rows: int  # pairs
    rows_per_chunk: int


_gather_operands = make_reader(GatherOperands)


def gather_pairs(operands, chunk, thread):
    """`GatherOperands` for a run of sorted pairs."""
    a = _gather_operands(operands)
    order, count = int32s(a.order, a.rows), a.row_bytes // BYTES
    for place in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        row = order[place] // a.top_k
        x = int32s(a.x + row * a.row_bytes, count)
        y = int32s(a.y + place * a.row_bytes, count)
        for k in range(count):
            y[k] = x[k]
        if a.x_scale != 0:
            float32s(a.y_scale, a.rows)[place] = float32s(a.x_scale, row + 1)[row]


@operands
class ExpertLinearOperands(ctypes.Structure):
    """A linear of each expert over its sorted pairs; `table` has its `LinearOperands`."""

    kernel: int  # address of the kernel of a dense linear
    table: int  # LinearOperands [experts], without what the pairs determine
    scratch: int  # SCRATCH_BYTES for each thread
    plan: int
    max_in_use: int
    column_chunks: int  # chunks of columns of each expert
    columns: int
    x: int
    x_stride: int  # bytes; 0 if all pairs have the same row
    x_scale: int
    x_scale_stride: int  # bytes
    y: int
    y_stride: int  # floats


_expert_linear_operands = make_reader(ExpertLinearOperands)


def expert_linear(operands, chunk, thread):
    """Some columns of one expert. There are chunks for `max_in_use` experts; the last ones of a
    step that uses fewer have nothing to do."""
    a = _expert_linear_operands(operands)
    number = chunk // a.column_chunks
    plan = int64s(a.plan, 1 + a.max_in_use)
    if number >= plan[0]:
        return
    expert = plan[1 + number]
    starts = int64s(a.plan + (1 + a.max_in_use + expert) * WORD, 2)
    own = int64s(a.table + expert * LINEAR_WORDS * WORD, LINEAR_WORDS)
    call = int64s(a.scratch + thread * SCRATCH_BYTES, LINEAR_WORDS)
    for word in range(LINEAR_WORDS):
        call[word] = own[word]
    first = starts[0]
    call[X], call[X_STRIDE] = a.x + first * a.x_stride, a.x_stride
    call[X_SCALE] = a.x_scale + first * a.x_scale_stride
    call[Y], call[Y_STRIDE] = a.y + first * a.y_stride * BYTES, a.y_stride
    call[ROWS], call[COLUMNS] = starts[1] - first, a.columns
    call_kernel(
        a.kernel, a.scratch + thread * SCRATCH_BYTES, chunk - number * a.column_chunks, thread
    )


@operands
class CombineOperands(ctypes.Structure):
    """`y = sum over k of weights[k] * x[places[k]]` for each row, or `+=` if `adds`."""

    x: int  # float32 [pairs, width], sorted
    width: int
    top_k: int
    weights: int
    places: int
    y: int
    y_stride: int
    adds: int
    rows: int
    rows_per_chunk: int


_combine_operands = make_reader(CombineOperands)


def combine_pairs(operands, chunk, thread):
    """`CombineOperands` for a run of rows; a row's pairs are added in their own order."""
    a = _combine_operands(operands)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        weights = float32s(a.weights + row * a.top_k * BYTES, a.top_k)
        places = int32s(a.places + row * a.top_k * BYTES, a.top_k)
        y = float32s(a.y + row * a.y_stride * BYTES, a.width)
        if a.adds == 0:
            for n in range(a.width):
                y[n] = np.float32(0)
        for k in range(a.top_k):
            x, weight = float32s(a.x + places[k] * a.width * BYTES, a.width), weights[k]
            for n in range(a.width):
                y[n] += weight * x[n]


KERNELS = (route, sort_pairs, gather_pairs, expert_linear, combine_pairs)
