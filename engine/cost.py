"""Seconds of an iteration: one model for skip-join, deadlines, forecasts and simulation.

What all tokens of a step share (reading the weights, the GEMMs) is a curve over the number of
tokens; attention is a part per slot read by decodes and a part per (query, key) pair of prefills.
FastServe profiles the first iteration by prompt length; this is that, for whole batches.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.step import Step


@dataclass(frozen=True, slots=True)
class CostModel:
    """`curve` holds (tokens, seconds) points, ascending in both; straight lines between them and
    beyond the last two. `per_slot` and `per_pair` are seconds."""

    curve: tuple[tuple[int, float], ...]
    per_slot: float
    per_pair: float

    def __post_init__(self) -> None:
        assert len(self.curve) > 1, "a line needs two points"
        rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(self.curve))
        assert rising, f"more tokens take longer: {self.curve}"

    @classmethod
    def linear(cls, per_step: float, per_token: float, per_slot: float) -> "CostModel":
        """A fixed part per step, a part per token, a part per slot attended to."""
        curve = ((0, per_step), (1 << 20, per_step + per_token * (1 << 20)))
        return cls(curve, per_slot, per_pair=0.0)

    def tokens(self, num_tokens: int) -> float:
        """Seconds of everything but attention."""
        at = min(max(1, bisect_left(self.curve, (num_tokens,))), len(self.curve) - 1)
        (x0, y0), (x1, y1) = self.curve[at - 1], self.curve[at]
        return max(0.0, y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0))

    def attention(self, num_tokens: int, start: int) -> float:
        """Seconds of attention for one request's tokens from position `start`."""
        if num_tokens == 1:
            return self.per_slot * (start + 1)
        pairs = num_tokens * (start + (num_tokens + 1) / 2)
        return self.per_slot * (start + num_tokens) + self.per_pair * pairs

    def compute(self, num_tokens: int, start: int) -> float:
        """Seconds of an iteration of one request alone."""
        return self.tokens(num_tokens) + self.attention(num_tokens, start)

    def step(self, step: "Step") -> float:
        """Seconds of a whole step."""
        num_tokens = step.num_tokens
        if num_tokens == len(step.entries):  # decodes only: the common case, on the hot path
            slots = sum([entry.start for entry in step.entries]) + num_tokens
            return self.tokens(num_tokens) + self.per_slot * slots
        total = self.tokens(num_tokens)
        for entry in step.entries:
            total += self.attention(len(entry.tokens), entry.start)
        return total


class LiveCost:
    """A cost model that follows the machine: each iteration moves the points around its size."""

    def __init__(self, model: CostModel, weight: float = 0.05) -> None:
        self.model = model
        self._weight = weight
        self.tokens_per_second = 1.0 / model.compute(1, 0)

    def compute(self, num_tokens: int, start: int) -> float:
        return self.model.compute(num_tokens, start)

    def step(self, step: "Step") -> float:
        return self.model.step(step)

    def seconds_for(self, num_tokens: int) -> float:
        """How long a backlog of so many tokens takes at the rate of late."""
        return num_tokens / self.tokens_per_second

    def observe(self, step: "Step", seconds: float) -> None:
        """An iteration took `seconds`."""
        num_tokens = step.num_tokens
        if seconds <= 0.0 or not num_tokens:
            return
        latest = num_tokens / seconds
        self.tokens_per_second += self._weight * (latest - self.tokens_per_second)
        predicted = self.model.step(step)
        if predicted > 0.0:
            self._scale(num_tokens, 1.0 + self._weight * (seconds / predicted - 1.0))

    def _scale(self, num_tokens: int, factor: float) -> None:
        """Scale the two points around `num_tokens`, and keep the curve rising."""
        curve = list(self.model.curve)
        at = min(max(1, bisect_left(curve, (num_tokens,))), len(curve) - 1)
        for index in (at - 1, at):
            tokens, seconds = curve[index]
            curve[index] = (tokens, seconds * factor)
        for index in range(1, len(curve)):
            tokens, seconds = curve[index]
            curve[index] = (tokens, max(seconds, curve[index - 1][1]))
        self.model = replace(self.model, curve=tuple(curve))
