"""TimeBound: the seconds that an iteration may take, of which prompts and background get a part.

Three limits are asked in turn: `max_step_seconds`, for a chunk of a prompt beside other tokens; the
ITL goal or the prefill slowdown (`engine.control.step_time`); and the time that background requests
may add (`engine.control.background_time`). Decodes of other requests are always taken.
"""

from math import inf
from typing import TYPE_CHECKING

from engine.control.background_time import BackgroundTime
from engine.control.step_time import MIN_PIECE, StepTime

if TYPE_CHECKING:
    from engine.control.batch_builder import BatchBuilder
    from engine.control.seats import SeatBound
    from engine.control.settings import SchedulerSettings
    from engine.cost.live import LiveCost
    from engine.pool import RequestPool
    from engine.request import Request


class TimeBound:
    """How many tokens of a request the batch has time for, and whether a request may start."""

    def __init__(
        self,
        settings: "SchedulerSettings",
        pool: "RequestPool",
        cost: "LiveCost",
        seats: "SeatBound",
    ) -> None:
        self._settings = settings
        self._cost = cost
        self._seats = seats
        self._step_time = StepTime(settings, pool, cost)
        self._background = BackgroundTime(settings, pool, cost, self._step_time)
        self._is_cut = False  # a prompt's chunk in the batch was shortened for lack of time

    def watch(self, request: "Request") -> None:
        """A request arrives; it may have a goal of its own."""
        self._step_time.watch(request)

    def begin_plan(self, now: float) -> None:
        """Forget what was computed for the last plan."""
        self._step_time.begin_plan(now)

    def begin_batch(self) -> None:
        """An empty batch will be filled."""
        self._is_cut = False
        self._background.begin_batch()

    def goal(self, batch: "BatchBuilder") -> float:
        """The lowest ITL goal of the decodes in the batch; infinite if there is none."""
        return self._step_time.goal(batch)

    def tokens(self, batch: "BatchBuilder", request: "Request", num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens of a started request there is time for. Suspects
        of a crash are not slowed down."""
        if num_tokens and request.unplanned > 1 and self._settings.chunks_prompts:
            in_time = num_tokens
            if not request.is_suspect:
                in_time = self._in_step_seconds(batch, request, num_tokens)
                if in_time and self._step_time.bounds_pieces:
                    in_time = self._step_time.piece(batch, request, in_time)
            self._is_cut = self._is_cut or in_time < num_tokens
            num_tokens = in_time
        if num_tokens and request.spec.is_background:
            return self._background.tokens(batch, request, num_tokens)
        return num_tokens

    def left(self, batch: "BatchBuilder") -> float:
        """The seconds that the goals of a complete batch leave for other work; infinite without
        any."""
        return self._step_time.left(batch)

    def has_room(self, batch: "BatchBuilder", request: "Request") -> bool:
        """Whether there is time for a request without KV."""
        if not self.may_start(request):
            return False
        if self._settings.chunks_prompts and self._is_used_up(batch):
            return False
        if not request.spec.is_background:
            return True
        return self._background.tokens(batch, request, request.unplanned) > 0

    def may_start(self, request: "Request") -> bool:
        """Whether the ITL goals would be met with this waiting request as one more decode."""
        return not self._step_time.has_goals or self._step_time.may_start(request)

    def started(self, request: "Request") -> None:
        """The request has started in this plan."""
        self._step_time.started(request)

    def spend(self, batch: "BatchBuilder", request: "Request", num_tokens: int) -> None:
        """So many tokens of a background request will be added to the batch."""
        self._background.spend(batch, request, num_tokens)

    def _is_used_up(self, batch: "BatchBuilder") -> bool:
        """Whether the batch has no time left for another prompt."""
        return self._is_cut and batch.has_prefills

    def _in_step_seconds(self, batch: "BatchBuilder", request: "Request", num_tokens: int) -> int:
        """How many of a prompt's tokens fit into `max_step_seconds`: at least `MIN_PIECE` for the
        first prompt of an iteration; 0 once the time is used up."""
        bound = self._settings.max_step_seconds
        if bound == inf or num_tokens <= MIN_PIECE:
            return num_tokens
        if self._is_used_up(batch):
            return 0
        beside = batch.num_tokens + self._seats.num_others(batch, request)
        if not beside:
            return num_tokens
        in_time = self._cost.tokens_within(bound, num_tokens, request.num_planned, beside)
        return max(MIN_PIECE, in_time)
