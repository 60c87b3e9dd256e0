"""The bounds of an iteration beside KV: its seats and tokens, and the seconds that it may take.

Prefills leave a token for each decode. Prompts and background requests get a part of the seconds,
by three limits: `max_step_seconds`, for a chunk of a prompt beside other tokens; the ITL goal or
the prefill slowdown (`engine.control.step_time`); and the time that background requests may add
(`BackgroundTime`). Decodes of other requests are always taken.
"""

from math import inf
from typing import TYPE_CHECKING

from engine.control.step_time import MIN_PIECE, StepTime
from engine.request import Request, State

if TYPE_CHECKING:
    from engine.control.batch_builder import BatchBuilder
    from engine.control.settings import SchedulerSettings
    from engine.cost.live import LiveCost
    from engine.pool import RequestPool

READY = State.READY  # bound once (see engine.pool)


class SeatBound:
    """How many tokens of a request the seats and tokens of the batch allow."""

    def __init__(self, settings: "SchedulerSettings", pool: "RequestPool") -> None:
        self._chunks_prompts = settings.chunks_prompts
        self._pool = pool

    def tokens(self, batch: "BatchBuilder", request: Request, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens of a started request fit; 0 if none."""
        if batch.excludes(request):
            return 0
        if num_tokens > 1 and self._chunks_prompts:
            num_tokens = min(num_tokens, self.room(batch, request))
        return max(0, num_tokens) if num_tokens <= batch.tokens_left else 0

    def room(self, batch: "BatchBuilder", request: Request) -> int:
        """The tokens that are left for the prompt of a request beside the decodes."""
        return batch.tokens_left - self.num_others(batch, request)

    def has_room(self, batch: "BatchBuilder", request: Request) -> bool:
        """Whether a request without KV could be in the batch."""
        needed = self.num_others(batch, request) + 1 if self._chunks_prompts else request.unplanned
        return batch.tokens_left >= needed

    def num_ready(self, batch: "BatchBuilder") -> int:
        """Ready requests, and those that may be planned ahead, which were not considered yet."""
        return self._pool.count(READY) - batch.num_skipped + len(batch.ahead)

    def num_others(self, batch: "BatchBuilder", request: Request) -> int:
        """The other ready requests for which a prefill of `request` leaves a token: at most one per
        seat, and none for background requests unless it is one itself."""
        num_ready, background = self.num_ready(batch) - request.is_started, self._pool.background
        if background and not request.spec.is_background:
            num_ready -= background.num_ready
            num_ready -= sum(r.spec.is_background for r in batch.ahead)
        return min(num_ready, batch.seats - 1)


class BackgroundTime:
    """How many tokens of background requests an iteration has time for.

    Tokens of a long context, or of a prompt, may take longer than the whole iteration without them.
    So background requests get what is left not of an iteration's tokens, but of its time: together
    they make it longer by at most a factor (`max_background_slowdown`), estimated by the cost
    model. Nor may they make an iteration with decodes longer than its ITL goal, less the model's
    error. There is no limit if no other request is in the batch or in flight. The seconds
    (`BatchBuilder.background_seconds`) are known from the first background request on, when all
    other requests are in the batch.
    """

    def __init__(
        self,
        settings: "SchedulerSettings",
        pool: "RequestPool",
        cost: "LiveCost",
        step_time: StepTime,
    ) -> None:
        self._slowdown = settings.max_background_slowdown
        self._chunks_prompts = settings.chunks_prompts
        self._pool = pool
        self._cost = cost
        self._step_time = step_time

    def tokens(self, batch: "BatchBuilder", request: Request, num_tokens: int) -> int:
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

    def spend(self, batch: "BatchBuilder", request: Request, num_tokens: int) -> None:
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


class TimeBound(StepTime):
    """How many tokens of a request the batch has time for, and whether a request may start: the ITL
    goals with the two other limits."""

    def __init__(
        self,
        settings: "SchedulerSettings",
        pool: "RequestPool",
        cost: "LiveCost",
        seats: SeatBound,
    ) -> None:
        super().__init__(settings, pool, cost)
        self._settings = settings
        self._seat_bound = seats
        self._background = BackgroundTime(settings, pool, cost, self)

    def tokens(self, batch: "BatchBuilder", request: Request, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens of a started request there is time for. Suspects
        of a crash are not slowed down."""
        if num_tokens and request.unplanned > 1 and self._settings.chunks_prompts:
            in_time = num_tokens
            if not request.num_crashes:
                in_time = self._in_step_seconds(batch, request, num_tokens)
                if in_time and self.bounds_pieces:
                    in_time = self.piece(batch, request, in_time)
            batch.is_cut = batch.is_cut or in_time < num_tokens
            num_tokens = in_time
        if num_tokens and request.spec.is_background:
            return self._background.tokens(batch, request, num_tokens)
        return num_tokens

    def has_room(self, batch: "BatchBuilder", request: Request) -> bool:
        """Whether there is time for a request without KV."""
        if not self.may_start(request):
            return False
        if self._settings.chunks_prompts and self._is_used_up(batch):
            return False
        if not request.spec.is_background:
            return True
        return self._background.tokens(batch, request, request.unplanned) > 0

    def spend(self, batch: "BatchBuilder", request: Request, num_tokens: int) -> None:
        """So many tokens of a background request will be added to the batch."""
        self._background.spend(batch, request, num_tokens)

    def _is_used_up(self, batch: "BatchBuilder") -> bool:
        """Whether the batch has no time left for another prompt."""
        return batch.is_cut and batch.has_prefills

    def _in_step_seconds(self, batch: "BatchBuilder", request: Request, num_tokens: int) -> int:
        """How many of a prompt's tokens fit into `max_step_seconds`: at least `MIN_PIECE` for the
        first prompt of an iteration; 0 once the time is used up."""
        bound = self._settings.max_step_seconds
        if bound == inf or num_tokens <= MIN_PIECE:
            return num_tokens
        if self._is_used_up(batch):
            return 0
        beside = batch.num_tokens + self._seat_bound.num_others(batch, request)
        if not beside:
            return num_tokens
        in_time = self._cost.tokens_within(bound, num_tokens, request.num_planned, beside)
        return max(MIN_PIECE, in_time)
