"""BatchPlanner: which requests are in the next iteration, and with how many tokens."""

from itertools import islice
from typing import TYPE_CHECKING

from engine.control.admission import CHUNK, Admission
from engine.control.bounds import SeatBound, TimeBound
from engine.request import Move, Request, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.control.admission import AdmissionControl
    from engine.control.batch_builder import BatchBuilder
    from engine.control.images import Images
    from engine.control.settings import SchedulerSettings
    from engine.cost.live import LiveCost
    from engine.kv.cache import KVCache
    from engine.pool import RequestPool

WAITING, READY, SWAPPED = State.WAITING, State.READY, State.SWAPPED  # bound once, for the hot
PLAN = Move.PLAN  # path (see engine.pool)


class BatchPlanner:
    """Fills a batch from the front of the policy's order until seats, tokens, time or KV are used
    up; admits waiting and swapped requests on the way."""

    def __init__(
        self,
        settings: "SchedulerSettings",
        pool: "RequestPool",
        kv: "KVCache",
        admission: "AdmissionControl",
        cost: "LiveCost",
        images: "Images",
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

    def plan(self, batch: "BatchBuilder", now: float) -> None:
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

    def _fill(self, batch: "BatchBuilder", now: float) -> None:
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

    def _started_behind(self, request: Request | None, now: float) -> "Iterator[Request]":
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

    def _take(self, batch: "BatchBuilder", request: Request, now: float) -> None:
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

    def _admit(self, batch: "BatchBuilder", request: Request, now: float) -> bool:
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

    def _waits(self, batch: "BatchBuilder", request: Request) -> bool:
        """Whether a request without KV waits for something else than seats, tokens or KV."""
        return request.found.awaits_lookup or batch.excludes(request)

    def _is_held(self, batch: "BatchBuilder", request: Request) -> bool:
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

    def _has_room(self, batch: "BatchBuilder", request: Request) -> bool:
        """Whether the batch has tokens and time for a request without KV, and so may have for those
        behind it."""
        return self._seats.has_room(batch, request) and self.time.has_room(batch, request)

    def _count_start(self, batch: "BatchBuilder", request: Request) -> None:
        """A request got its KV: it has overtaken those that did not fit."""
        self.time.started(request)
        for other in batch.not_admitted:
            other.setbacks.num_step_overs += 1
