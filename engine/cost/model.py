"""Seconds of an iteration: one model for skip-join, deadlines, forecasts and simulation.

What all tokens of a step share (reading the weights, the GEMMs) is a curve over the number of
tokens; attention is a part per slot read by decodes and a part per (query, key) pair of prefills;
drawing a token has a part of its own. FastServe profiles the first iteration by prompt length;
this is that, for whole batches (`engine.cost.profiler` measures, `engine.cost.fit` fits).
"""

from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.step import Step


@dataclass(frozen=True, slots=True)
class CostModel:
    """`curve` holds (tokens, seconds) points, ascending in both; straight lines between them and
    beyond the last two. All parts are seconds; `per_draw` is for logits and sampling of one token.

    Between two steps the worker waits for the loop: `idle_step` each time and `idle_entry` for
    each request in it. That is no part of a step; a simulation adds it.
    """

    curve: tuple[tuple[int, float], ...]
    per_slot: float
    per_pair: float
    per_draw: float = 0.0
    idle_step: float = 0.0
    idle_entry: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.curve) > 1, "a line needs two points"
        rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(self.curve))
        assert rising, f"more tokens take longer: {self.curve}"

    @classmethod
    def parse(cls, values: "Mapping[str, object]") -> "CostModel":
        """From the fields as JSON has them; raises ValueError for anything else."""
        known = {field.name for field in fields(cls)}
        if not values.keys() <= known:
            raise ValueError(f"{sorted(values.keys() - known)[0]!r} is no part of a cost model")
        rest = {name: _seconds(name, value) for name, value in values.items() if name != "curve"}
        try:
            return cls(_points(values.get("curve")), **rest)
        except (AssertionError, TypeError) as error:
            raise ValueError(str(error)) from error

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
        """Seconds of an iteration of one request alone, which ends with a token."""
        return self.tokens(num_tokens) + self.attention(num_tokens, start) + self.per_draw

    def step(self, step: "Step") -> float:
        """Seconds of a whole step."""
        num_tokens = step.num_tokens
        if num_tokens == len(step.entries):  # decodes only: the common case, on the hot path
            slots = sum([entry.start for entry in step.entries]) + num_tokens
            return self.tokens(num_tokens) + self.per_slot * slots + self.per_draw * num_tokens
        total = self.tokens(num_tokens)
        for entry in step.entries:
            total += self.attention(len(entry.tokens), entry.start)
            if entry.sample is not None:
                total += self.per_draw
        return total

    def idle(self, num_entries: int) -> float:
        """Seconds that the worker waits for the loop, around a step for so many requests."""
        return self.idle_step + self.idle_entry * num_entries

    def tokens_within(self, seconds: float, num_tokens: int, start: int, beside: int) -> int:
        """How many of a request's next `num_tokens` tokens, from position `start`, an iteration
        has time for that computes `beside` other tokens too."""
        low, high = 0, num_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.tokens(beside + middle) + self.attention(middle, start) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1e9:
        raise ValueError(f"{name} is {value!r}, which is no number of seconds")
    return float(value)


def _points(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"curve is {value!r}, which is no list of points")
    try:
        return tuple((int(tokens), _seconds("curve", seconds)) for tokens, seconds in value)
    except TypeError as error:
        raise ValueError(f"curve is no list of (tokens, seconds): {error}") from error


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

    def tokens_within(self, seconds: float, num_tokens: int, start: int, beside: int) -> int:
        """See `CostModel.tokens_within`."""
        return self.model.tokens_within(seconds, num_tokens, start, beside)

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
        if predicted > 0.0 and not step.moves:  # moving KV says nothing of computing
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
