"""Predicts the seconds of an iteration, for skip-join, deadlines, forecasts and simulation.

Everything but attention and sampling (reading the weights, GEMMs) is a curve over the number of
tokens. Attention is linear in the slots read, in the pieces of prompts, each of which has a kernel
of its own, and in their (query, key) pairs; sampling is linear in the tokens sampled. FastServe
profiles the first iteration by prompt length; this is the same for whole batches
(`engine.cost.profiler` measures, `engine.cost.fit` fits).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import le, lt
from typing import NamedTuple

from engine.step import Step


class StepCounts(NamedTuple):
    """What the time of a step depends on: its tokens, the slots that attention reads, the (query,
    key) pairs of its prompt pieces, the tokens that it samples or needs the log-probabilities of,
    and the pieces."""

    tokens: int
    slots: int
    pairs: float
    draws: int
    pieces: int

    @classmethod
    def of(cls, step: Step) -> "StepCounts":
        entries, num_tokens = step.entries, step.num_tokens
        slots = sum([entry.start for entry in entries]) + num_tokens
        draws = len(entries) - [entry.sample for entry in entries].count(None)
        draws += sum([len(e.prompt_logprobs.ids) for e in entries if e.prompt_logprobs is not None])
        pairs, pieces = 0.0, 0
        if num_tokens > len(entries):
            for entry in entries:
                count, num_drafts = len(entry.tokens), entry.num_drafts
                if num_drafts:  # each row is a decode
                    slots += num_drafts * entry.start + num_drafts * count // 2
                    draws += num_drafts
                elif count > 1:
                    pairs += count * (entry.start + (count + 1) / 2)
                    pieces += 1
        return cls(num_tokens, slots, pairs, draws, pieces)


class StepParts(NamedTuple):
    """Predicted seconds of a step, for each of its `StepCounts`."""

    tokens: float
    slots: float
    pairs: float
    draws: float
    pieces: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds. `curve` has (tokens, seconds) points, ascending in both, with linear
    interpolation between them and beyond the last two. `per_draw` is for the logits and the
    sampling of one token, `per_piece` for a piece of a prompt of two tokens or more. Steps with
    such pieces take as long as the next number of tokens in `graphs`, ascending: they are padded to
    the CUDA graph of that size, and larger ones are not.

    Between two steps the worker waits for the engine's loop: `idle_step` per step and `idle_entry`
    per request in it. This time is not part of a step; a simulation adds it.
    """

    curve: tuple[tuple[int, float], ...]
    per_slot: float
    per_pair: float
    per_draw: float = 0.0
    idle_step: float = 0.0
    idle_entry: float = 0.0
    per_piece: float = 0.0
    graphs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.curve) > 1, "a curve has at least two points"
        sizes, seconds = zip(*self.curve, strict=True)
        rising = all(map(lt, sizes, sizes[1:])) and all(map(le, seconds, seconds[1:]))
        assert rising, f"the curve is not ascending: {self.curve}"

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> "CostModel":
        """The model with these fields, parsed from JSON; ValueError if one is unknown or has a
        wrong value."""
        known = {field.name for field in fields(cls)}
        if not values.keys() <= known:
            raise ValueError(f"{sorted(values.keys() - known)[0]!r} is not a field of a cost model")
        listed = ("curve", "graphs")
        rest = {name: _seconds(name, value) for name, value in values.items() if name not in listed}
        graphs = _sizes(values.get("graphs", ()))
        try:
            return cls(_points(values.get("curve")), **rest, graphs=graphs)
        except (AssertionError, TypeError) as error:
            raise ValueError(str(error)) from error

    @classmethod
    def linear(cls, per_step: float, per_token: float, per_slot: float) -> "CostModel":
        """A model with constant seconds per step, per token, and per slot read by attention."""
        curve = ((0, per_step), (1 << 20, per_step + per_token * (1 << 20)))
        return cls(curve, per_slot, per_pair=0.0)

    def tokens(self, num_tokens: int) -> float:
        """Seconds of everything but attention and sampling."""
        at = min(max(1, bisect_left(self.curve, (num_tokens,))), len(self.curve) - 1)
        (x0, y0), (x1, y1) = self.curve[at - 1], self.curve[at]
        return max(0.0, y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0))

    def padded(self, num_tokens: int) -> int:
        """The tokens that a step with pieces of prompts computes if it has `num_tokens`."""
        return padded(num_tokens, self.graphs)

    def attention(self, num_tokens: int, start: int) -> float:
        """Seconds of attention for `num_tokens` tokens of one request from position `start`."""
        if num_tokens == 1:
            return self.per_slot * (start + 1)
        pairs = num_tokens * (start + (num_tokens + 1) / 2)
        return self.per_slot * (start + num_tokens) + self.per_pair * pairs + self.per_piece

    def compute(self, num_tokens: int, start: int) -> float:
        """Seconds of an iteration of one request that samples a token."""
        computed = self.padded(num_tokens) if num_tokens > 1 else 1
        return self.tokens(computed) + self.attention(num_tokens, start) + self.per_draw

    def step(self, step: Step) -> float:
        """Seconds of a whole step."""
        num_tokens = step.num_tokens
        if num_tokens == len(step.entries):  # decodes only: the common case, on the hot path
            return self.decodes(num_tokens, sum([e.start for e in step.entries]) + num_tokens)
        total = self.tokens(self.padded(num_tokens))
        for entry in step.entries:
            if entry.num_drafts:  # each row is a decode
                for start in range(entry.start, entry.start + len(entry.tokens)):
                    total += self.attention(1, start) + self.per_draw
                continue
            total += self.attention(len(entry.tokens), entry.start)
            if entry.sample is not None:
                total += self.per_draw
        return total

    def decodes(self, num_rows: int, num_slots: int) -> float:
        """Seconds of a step of decodes only, which read `num_slots` slots together."""
        return self.tokens(num_rows) + self.per_slot * num_slots + self.per_draw * num_rows

    def parts(self, counts: StepCounts) -> StepParts:
        """The seconds of a whole step by what takes them; their sum is `step`, but for rounding."""
        return StepParts(
            self.tokens(self.padded(counts.tokens) if counts.pieces else counts.tokens),
            self.per_slot * counts.slots,
            self.per_pair * counts.pairs,
            self.per_draw * counts.draws,
            self.per_piece * counts.pieces,
        )

    def added(self, num_tokens: int, start: int, beside: int) -> float:
        """Seconds by which a request's tokens, from position `start`, make an iteration longer that
        computes `beside` other tokens."""
        more = self.tokens(self.padded(beside + num_tokens)) - self.tokens(beside)
        return more + self.attention(num_tokens, start) + self.per_draw

    def idle(self, num_entries: int) -> float:
        """Seconds that the worker waits for the loop before a step with `num_entries` requests."""
        return self.idle_step + self.idle_entry * num_entries

    def tokens_within(
        self, seconds: float, num_tokens: int, start: int, beside: int, *, draws: bool = False
    ) -> int:
        """How many of a request's next `num_tokens` tokens, from position `start`, fit into
        `seconds` of an iteration that also computes `beside` other tokens. With `draws` each token
        needs its logits too."""
        per_token = self.per_draw if draws else 0.0
        low, high = 0, num_tokens
        while low < high:
            middle = (low + high + 1) // 2
            own = self.attention(middle, start) + per_token * middle
            if self.tokens(self.padded(beside + middle)) + own <= seconds:
                low = middle
            else:
                high = middle - 1
        return low


def padded(num_tokens: int, graphs: Sequence[int]) -> int:
    """The smallest of the ascending sizes that holds the tokens, or their number if none does."""
    at = bisect_left(graphs, num_tokens)
    return graphs[at] if at < len(graphs) else num_tokens


def _sizes(value: object) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and all(type(each) is int and each > 0 for each in value):
        return tuple(sorted(value))
    raise ValueError(f"graphs is {value!r}, but must be a list of numbers of tokens")


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1e9:
        raise ValueError(f"{name} is {value!r}, but must be a number of seconds from 0 to 1e9")
    return float(value)


def _points(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"curve is {value!r}, but must be a list of [tokens, seconds] pairs")
    try:
        return tuple((int(tokens), _seconds("curve", seconds)) for tokens, seconds in value)
    except TypeError as error:
        raise ValueError(f"curve must be a list of [tokens, seconds] pairs: {error}") from error


# Until a machine is measured, and where measuring failed
UNMEASURED = CostModel.linear(per_step=0.01, per_token=0.001, per_slot=1e-7)
