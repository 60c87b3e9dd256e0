"""KnownCost: a cost model that the simulated machine follows exactly, so nothing is learned."""

from engine.cost.live import WEIGHT, LiveCost
from engine.step import Step


class KnownCost(LiveCost):
    """Only the rate of tokens is updated. (Updating the model would be a costly no-op at half a
    million steps per run.)"""

    def observe(self, step: Step, seconds: float) -> None:
        self.observe_tokens(step.num_tokens, seconds)

    def observe_tokens(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took `seconds`."""
        if seconds > 0.0:
            latest = num_tokens / seconds
            self.tokens_per_second += WEIGHT * (latest - self.tokens_per_second)
