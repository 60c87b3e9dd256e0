"""IterationScheduler: add, plan, commit, cancel. Plain functions; `now` is an argument.

Orca's algorithm 1 with three changes. Prompts are computed in chunks beside the decodes. A request
that does not fit is stepped over, but only `max_step_overs` times; after that no request behind it
is admitted before it. And KV may grow block by block, with preemption when blocks run short (see
`engine.control.admission`).
"""

from dataclasses import dataclass
from itertools import repeat
from math import inf
from typing import TYPE_CHECKING

from engine.control.admission import Admission, AdmissionControl, AdmissionSettings, SwapMode
from engine.control.background_time import BackgroundTime
from engine.control.batch_builder import BatchBuilder
from engine.control.lifecycle import Lifecycle
from engine.control.swap_planner import SwapPlanner
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.errors import (
    ContextTooLong,
    EngineError,
    InvalidRequest,
    NoAllowedToken,
    Overloaded,
    RowFailed,
)
from engine.events import NullObserver, Observer
from engine.iteration import Delivery, Iteration
from engine.kv.manager import KVManager
from engine.pool import RequestPool
from engine.request import Abort, FinishReason, Move, Request, RequestSpec, State
from engine.step import RequestId, StepId

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from engine.kv.ledger import KVLedger
    from engine.policy.port import Policy
    from engine.step import Fault, StepResult


WAITING, READY, SWAPPED = State.WAITING, State.READY, State.SWAPPED  # bound once, for the hot
LEAVING, PLAN, COMMIT = State.LEAVING, Move.PLAN, Move.COMMIT  # path (see engine.pool)
LEAST_PIECE = 16  # tokens of a prompt's chunk, even if there is less time
UNMEASURED = CostModel.linear(per_step=0.01, per_token=0.001, per_slot=1e-7)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Bounds of an iteration, of the queue, and of unfairness. Seconds and tokens."""

    max_model_len: int
    max_batch_size: int = 64
    max_batch_tokens: int = 512
    admission: Admission = Admission.GROW
    max_queue_requests: int = 2048
    max_queue_tokens: int = 1 << 20
    max_step_overs: int = 64
    max_preemptions: int = 3
    swap: SwapMode = SwapMode.PROACTIVE  # with a host tier only
    max_crashes: int = 3
    reuses_prefixes: bool = True
    scan_limit: int = 16  # waiting requests that are tried per plan and do not fit
    max_step_seconds: float = inf  # of an iteration with decodes and a chunk of a prompt
    max_background_slowdown: float = inf  # factor on an iteration with others

    def __post_init__(self) -> None:
        assert self.max_batch_tokens >= self.max_batch_size, (
            "max_batch_tokens is at least max_batch_size"
        )


class IterationScheduler:
    """Plans which requests run in the next iteration, and applies its result to them."""

    def __init__(
        self,
        settings: SchedulerSettings,
        ledger: "KVLedger",
        policy: "Policy",
        observer: Observer | None = None,
        cost: LiveCost | None = None,
    ) -> None:
        self.settings = settings
        self.pool = RequestPool(policy)
        self.cost = cost or LiveCost(UNMEASURED)
        self._observer = observer = observer or NullObserver()
        self.kv = KVManager(ledger, self.pool, observer, reuses_prefixes=settings.reuses_prefixes)
        swap = settings.swap if ledger.host.num_blocks else SwapMode.OFF
        terms = AdmissionSettings(settings.admission, settings.max_preemptions, swap)
        self.admission = AdmissionControl(terms, self.kv, self.pool, observer)
        self._swap_planner = SwapPlanner(
            terms, self.kv, self.pool, self.admission, settings.max_batch_size
        )
        self._lifecycle = Lifecycle(self.kv, self.pool, observer, settings.max_crashes)
        self._next_request_id = 0
        self._next_step_id = 0

    def __repr__(self) -> str:
        return f"IterationScheduler({self.pool!r}, {self.ledger!r})"

    @property
    def ledger(self) -> "KVLedger":
        """The KV blocks, for metrics and checks."""
        return self.kv.ledger

    @property
    def policy(self) -> "Policy":
        """The policy in force."""
        return self.pool.policy

    @property
    def num_committed(self) -> int:
        """Iterations that returned so far, failed ones included."""
        return self._lifecycle.num_committed

    # Arrivals

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise `ContextTooLong` if so many tokens exceed the context or the KV cache."""
        limit = self.settings.max_model_len
        if prompt_len + max_tokens > limit:
            raise ContextTooLong(prompt_len, max_tokens, limit, "maximum context length")
        if prompt_len + max_tokens - 1 > self.ledger.num_slots:
            raise ContextTooLong(prompt_len, max_tokens, self.ledger.num_slots, "KV cache size")

    def check_group(self, prompt_lens: "Sequence[int]") -> None:
        """Raise `InvalidRequest` if the queue can never hold requests with prompts of these lengths
        at once."""
        num_requests, num_tokens = len(prompt_lens), sum(prompt_lens)
        bound, tokens = self.settings.max_queue_requests, self.settings.max_queue_tokens
        if num_requests > bound or (num_requests > 1 and num_tokens > tokens):
            raise InvalidRequest(
                f"The request has {num_requests} choices with {num_tokens} prompt tokens in "
                f"all; the queue holds at most {bound} requests and {tokens} tokens."
            )

    def add(self, spec: RequestSpec, now: float) -> Request:
        """Accept a request. Raises `ContextTooLong`, `Overloaded`, or, if it cannot meet its
        deadline, `DeadlineUnmeetable` or `InvalidRequest`; then nothing is changed."""
        assert spec.prompt, "a prompt has at least one token"
        assert spec.max_tokens > 0, "max_tokens is at least 1"
        self.check_fits(len(spec.prompt), spec.max_tokens)
        self._check_queue(len(spec.prompt))
        request = Request(RequestId(self._next_request_id), spec, arrived_at=now)
        has_deadline = spec.ttft_deadline is not None or spec.deadline is not None
        num_tokens = self.kv.num_to_compute(request) if has_deadline else len(spec.prompt)
        self.policy.validate(spec, num_tokens, now)
        self._next_request_id += 1
        self.pool.add(request)
        self.policy.arrive(request, now)
        self._swap_planner.arrive(request)
        self._observer.arrived(request, now)
        return request

    def _check_queue(self, prompt_len: int) -> None:
        waiting = self.pool.count(WAITING) - self.pool.num_background_waiting
        tokens = self.pool.waiting_tokens - self.pool.background_waiting_tokens
        too_many = waiting >= self.settings.max_queue_requests
        if too_many or (waiting and tokens + prompt_len > self.settings.max_queue_tokens):
            raise Overloaded(
                f"The queue is full: {waiting} requests with {tokens} tokens are waiting.",
                retry_after=self.cost.seconds_for(tokens),
            )

    def switch(self, policy: "Policy", now: float) -> None:
        """Continue under another policy, which is empty; no request is lost or restarted."""
        for request in self.pool:
            policy.arrive(request, now)
        self.pool.policy = policy
        self._observer.switched(policy, now)

    # Planning

    def plan(self, now: float, oldest: Iteration | None = None) -> Iteration | None:
        """The next iteration, with its KV reserved and its requests running; None if no request
        can run.

        With lookahead, requests of the `oldest` iteration in flight may be planned again, unless
        the token being sampled is known to be their last. For them the worker continues with the
        token that it samples in that iteration.
        """
        ahead = {r for r in oldest.requests if _may_go_ahead(r)} if oldest is not None else set()
        settings = self.settings
        batch = BatchBuilder(
            StepId(self._next_step_id), settings.max_batch_size, settings.max_batch_tokens, ahead
        )
        batch.has_suspect = self._lifecycle.has_suspect_in_flight
        batch.least_crashes = self._lifecycle.least_crashes
        self.admission.begin_plan()
        self.kv.begin_plan()
        self._fill(batch, now)
        while batch.is_empty and batch.is_deferred:  # only requests whose prefix is looked for
            batch.is_deferred = False
            batch.background = None
            self.kv.begin_plan()
            self._fill(batch, now)
        if not batch.is_empty:
            self._swap_planner.order_moves(now)
        swaps = self.kv.collect_swaps()
        if batch.is_empty:
            assert not swaps.moves, "KV is swapped by an iteration without entries"
            if self.pool:
                self._observer.idled(now)
            return None
        iteration = batch.iteration(swaps)
        self._next_step_id += 1
        self._observer.planned(iteration, now)
        return iteration

    def _fill(self, batch: BatchBuilder, now: float) -> None:
        """Take requests in the policy's order; when no more may be admitted, only started ones."""
        order = self.policy.order(now)
        whole_batch = self.settings.admission is Admission.REQUEST
        admits = not (whole_batch and self.pool.num_admitted)
        request: Request | None = None
        while admits and not batch.is_full:
            request = next(order, None)
            if request is None:
                return
            if request.state is READY or request in batch.ahead:
                self._take(batch, request, now)
            elif request.state is WAITING or request.state is SWAPPED:
                admits = self._admit(batch, request, now)
        if not batch.is_full and self._ready_left(batch):
            for other in self._started_behind(request, now):
                if batch.is_full:
                    return
                if other.state is READY or other in batch.ahead:
                    self._take(batch, other, now)

    def _started_behind(self, request: Request | None, now: float) -> list[Request]:
        """Started requests behind `request` in the policy's order (all if it is None), sorted.

        The order itself may have any number of waiting requests between them.
        """
        started = [*self.pool.started]
        keys = dict(zip(started, self.policy.sort_keys(started, now), strict=True))
        if request is not None:
            (key,) = self.policy.sort_keys([request], now)
            started = [other for other in started if keys[other] > key]
        return sorted(started, key=keys.__getitem__)

    def _take(self, batch: BatchBuilder, request: Request, now: float) -> None:
        """Add a started request to the batch, unless tokens or KV blocks lack.

        A prefill leaves a token for every other ready request, so that decodes go on. If KV blocks
        lack, no request is planned ahead any more: when those in flight return, they can be
        preempted.
        """
        unplanned = request.unplanned
        num_tokens = self._num_tokens_now(batch, request, unplanned)
        if batch.ahead:
            batch.ahead.discard(request)
        slots = request.num_planned + num_tokens
        if num_tokens > 0 and self.admission.secure(request, slots, now):
            if batch.background is not None:
                beside = self.settings.max_batch_tokens - batch.tokens_left
                batch.background.spend(request, num_tokens, beside)
            batch.add(request, num_tokens, self.kv, is_last=num_tokens == unplanned)
            if num_tokens > 1:
                self.kv.note_prefill(request)
            self.pool.move(request, PLAN)
            return
        if request.state is READY:
            batch.num_skipped += 1
        if num_tokens > 0:
            batch.ahead.clear()

    def _num_tokens_now(self, batch: BatchBuilder, request: Request, num_tokens: int) -> int:
        """How many of the request's `num_tokens` unplanned tokens fit into the batch; 0 if none."""
        if request.num_crashes and batch.excludes_suspect(request):
            return 0
        if num_tokens > 1:
            others = self._num_others(batch, request, self._ready_left(batch) - 1)
            num_tokens = min(num_tokens, batch.tokens_left - others)
            is_bounded = self.settings.max_step_seconds < inf and not request.is_suspect
            if num_tokens > LEAST_PIECE and is_bounded:  # suspects are not slowed down
                num_tokens = self._num_tokens_in_time(batch, request, num_tokens, others)
        if num_tokens > batch.tokens_left:
            return 0
        if request.spec.is_background:
            return self._num_background_tokens(batch, request, num_tokens)
        return num_tokens

    def _num_background_tokens(self, batch: BatchBuilder, request: Request, num_tokens: int) -> int:
        """How many of a background request's tokens the iteration has time for."""
        settings = self.settings
        if batch.background is None:  # all others are in the batch by now
            slowdown = settings.max_background_slowdown
            batch.background = BackgroundTime(batch, self.pool, self.cost, slowdown)
        beside = settings.max_batch_tokens - batch.tokens_left
        return batch.background.num_tokens(request, num_tokens, beside)

    def _num_tokens_in_time(
        self, batch: BatchBuilder, request: Request, num_tokens: int, others: int
    ) -> int:
        """How many of a prompt's tokens fit into `max_step_seconds`: at least `LEAST_PIECE` for the
        first prompt of an iteration; 0 once the time is used up."""
        if batch.is_out_of_time:
            return 0
        beside = self.settings.max_batch_tokens - batch.tokens_left + others
        if not beside:
            return num_tokens
        bound, start = self.settings.max_step_seconds, request.num_planned
        in_time = max(LEAST_PIECE, self.cost.tokens_within(bound, num_tokens, start, beside))
        batch.is_cut = batch.is_cut or in_time < num_tokens
        return in_time

    def _ready_left(self, batch: BatchBuilder) -> int:
        """Ready requests, and those that may be planned ahead, which were not considered yet."""
        return self.pool.count(READY) - batch.num_skipped + len(batch.ahead)

    def _num_others(self, batch: BatchBuilder, request: Request, num_ready: int) -> int:
        """For how many of `num_ready` ready requests a prefill of `request` leaves a token: at most
        one per seat, and none for background requests unless it is one itself."""
        if self.pool.background and not request.spec.is_background:
            num_ready -= self.pool.num_background_ready
            num_ready -= sum(r.spec.is_background for r in batch.ahead)
        return min(num_ready, batch.seats - 1)

    def _is_used_up(self, batch: BatchBuilder, request: Request) -> bool:
        """Whether the iteration has no tokens or no time for another request, nor for those behind
        it."""
        others = self._num_others(batch, request, self._ready_left(batch))
        if batch.is_out_of_time or batch.tokens_left <= others:
            return True
        is_background = request.spec.is_background
        return is_background and not self._num_background_tokens(batch, request, request.unplanned)

    def _admit(self, batch: BatchBuilder, request: Request, now: float) -> bool:
        """Start a request without device KV if it fits. Returns whether requests behind it may be
        admitted in this plan."""
        if request.is_suspect and batch.excludes_suspect(request):
            return True
        if self._swap_planner.may_wait(request, self._ready_left(batch) - batch.seats):
            return True
        whole_batch = self.settings.admission is Admission.REQUEST
        if whole_batch and self.pool.num_admitted >= self.settings.max_batch_size:
            return False
        if not self.kv.find_prefix(request):
            batch.is_deferred = True
            return True
        if not whole_batch and request.state is WAITING and self.kv.is_being_computed(request):
            return True
        if not whole_batch and self._is_used_up(batch, request):
            return False
        if self.admission.admit(request, now):
            for other in batch.not_admitted:
                other.num_step_overs += 1
            self._take(batch, request, now)
        else:
            batch.not_admitted.append(request)
            if self.admission.may_preempt_to_start:
                batch.ahead.clear()  # when they return, they may be preempted for it
        bound = self.settings.max_step_overs
        must_stop = any(other.num_step_overs >= bound for other in batch.not_admitted)
        return not must_stop and len(batch.not_admitted) < self.settings.scan_limit

    # Results

    def commit(self, iteration: Iteration, result: "StepResult", now: float) -> list[Delivery]:
        """Apply the result of an iteration; returns the tokens of requests that are not leaving.

        A request with a fault fails, and is returned without a token. A late request computes the
        last of its tokens again in a later iteration.
        """
        tokens = iter(result.tokens)
        logprobs = iter(result.logprobs or repeat(None))
        without_token = iteration.rows_without_token(result)
        deliveries: list[Delivery] = []
        count, publish, seconds = self.policy.ran, self.kv.publish, result.seconds
        self._lifecycle.num_committed += 1
        if iteration.step.moves or result.prompt_logprobs:
            self._apply_extras(iteration, result, now)
        for entry, request in zip(iteration.step.entries, iteration.requests, strict=True):
            token = scores = None
            if entry.sample is not None:
                token, scores = next(tokens), next(logprobs)
            request.num_in_flight -= 1
            if request.state is LEAVING:
                self._lifecycle.iteration_returned(request, now)
                continue
            if without_token and (fault := without_token.get(request)):
                self._lifecycle.fail(request, _error_of(fault), now)
                deliveries.append(Delivery(request, None))
                continue
            num_tokens = len(entry.tokens)
            request.num_computed = entry.start + num_tokens
            count(request, num_tokens, seconds, now)
            if without_token and request in without_token:
                request.reset_to(request.num_computed - 1)
                request.was_late()
            elif token is not None:
                self._produce(request, token, now)
                deliveries.append(Delivery(request, token, scores))
            publish(request, entry.start)
            if request.finish is not None:
                self._lifecycle.leave(request, now)
            elif not request.num_in_flight:
                self.pool.move(request, COMMIT)
        self.cost.observe(iteration.step, result.seconds)
        self._observer.committed(iteration, result.seconds, now)
        return deliveries

    def _apply_extras(self, iteration: Iteration, result: "StepResult", now: float) -> None:
        """Apply what few iterations have: KV moves and log-probabilities of prompts."""
        for leaving in self.kv.finish_swaps(iteration):
            self._lifecycle.iteration_returned(leaving, now)
        if result.prompt_logprobs:
            for request, scores in zip(iteration.requests, result.prompt_logprobs, strict=True):
                request.prompt_logprobs += scores

    def _produce(self, request: Request, token: int, now: float) -> None:
        request.output.append(token)
        request.num_pending -= 1
        if request.num_crashes:
            self._lifecycle.clear(request)
        request.last_token_at = now
        if request.first_token_at is None:
            request.first_token_at = now
        if token in request.spec.end_ids:
            request.finish = FinishReason.STOP
        elif len(request.output) == request.spec.max_tokens:
            request.finish = FinishReason.LENGTH

    def fail(self, iteration: Iteration, error: EngineError, now: float) -> list[Request]:
        """An iteration raised an error: its requests fail. Returns them."""
        self._observer.failed(iteration, now)
        self._lifecycle.num_committed += 1
        for leaving in self.kv.abandon_swaps(iteration):
            self._lifecycle.iteration_returned(leaving, now)
        for request in iteration.requests:
            request.num_in_flight -= 1
            self._lifecycle.fail(request, error, now)
        return list(iteration.requests)

    # Ends from outside

    def fail_all(self, error: EngineError, now: float) -> list[Request]:
        """End all requests with an error, because none can be served any more. Returns them."""
        return self._lifecycle.fail_all(error, now)

    def lose_device(self, in_flight: "Collection[Iteration]", now: float) -> list[Request]:
        """A worker died: all KV is lost, and the iterations in flight will not return. Returns the
        requests that ended (`Lifecycle.lose_device`); all others wait to be recomputed."""
        return self._lifecycle.lose_device(in_flight, now)

    def cancel(self, request: Request, reason: Abort, now: float) -> None:
        """End a request; its KV is freed now, or when its last iteration returns."""
        self._lifecycle.cancel(request, reason, now)

    def expire(self, now: float) -> list[Request]:
        """End the requests whose deadline has passed; those in flight end at their commit. Returns
        them."""
        return self._lifecycle.expire(now)


def _may_go_ahead(request: Request) -> bool:
    """Whether a request in flight can be planned again: it has a next token, as far as is known."""
    is_once = request.state is State.RUNNING and request.num_in_flight == 1
    if request.num_pending and request.may_be_late(request.produced + request.num_pending - 1):
        return False
    return is_once and request.produced + request.num_pending < request.spec.max_tokens


def _error_of(fault: "Fault") -> EngineError:
    return NoAllowedToken(fault.message) if fault.is_caller_error else RowFailed(fault.message)
