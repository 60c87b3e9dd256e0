"""BatchPlanner: which requests are in the next iteration, and with how many tokens."""

from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from engine.control.admission import Admission
from engine.control.background_time import BackgroundTime
from engine.control.prefix_first import PrefixFirst
from engine.control.step_time import LEAST_PIECE, StepTime
from engine.request import Move, Request, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.control.admission import AdmissionControl
    from engine.control.batch_builder import BatchBuilder
    from engine.control.settings import SchedulerSettings
    from engine.control.swap_planner import SwapPlanner
    from engine.cost.live import LiveCost
    from engine.kv.manager import KVManager
    from engine.pool import RequestPool

WAITING, READY, SWAPPED = State.WAITING, State.READY, State.SWAPPED  # bound once, for the hot
PLAN = Move.PLAN  # path (see engine.pool)
CHUNK = 64  # started requests whose keys are compared at a time


class BatchPlanner:
    """Fills a batch from the front of the policy's order until seats, tokens, time or KV are used
    up; admits waiting and swapped requests on the way."""

    def __init__(
        self,
        settings: "SchedulerSettings",
        pool: "RequestPool",
        kv: "KVManager",
        admission: "AdmissionControl",
        swap_planner: "SwapPlanner",
        cost: "LiveCost",
    ) -> None:
        self._settings = settings
        self._takes_whole_batch = settings.admission is Admission.REQUEST
        self._pool = pool
        self._kv = kv
        self._unit = kv.block_size if kv.num_groups else 1  # slots that are reserved at once
        self._admission = admission
        self._swap_planner = swap_planner
        self._cost = cost
        self.step_time = StepTime(settings, pool, cost)
        window = settings.prefix_first
        self._prefix_first = PrefixFirst(window, kv.search) if window else None

    def plan(self, batch: "BatchBuilder", now: float) -> None:
        """Fill a batch. If it stays empty and requests wait until more of their prefixes is hashed,
        go on hashing."""
        self._admission.begin_plan()
        self._kv.search.begin_plan()
        self.step_time.begin_plan(now)
        self._fill(batch, now)
        while batch.is_empty and batch.is_deferred:
            batch.is_deferred = False
            batch.background = None
            self._kv.search.begin_plan()
            self._fill(batch, now)

    def _fill(self, batch: "BatchBuilder", now: float) -> None:
        """Take requests in the policy's order; when no more may be admitted, only started ones."""
        order = self._pool.policy.order(now)
        if self._prefix_first is not None:
            order = self._prefix_first.order(order)
        admits = not (self._takes_whole_batch and self._pool.num_admitted)
        request: Request | None = None
        ahead = batch.ahead
        while admits and batch.seats:
            request = next(order, None)
            if request is None:
                return
            if request.state is READY or request in ahead:
                self._take(batch, request, now)
            elif request.state is WAITING or request.state is SWAPPED:
                admits = self._admit(batch, request, now)
        if not batch.is_full and self._ready_left(batch):
            last = request if batch.num_skipped else None  # else all that are ready are behind it
            for other in self._started_behind(last, now):
                if not batch.seats:
                    return
                if other.state is READY or other in batch.ahead:
                    self._take(batch, other, now)

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
            num_tokens = self._num_tokens_now(batch, request, unplanned)
        elif not batch.tokens_left:
            num_tokens = 0
        if batch.ahead:
            batch.ahead.pop(request, None)
        if num_tokens > 0 and (
            num_tokens <= -num_planned % self._unit  # slots that are left in its last block
            or self._kv.reserve(request, num_planned + num_tokens)
            or self._admission.make_room_to_grow(request, num_planned + num_tokens, now)
        ):
            if batch.background is not None:
                beside = self._settings.max_batch_tokens - batch.tokens_left
                batch.background.spend(request, num_tokens, beside)
            batch.add(request, num_tokens, self._kv, is_last=num_tokens == unplanned)
            if num_tokens > 1:
                self._kv.search.note_prefill(request)
            self._pool.move(request, PLAN)
            return
        if request.state is READY:
            batch.num_skipped += 1
        if num_tokens > 0:
            batch.ahead.clear()

    def _num_tokens_now(self, batch: "BatchBuilder", request: Request, num_tokens: int) -> int:
        """How many of the request's `num_tokens` unplanned tokens fit into the batch; 0 if none."""
        if request.num_crashes and batch.excludes_suspect(request):
            return 0
        if num_tokens > 1 and self._settings.chunks_prompts:
            others = self._num_others(batch, request, self._ready_left(batch) - 1)
            num_tokens = min(num_tokens, batch.tokens_left - others)
            is_bounded = self._settings.max_step_seconds < inf and not request.is_suspect
            if num_tokens > LEAST_PIECE and is_bounded:  # suspects are not slowed down
                num_tokens = self._num_tokens_in_time(batch, request, num_tokens, others)
            if self.step_time.bounds_pieces and num_tokens > 0 and not request.is_suspect:
                in_time = self.step_time.piece(batch, request, num_tokens)
                batch.is_cut = batch.is_cut or in_time < num_tokens
                num_tokens = in_time
        if num_tokens > batch.tokens_left:
            return 0
        if request.spec.is_background:
            return self._num_background_tokens(batch, request, num_tokens)
        return num_tokens

    def _num_background_tokens(
        self, batch: "BatchBuilder", request: Request, num_tokens: int
    ) -> int:
        """How many of a background request's tokens the iteration has time for."""
        settings = self._settings
        if batch.background is None:  # all others are in the batch by now
            slowdown = settings.max_background_slowdown
            step = None if batch.is_empty else batch.iteration().step
            goal = self.step_time.goal(batch) / self._cost.margin
            batch.background = BackgroundTime(step, self._pool, self._cost, slowdown, goal)
        beside = settings.max_batch_tokens - batch.tokens_left
        in_time = batch.background.num_tokens(request, num_tokens, beside)
        return in_time if settings.chunks_prompts or in_time == num_tokens else 0

    def _num_tokens_in_time(
        self, batch: "BatchBuilder", request: Request, num_tokens: int, others: int
    ) -> int:
        """How many of a prompt's tokens fit into `max_step_seconds`: at least `LEAST_PIECE` for the
        first prompt of an iteration; 0 once the time is used up."""
        if batch.is_out_of_time:
            return 0
        beside = self._settings.max_batch_tokens - batch.tokens_left + others
        if not beside:
            return num_tokens
        bound, start = self._settings.max_step_seconds, request.num_planned
        in_time = max(LEAST_PIECE, self._cost.tokens_within(bound, num_tokens, start, beside))
        batch.is_cut = batch.is_cut or in_time < num_tokens
        return in_time

    def _ready_left(self, batch: "BatchBuilder") -> int:
        """Ready requests, and those that may be planned ahead, which were not considered yet."""
        return self._pool.count(READY) - batch.num_skipped + len(batch.ahead)

    def _num_others(self, batch: "BatchBuilder", request: Request, num_ready: int) -> int:
        """For how many of `num_ready` ready requests a prefill of `request` leaves a token: at most
        one per seat, and none for background requests unless it is one itself."""
        if self._pool.background and not request.spec.is_background:
            num_ready -= self._pool.num_background_ready
            num_ready -= sum(r.spec.is_background for r in batch.ahead)
        return min(num_ready, batch.seats - 1)

    def _is_used_up(self, batch: "BatchBuilder", request: Request) -> bool:
        """Whether the iteration has no tokens or no time for another request, nor for those behind
        it."""
        if self.step_time.has_goals and not self.step_time.may_start(request):
            return True
        if not self._settings.chunks_prompts:
            if batch.tokens_left < request.unplanned:
                return True
        else:
            others = self._num_others(batch, request, self._ready_left(batch))
            if batch.is_out_of_time or batch.tokens_left <= others:
                return True
        is_background = request.spec.is_background
        return is_background and not self._num_background_tokens(batch, request, request.unplanned)

    def _admit(self, batch: "BatchBuilder", request: Request, now: float) -> bool:
        """Start a request without device KV if it fits. Returns whether requests behind it may be
        admitted in this plan."""
        if request.awaits_lookup or (request.is_suspect and batch.excludes_suspect(request)):
            return True
        if self._swap_planner.may_wait(request, self._ready_left(batch) - batch.seats):
            return True
        whole_batch = self._takes_whole_batch
        if whole_batch and self._pool.num_admitted >= self._settings.max_batch_size:
            return False
        if not self._kv.search.find(request):
            batch.is_deferred = True
            return True
        if (
            not whole_batch
            and request.state is WAITING
            and self._kv.search.is_being_computed(request)
        ):
            return True
        if not whole_batch and self._is_used_up(batch, request):
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
        must_stop = any(other.num_step_overs >= bound for other in batch.not_admitted)
        return not must_stop and len(batch.not_admitted) < self._settings.scan_limit

    def _count_start(self, batch: "BatchBuilder", request: Request) -> None:
        """A request got its KV: it has overtaken those that did not fit."""
        self.step_time.started(request)
        if self._prefix_first is not None:
            self._prefix_first.started(request)
        for other in batch.not_admitted:
            other.num_step_overs += 1
