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
SCRATCH_BYTES = -(-ctypes.sizeof(LinearOperands) // 64) * 64  # of a thread
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
    bias: int  # the same; other than 0, probabilities are sigmoids
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
def _key(logit, expert, bias, num_experts):
    """What experts are chosen by."""
    if bias == 0:
        return logit
    return _sigmoid(logit) + float32s(bias, num_experts)[expert]


@njit(inline="always")
def _weigh(logits, ids, weights, bias):
    """Write the probabilities of a row's chosen experts, of which `weights` has the keys; returns
    their sum."""
    largest, total, chosen = weights[0], np.float32(0), np.float32(0)
    if bias == 0:
        for expert in range(len(logits)):
            total += exp_float(logits[expert] - largest)
    for k in range(len(weights)):
        if bias == 0:
            weights[k] = exp_float(weights[k] - largest) / total
        else:
            weights[k] = _sigmoid(logits[ids[k]])
        chosen += weights[k]
    return chosen


def route(operands, chunk, thread):
    """The experts with the largest logits, or sums of sigmoid and bias, of equal ones the lowest
    number, and their weights.

    A row with NaN gets any experts, and weights that are NaN.
    """
    a = _route_operands(operands)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        logits = float32s(a.logits + row * a.logits_stride * BYTES, a.num_experts)
        ids = int32s(a.ids + row * a.top_k * BYTES, a.top_k)
        weights = float32s(a.weights + row * a.top_k * BYTES, a.top_k)
        count = 0
        for expert in range(a.num_experts):
            key = _key(logits[expert], expert, a.bias, a.num_experts)
            if count == a.top_k and not key > weights[count - 1]:
                continue
            place = count if count < a.top_k else count - 1
            while place > 0 and key > weights[place - 1]:
                weights[place], ids[place] = weights[place - 1], ids[place - 1]
                place -= 1
            weights[place], ids[place] = key, expert
            count = min(count + 1, a.top_k)
        chosen = _weigh(logits, ids, weights, a.bias)
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
    column_chunks: int  # of each expert
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
