"""BackgroundTime: how many tokens of background requests an iteration has time for.

Tokens of a long context, or of a prompt, may take longer than the whole iteration without them.
So background requests do not get what is left of an iteration's tokens, but of its time: together
they make it longer by at most a factor (`max_background_slowdown`), estimated by the cost model.
Nor may they make an iteration with decodes longer than its ITL goal, less the model's error. There
is no limit if no other request is in the batch or in flight.
"""

from math import inf
from typing import TYPE_CHECKING

from engine.control.step_time import MIN_PIECE

if TYPE_CHECKING:
    from engine.control.batch_builder import BatchBuilder
    from engine.control.settings import SchedulerSettings
    from engine.control.step_time import StepTime
    from engine.cost.live import LiveCost
    from engine.pool import RequestPool
    from engine.request import Request


class BackgroundTime:
    """The seconds that background requests may still add to the batch being filled
    (`BatchBuilder.background_seconds`). They are known from the first background request on, when
    all other requests are in the batch."""

    def __init__(
        self,
        settings: "SchedulerSettings",
        pool: "RequestPool",
        cost: "LiveCost",
        step_time: "StepTime",
    ) -> None:
        self._slowdown = settings.max_background_slowdown
        self._chunks_prompts = settings.chunks_prompts
        self._pool = pool
        self._cost = cost
        self._step_time = step_time

    def tokens(self, batch: "BatchBuilder", request: "Request", num_tokens: int) -> int:
        """How many of a background request's next `num_tokens` tokens there is time for."""
        if batch.background_seconds is None:
            batch.background_seconds = self._all_seconds(batch)
        if batch.background_seconds == inf or num_tokens < 1:
            return num_tokens
        model, beside = self._cost.model, batch.num_tokens
        seconds = model.tokens(beside) + batch.background_seconds
        in_time = model.tokens_within(seconds, num_tokens, request.num_planned, beside)
        fewest = min(num_tokens, MIN_PIECE) if self._chunks_prompts else num_tokens
        return in_time if in_time >= fewest else 0

    def spend(self, batch: "BatchBuilder", request: "Request", num_tokens: int) -> None:
        """So many of its tokens will be added to the batch."""
        if batch.background_seconds is not None and batch.background_seconds < inf:
            added = self._cost.model.added(num_tokens, request.num_planned, batch.num_tokens)
            batch.background_seconds -= added

    def _all_seconds(self, batch: "BatchBuilder") -> float:
        """The seconds for all background requests beside those in the batch."""
        if batch.is_empty:
            others = (r for r in self._pool.started if not r.spec.is_background)
            if self._slowdown == inf or not any(r.num_in_flight for r in others):
                return inf
            return (self._slowdown - 1) * self._cost.compute(1, 0)
        goal = self._step_time.goal(batch) / self._cost.margin
        if self._slowdown == inf and goal == inf:
            return inf
        seconds = self._cost.step(batch.iteration().step)
        return min(max(0.0, goal - seconds), (self._slowdown - 1) * seconds)
