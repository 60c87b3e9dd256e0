"""Fits a cost model to measured iterations: least squares with non-negative coefficients.

The curve over tokens is a sum of ramps, one from each knot to the next, so that non-negative slopes
make it monotonic. Errors are relative to the duration that the model predicts, so that short
iterations count as much as long ones, and too long as much as too short.
"""

from collections.abc import Sequence
from itertools import pairwise
from operator import mul
from typing import NamedTuple

from engine.cost.model import CostModel, padded
from engine.step import Step

MAX_SAMPLES = 20_000  # fixed: a limit of time; of more samples an evenly spaced subset is used
_RIDGE = 1e-9  # fixed: keeps the solution unique if the samples do not determine it
# fixed: units of the penalty: slots, pairs, draws and pieces of a step with much of each. If such a
# part takes as long as the longest sample, this counts as a relative error of `_PENALTY`: few short
# samples do not tell these parts from tokens, and are to be explained by tokens.
_MUCH = (8192.0, 131072.0, 64.0, 8.0)
# Swept in results/constants
_PENALTY = 0.03
_PASSES = 4  # each weights the errors by the previous pass's model
_NUM_PARTS = len(_MUCH)  # per_slot, per_pair, per_draw, per_piece, behind the curve's coefficients


class Sample(NamedTuple):
    """A measured iteration: the cost model's features, and the worker's seconds."""

    num_tokens: int
    slots: int
    pairs: float
    num_sampled: int
    seconds: float
    num_pieces: int = 0  # pieces of prompts, each of two tokens or more

    def predicted(self, model: CostModel) -> float:
        """The seconds that the model predicts."""
        rows = model.per_draw * self.num_sampled + model.per_piece * self.num_pieces
        attention = model.per_slot * self.slots + model.per_pair * self.pairs
        return model.tokens(self.padded(model.graphs).num_tokens) + attention + rows

    def padded(self, graphs: Sequence[int]) -> "Sample":
        """The sample with the tokens that were computed, see `CostModel`."""
        if not (graphs and self.num_pieces):
            return self
        return self._replace(num_tokens=padded(self.num_tokens, graphs))

    @classmethod
    def of(cls, step: Step, seconds: float) -> "Sample":
        slots, pairs, num_pieces = 0, 0.0, 0
        for entry in step.entries:
            count = len(entry.tokens)
            slots += entry.start + count
            if count > 1:
                pairs += count * (entry.start + (count + 1) / 2)
                num_pieces += 1
        num_sampled = sum(entry.sample is not None for entry in step.entries)
        return cls(step.num_tokens, slots, pairs, num_sampled, seconds, num_pieces)


def fit(
    samples: Sequence[Sample],
    idle_step: float = 0.0,
    idle_entry: float = 0.0,
    graphs: tuple[int, ...] = (),
) -> CostModel:
    """The model with the least squared error, in which tokens take what the samples leave open.
    ValueError if all samples are of one size. `graphs` are those of the model."""
    stride = -(-len(samples) // MAX_SAMPLES)
    kept = [sample.padded(graphs) for sample in samples[::stride] if sample.seconds > 0.0]
    knots = _knots(sorted({sample.num_tokens for sample in kept}))
    rows = [_features(sample, knots) for sample in kept]
    seconds = [sample.seconds for sample in kept]
    penalties = [
        [0.0] * (len(knots) + at) + [much] + [0.0] * (_NUM_PARTS - 1 - at)
        for at, much in enumerate(_MUCH)
    ]
    weak = [max(seconds) / _PENALTY] * _NUM_PARTS
    expected, parts = seconds, list[float]()
    for _ in range(_PASSES):
        parts = _least_squares(rows + penalties, seconds + [0.0] * _NUM_PARTS, [*expected, *weak])
        floor = 0.1 * min(seconds)
        expected = [max(floor, sum(map(mul, row, parts))) for row in rows]
    slopes = parts[1:-_NUM_PARTS]
    per_slot, per_pair, per_draw, per_piece = parts[-_NUM_PARTS:]
    curve = [(knots[0], parts[0])]
    for (left, right), slope in zip(pairwise(knots), slopes, strict=True):
        curve.append((right, curve[-1][1] + slope * (right - left)))
    return CostModel(
        tuple(curve), per_slot, per_pair, per_draw, idle_step, idle_entry, per_piece, graphs
    )


def _knots(sizes: Sequence[int]) -> list[int]:
    """Numbers of tokens where the curve may bend: the smallest, the largest, and between them each
    sampled size that is at least double the knot before it."""
    if len(sizes) < 2:
        raise ValueError(
            "iterations of two different numbers of tokens are needed to fit a cost model"
        )
    knots = [sizes[0]]
    for size in sizes[1:]:
        if size >= 2 * knots[-1]:
            knots.append(size)
    if knots[-1] < sizes[-1]:
        knots[1:] = [*knots[1:-1], sizes[-1]]
    return knots


def _features(sample: Sample, knots: Sequence[int]) -> list[float]:
    """One row: 1, the length of each ramp up to the sample, attention, sampling, and pieces."""
    ramps = [
        float(min(max(sample.num_tokens - left, 0), right - left))
        for left, right in pairwise(knots)
    ]
    attention = float(sample.slots), sample.pairs
    return [1.0, *ramps, *attention, float(sample.num_sampled), float(sample.num_pieces)]


def _least_squares(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], expected: Sequence[float]
) -> list[float]:
    """The non-negative coefficients that minimize the error of `rows` · coefficients relative to
    `expected`, against `seconds`."""
    size = len(rows[0])
    gram = [[0.0] * size for _ in range(size)]
    moment = [0.0] * size
    for row, took, scale in zip(rows, seconds, expected, strict=True):
        present = [(at, value / scale) for at, value in enumerate(row) if value]
        for i, value in present:
            line = gram[i]
            moment[i] += value * took / scale
            for j, other in present:
                line[j] += value * other
    units = [gram[i][i] ** 0.5 or 1.0 for i in range(size)]  # scales all columns to length 1
    scaled = [[gram[i][j] / (units[i] * units[j]) for j in range(size)] for i in range(size)]
    for i in range(size):
        scaled[i][i] += _RIDGE
    found = _nonnegative(scaled, [moment[i] / units[i] for i in range(size)])
    return [part / unit for part, unit in zip(found, units, strict=True)]


def _nonnegative(gram: Sequence[Sequence[float]], moment: Sequence[float]) -> list[float]:
    """Lawson and Hanson's active set (Solving Least Squares Problems, chapter 23)."""
    size = len(moment)
    parts = [0.0] * size
    free: list[int] = []
    for _ in range(3 * size):
        gains = [
            (moment[i] - sum(map(mul, gram[i], parts)), i) for i in range(size) if i not in free
        ]
        gain, best = max(gains, default=(0.0, 0))
        if gain <= 1e-12 * max(map(abs, moment)):
            break
        free.append(best)
        parts = _settle(gram, moment, parts, free)
    return parts


def _settle(
    gram: Sequence[Sequence[float]], moment: Sequence[float], parts: list[float], free: list[int]
) -> list[float]:
    """Solve for the free coefficients; one that would become negative is set to 0 and removed from
    `free`, in place."""
    while free:
        solved = _solve([[gram[i][j] for j in free] for i in free], [moment[i] for i in free])
        wanted = dict(zip(free, solved, strict=True))
        if all(value > 0.0 for value in solved):
            return [wanted.get(i, 0.0) for i in range(len(parts))]
        share, first = min((parts[i] / (parts[i] - wanted[i]), i) for i in free if wanted[i] <= 0.0)
        parts = [part + share * (wanted.get(i, part) - part) for i, part in enumerate(parts)]
        free.remove(first)
        parts[first] = 0.0
    return parts


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Solve a positive definite system by Gaussian elimination."""
    size = len(vector)
    for i in range(size):
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
            vector[k] -= factor * vector[i]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(map(mul, matrix[i][i + 1 :], solution[i + 1 :]))
        solution[i] = (vector[i] - known) / matrix[i][i]
    return solution
