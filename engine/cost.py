"""Seconds: of a step (`CostModel`, for simulation) and of a backlog (`TokenRate`, measured)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.step import Step


@dataclass(frozen=True, slots=True)
class CostModel:
    """A step costs a fixed part, a part per token computed, and a part per slot attended to.

    The fixed part is what decoding in a batch shares: reading the weights once.
    """

    per_step: float
    per_token: float
    per_slot: float

    def step(self, step: "Step") -> float:
        """Seconds of this step."""
        slots = sum(entry.start + len(entry.tokens) for entry in step.entries)
        return self.per_step + self.per_token * step.num_tokens + self.per_slot * slots


class TokenRate:
    """Tokens computed per second of iteration, as an exponential average over iterations."""

    def __init__(self, tokens_per_second: float = 1000.0, weight: float = 0.05) -> None:
        self.tokens_per_second = tokens_per_second
        self._weight = weight

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Count one iteration."""
        if seconds > 0:
            latest = num_tokens / seconds
            self.tokens_per_second += self._weight * (latest - self.tokens_per_second)

    def seconds_for(self, num_tokens: int) -> float:
        """How long a backlog of `num_tokens` takes at the present rate."""
        return num_tokens / self.tokens_per_second
