"""BackgroundTime: how many tokens of background requests an iteration has time for.

Tokens of a long context, or of a prompt, may take longer than the whole iteration without them.
So background requests do not get what is left of an iteration's tokens, but of its time: together
they make it longer by at most a factor (`max_background_slowdown`), estimated by the cost model.
"""

from math import inf
from typing import TYPE_CHECKING

from engine.control.step_time import MIN_PIECE

if TYPE_CHECKING:
    from engine.cost.live import LiveCost
    from engine.pool import RequestPool
    from engine.request import Request
    from engine.step import Step


class BackgroundTime:
    """The seconds that background requests may still add to the iteration being planned.

    It is made once all other requests are in the batch; `step` is theirs, None if there are none.
    There is no limit if no other request is in the batch or in flight. Nor may they make an
    iteration with decodes longer than `goal`, an ITL goal less the model's error.
    """

    def __init__(
        self,
        step: "Step | None",
        pool: "RequestPool",
        cost: "LiveCost",
        slowdown: float,
        goal: float = inf,
    ) -> None:
        self._model = cost.model
        self._seconds = inf
        if step is not None and goal < inf:
            self._seconds = max(0.0, goal - cost.step(step))
        if slowdown == inf:
            return
        if step is not None:
            self._seconds = min(self._seconds, (slowdown - 1) * cost.step(step))
        elif any(r.num_in_flight for r in pool.started if not r.spec.is_background):
            self._seconds = (slowdown - 1) * cost.compute(1, 0)

    def num_tokens(self, request: "Request", num_tokens: int, beside: int) -> int:
        """How many of a request's next `num_tokens` tokens there is time for, in an iteration with
        `beside` other tokens."""
        if self._seconds == inf or num_tokens < 1:
            return num_tokens
        seconds = self._model.tokens(beside) + self._seconds
        in_time = self._model.tokens_within(seconds, num_tokens, request.num_planned, beside)
        return in_time if in_time >= min(num_tokens, MIN_PIECE) else 0

    def spend(self, request: "Request", num_tokens: int, beside: int) -> None:
        """So many of its tokens are computed in the iteration."""
        if self._seconds < inf:
            self._seconds -= self._model.added(num_tokens, request.num_planned, beside)
