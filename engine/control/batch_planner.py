"""BatchPlanner: which requests are in the next iteration, and with how many tokens; and its bounds
beside KV: seats and tokens, and the seconds that an iteration may take.

Prefills leave a token for each decode. Prompts and background requests get a part of the seconds,
by three limits: `max_step_seconds`, for a chunk of a prompt beside other tokens; the ITL goal or
the prefill slowdown (`engine.control.step_time`); and the time that background requests may add
(`BackgroundTime`). Decodes of other requests are always taken.
"""

from collections.abc import Iterator
from itertools import islice
from math import inf

from engine.control.admission import CHUNK, Admission, AdmissionControl
from engine.control.batch_builder import BatchBuilder
from engine.control.images import Images
from engine.control.settings import SchedulerSettings
from engine.control.step_time import MIN_PIECE, StepTime
from engine.cost.live import LiveCost
from engine.kv.cache import KVCache
from engine.pool import RequestPool
from engine.request import Move, Request, State
from engine.step import StepId

WAITING, READY, SWAPPED = State.WAITING, State.READY, State.SWAPPED  # bound once, for the hot
PLAN = Move.PLAN  # path (see engine.pool)


class BatchPlanner:
    """Fills a batch from the front of the policy's order until seats, tokens, time or KV are used
    up; admits waiting and swapped requests on the way."""

    def __init__(
        self,
        settings: SchedulerSettings,
        pool: RequestPool,
        kv: KVCache,
        admission: AdmissionControl,
        cost: LiveCost,
        images: Images,
    ) -> None:
        self._settings = settings
        self._takes_whole_batch = settings.admission is Admission.REQUEST
        self._pool = pool
        self._kv = kv
        self._images = images
        self._unit = kv.block_size if kv.groups else 1  # slots that are reserved at once
        self._admission = admission
        self._seats = SeatBound(settings, pool)
        self.time = TimeBound(settings, pool, cost, self._seats)

    def begin(self, step_id: StepId, ahead: dict[Request, None]) -> BatchBuilder:
        """An empty batch, in which requests in flight may be planned `ahead`."""
        settings = self._settings
        batch = BatchBuilder(step_id, settings.max_batch_size, settings.max_batch_tokens, ahead)
        batch.images = self._images
        return batch

    def plan(self, batch: BatchBuilder, now: float) -> None:
        """Fill a batch. If it stays empty and requests wait until more of their prefixes is hashed,
        or have another place by now, go on."""
        self._admission.begin_plan()
        self._kv.search.begin_plan(now)
        self._images.begin_plan(now)
        self.time.begin_plan(now, self._images.slice_seconds)
        self._fill(batch, now)
        while batch.is_empty and (batch.is_deferred or batch.num_held):
            batch.is_deferred = batch.is_cut = False
            batch.num_held, batch.background_seconds = 0, None
            self._kv.search.begin_plan(now)
            self._fill(batch, now)

    def _fill(self, batch: BatchBuilder, now: float) -> None:
        """Take requests in the policy's order; when no more may be admitted, only started ones."""
        order = self._pool.policy.order(now)
        admits = not (self._takes_whole_batch and self._pool.num_admitted)
        request: Request | None = None
        ahead, take = batch.ahead, self._take
        while admits and batch.seats:
            request = next(order, None)
            if request is None:
                return
            if request.state is READY or request in ahead:
                take(batch, request, now)
            elif request.state is WAITING or request.state is SWAPPED:
                admits = self._admit(batch, request, now)
        if not batch.is_full and self._seats.num_ready(batch):
            last = request if batch.num_skipped else None  # else all that are ready are behind it
            for other in self._started_behind(last, now):
                if not batch.seats:
                    return
                if other.state is READY or other in batch.ahead:
                    take(batch, other, now)

    def _started_behind(self, request: Request | None, now: float) -> Iterator[Request]:
        """Started requests behind `request` in the policy's order (all if it is None).

        The order itself may have any number of waiting requests between them; those before
        `request` have been walked in this plan, so that they are few.
        """
        policy = self._pool.policy
        order = policy.started_order(self._pool.started, now)
        if request is None:
            yield from order
            return
        (key,) = policy.sort_keys([request], now)
        while chunk := [*islice(order, CHUNK)]:
            for other, own in zip(chunk, policy.sort_keys(chunk, now), strict=True):
                if own > key:
                    yield other

    def _take(self, batch: BatchBuilder, request: Request, now: float) -> None:
        """Add a started request to the batch, unless tokens or KV blocks lack.

        A prefill leaves a token for every other ready request, so that decodes go on. If KV blocks
        lack, no request is planned ahead any more: when those in flight return, they can be
        preempted.
        """
        spec, num_planned = request.spec, request.num_planned
        unplanned = len(spec.prompt) + len(request.output) + request.num_pending - num_planned
        num_tokens = unplanned
        if unplanned > 1 or request.num_crashes or spec.is_background:
            num_tokens = self._seats.tokens(batch, request, unplanned)
            num_tokens = self.time.tokens(batch, request, num_tokens)
        elif not batch.tokens_left:
            num_tokens = 0
        if spec.media and num_tokens:
            room = self._seats.room(batch, request)
            num_tokens = self._images.num_ready(request, num_planned, num_tokens, room)
        if batch.ahead:
            batch.ahead.pop(request, None)
        if num_tokens > 0 and (
            num_tokens <= -num_planned % self._unit  # slots that are left in its last block
            or self._kv.reserve(request, num_planned + num_tokens)
            or self._admission.make_room_to_grow(request, num_planned + num_tokens, now)
        ):
            if spec.is_background:
                self.time.spend(batch, request, num_tokens)
            batch.add(request, num_tokens, self._kv, is_last=num_tokens == unplanned)
            if num_tokens > 1:
                self._kv.search.note_prefill(request)
            self._pool.move(request, PLAN)
            return
        if request.state is READY:
            batch.num_skipped += 1
        if num_tokens > 0:
            batch.ahead.clear()

    def _admit(self, batch: BatchBuilder, request: Request, now: float) -> bool:
        """Start a request without device KV if it fits. Returns whether requests behind it may be
        admitted in this plan."""
        if self._waits(batch, request):
            return True
        whole_batch = self._takes_whole_batch
        if whole_batch and self._pool.num_admitted >= self._settings.max_batch_size:
            return False
        if not self._kv.search.find(request):
            batch.is_deferred = True
            return True
        if request.state is WAITING and self._is_held(batch, request):
            return batch.num_held < self._settings.scan_limit
        if request.spec.media and not self._has_image(request):
            return True
        if not whole_batch and not self._has_room(batch, request):
            return False
        if self._admission.admit(request, now):
            self._count_start(batch, request)
            self._take(batch, request, now)
            if request.state is READY:  # no tokens or no time are left for it
                self._kv.wait_for_moves(request)
        else:
            batch.not_admitted.append(request)
            if self._admission.may_preempt_to_start:
                batch.ahead.clear()  # when they return, they may be preempted for it
        bound = self._settings.max_step_overs
        must_stop = any(other.setbacks.num_step_overs >= bound for other in batch.not_admitted)
        return not must_stop and len(batch.not_admitted) < self._settings.scan_limit

    def _waits(self, batch: BatchBuilder, request: Request) -> bool:
        """Whether a request without KV waits for something else than seats, tokens or KV."""
        return request.found.awaits_lookup or batch.excludes(request)

    def _is_held(self, batch: BatchBuilder, request: Request) -> bool:
        """Whether a request of which it is known what is cached should not start yet: another one
        computes more of its prefix, or the policy has others before it."""
        if not self._takes_whole_batch and self._kv.search.is_being_computed(request):
            return True
        num_tokens = request.num_tokens - self._kv.search.num_known(request)
        if self._pool.policy.found(request, num_tokens):
            return False
        batch.num_held += 1
        return True

    def _has_image(self, request: Request) -> bool:
        """Whether the first image of which a request without KV computes tokens is encoded."""
        return self._images.may_start(request, self._kv.search.num_known(request))

    def _has_room(self, batch: BatchBuilder, request: Request) -> bool:
        """Whether the batch has tokens and time for a request without KV, and so may have for those
        behind it."""
        return self._seats.has_room(batch, request) and self.time.has_room(batch, request)

    def _count_start(self, batch: BatchBuilder, request: Request) -> None:
        """A request got its KV: it has overtaken those that did not fit."""
        self.time.started(request)
        for other in batch.not_admitted:
            other.setbacks.num_step_overs += 1


class SeatBound:
    """How many tokens of a request the seats and tokens of the batch allow."""

    def __init__(self, settings: SchedulerSettings, pool: RequestPool) -> None:
        self._chunks_prompts = settings.chunks_prompts
        self._pool = pool

    def tokens(self, batch: BatchBuilder, request: Request, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens of a started request fit; 0 if none."""
        if batch.excludes(request):
            return 0
        if num_tokens > 1 and self._chunks_prompts:
            num_tokens = min(num_tokens, self.room(batch, request))
        return max(0, num_tokens) if num_tokens <= batch.tokens_left else 0

    def room(self, batch: BatchBuilder, request: Request) -> int:
        """The tokens that are left for the prompt of a request beside the decodes."""
        return batch.tokens_left - self.num_others(batch, request)

    def has_room(self, batch: BatchBuilder, request: Request) -> bool:
        """Whether a request without KV could be in the batch."""
        needed = self.num_others(batch, request) + 1 if self._chunks_prompts else request.unplanned
        return batch.tokens_left >= needed

    def num_ready(self, batch: BatchBuilder) -> int:
        """Ready requests, and those that may be planned ahead, which were not considered yet."""
        return self._pool.count(READY) - batch.num_skipped + len(batch.ahead)

    def num_others(self, batch: BatchBuilder, request: Request) -> int:
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
        self, settings: SchedulerSettings, pool: RequestPool, cost: LiveCost, step_time: StepTime
    ) -> None:
        self._slowdown = settings.max_background_slowdown
        self._chunks_prompts = settings.chunks_prompts
        self._pool = pool
        self._cost = cost
        self._step_time = step_time

    def tokens(self, batch: BatchBuilder, request: Request, num_tokens: int) -> int:
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

    def spend(self, batch: BatchBuilder, request: Request, num_tokens: int) -> None:
        """So many of its tokens will be added to the batch."""
        if batch.background_seconds is not None and batch.background_seconds < inf:
            added = self._cost.model.added(num_tokens, request.num_planned, batch.num_tokens)
            batch.background_seconds -= added

    def _all_seconds(self, batch: BatchBuilder) -> float:
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
        self, settings: SchedulerSettings, pool: RequestPool, cost: LiveCost, seats: SeatBound
    ) -> None:
        super().__init__(settings, pool, cost)
        self._settings = settings
        self._seat_bound = seats
        self._background = BackgroundTime(settings, pool, cost, self)

    def tokens(self, batch: BatchBuilder, request: Request, num_tokens: int) -> int:
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

    def has_room(self, batch: BatchBuilder, request: Request) -> bool:
        """Whether there is time for a request without KV."""
        if not self.may_start(request):
            return False
        if self._settings.chunks_prompts and self._is_used_up(batch):
            return False
        if not request.spec.is_background:
            return True
        return self._background.tokens(batch, request, request.unplanned) > 0

    def spend(self, batch: BatchBuilder, request: Request, num_tokens: int) -> None:
        """So many tokens of a background request will be added to the batch."""
        self._background.spend(batch, request, num_tokens)

    def _is_used_up(self, batch: BatchBuilder) -> bool:
        """Whether the batch has no time left for another prompt."""
        return batch.is_cut and batch.has_prefills

    def _in_step_seconds(self, batch: BatchBuilder, request: Request, num_tokens: int) -> int:
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
