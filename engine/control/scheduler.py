"""IterationScheduler: add, plan, commit, cancel. Plain functions; time is given, nobody waits.

Orca's algorithm 1 with three changes. Prompts are computed in chunks beside the decodes. A
request that does not fit is stepped over, but only `max_step_overs` times: then slots are kept
for it. And KV may grow block by block: when it runs short the policy's last request gives its
blocks up, to the host tier or to be recomputed later. One that was preempted too often comes back
with all the slots that it may ever need, so preemptions are bounded and nobody deadlocks.
"""

from dataclasses import dataclass
from itertools import repeat
from math import inf
from typing import TYPE_CHECKING

from engine.control.admission import Admission, AdmissionControl, AdmissionSettings, SwapMode
from engine.control.batch_builder import BatchBuilder
from engine.control.lifecycle import Lifecycle
from engine.control.pool import RequestPool
from engine.cost.model import CostModel, LiveCost
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
from engine.kv.swap_planner import SwapPlanner
from engine.request import Abort, FinishReason, Move, Request, RequestSpec, State
from engine.step import RequestId, StepId

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from engine.kv.ledger import KVLedger
    from engine.ports import Policy
    from engine.step import Fault, StepResult


WAITING, READY, SWAPPED = State.WAITING, State.READY, State.SWAPPED  # bound once, for the hot
LEAVING, PLAN, COMMIT = State.LEAVING, Move.PLAN, Move.COMMIT  # path (see pool)
LEAST_PIECE = 16  # of a prompt, however little time there is for it
UNMEASURED = CostModel.linear(per_step=0.01, per_token=0.001, per_slot=1e-7)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Bounds of an iteration, of the queue, and of unfairness."""

    max_model_len: int
    max_batch_size: int = 64
    max_batch_tokens: int = 512
    admission: Admission = Admission.GROW
    max_queue_requests: int = 2048
    max_queue_tokens: int = 1 << 20
    max_step_overs: int = 64
    max_preemptions: int = 3
    swap: SwapMode = SwapMode.PROACTIVE  # with a host tier only
    max_swaps: int = 16
    max_crashes: int = 3
    reuses_prefixes: bool = True
    scan_limit: int = 16  # waiting requests that may be found not to fit, per plan
    max_step_seconds: float = inf  # of an iteration in which somebody waits for a prompt's piece

    def __post_init__(self) -> None:
        assert self.max_batch_tokens >= self.max_batch_size, "every seat needs room for a token"


class IterationScheduler:
    """Decides who runs in the next iteration, and what its result means."""

    def __init__(
        self,
        settings: SchedulerSettings,
        ledger: "KVLedger",
        policy: "Policy",
        observer: Observer | None = None,
        cost: LiveCost | None = None,
    ) -> None:
        self.settings = settings
        self.ledger = ledger
        self.policy = policy
        self.pool = RequestPool()
        self.cost = cost or LiveCost(UNMEASURED)
        self._observer = observer or NullObserver()
        swap = settings.swap if ledger.host.num_blocks else SwapMode.OFF
        most = (settings.max_preemptions, settings.max_swaps)
        terms = AdmissionSettings(settings.admission, *most, settings.reuses_prefixes, swap)
        self.memory = AdmissionControl(terms, ledger, self.pool, policy, self._observer)
        self.swap = SwapPlanner(terms, ledger, self.pool, self.memory, settings.max_batch_size)
        self.endings = Lifecycle(
            ledger, self.pool, self.memory, self._observer, settings.max_crashes
        )
        self._next_request_id = 0
        self._next_step_id = 0

    def __repr__(self) -> str:
        return f"IterationScheduler({self.pool!r}, {self.ledger!r})"

    @property
    def num_committed(self) -> int:
        """Iterations that came back so far."""
        return self.endings.num_committed

    # Arrivals

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise `ContextTooLong` if so many tokens can never be served."""
        limit = self.settings.max_model_len
        if prompt_len + max_tokens > limit:
            raise ContextTooLong(prompt_len, max_tokens, limit, "maximum context length")
        if prompt_len + max_tokens - 1 > self.ledger.num_slots:
            raise ContextTooLong(prompt_len, max_tokens, self.ledger.num_slots, "KV cache size")

    def check_group(self, prompt_lens: "Sequence[int]") -> None:
        """Raise `InvalidRequest` if requests with such prompts can never all wait at once."""
        num_requests, num_tokens = len(prompt_lens), sum(prompt_lens)
        bound, tokens = self.settings.max_queue_requests, self.settings.max_queue_tokens
        if num_requests > bound or (num_requests > 1 and num_tokens > tokens):
            raise InvalidRequest(
                f"It asks for {num_requests} answers at once, to {num_tokens} tokens of prompts "
                f"in all; {bound} answers and {tokens} tokens can wait here."
            )

    def add(self, spec: RequestSpec, now: float) -> Request:
        """Accept a request, or raise `ContextTooLong`, `Overloaded` or, if it would be late,
        `DeadlineUnmeetable` or `InvalidRequest`, and change nothing."""
        assert spec.prompt, "a prompt has at least one token"
        assert spec.max_tokens > 0, "an answer has at least one token"
        self.check_fits(len(spec.prompt), spec.max_tokens)
        self._check_queue(len(spec.prompt))
        request = Request(RequestId(self._next_request_id), spec, arrived_at=now)
        self.memory.arrive(request)
        self.policy.validate(spec, self.memory.num_to_compute(request), now)
        self._next_request_id += 1
        self.pool.add(request)
        self.policy.arrive(request, now)
        self.swap.arrive(request)
        self._observer.arrived(request, now)
        return request

    def _check_queue(self, prompt_len: int) -> None:
        idle = [request for request in self.pool.background if request.state is WAITING]
        waiting = self.pool.count(WAITING) - len(idle)
        tokens = self.pool.waiting_tokens - sum(request.num_tokens for request in idle)
        too_many = waiting >= self.settings.max_queue_requests
        if too_many or (waiting and tokens + prompt_len > self.settings.max_queue_tokens):
            raise Overloaded(
                f"The server is full: {waiting} requests with {tokens} tokens are waiting.",
                retry_after=self.cost.seconds_for(tokens),
            )

    def switch(self, policy: "Policy", now: float) -> None:
        """Go on under another policy, one with nobody in it; no request is lost or restarted."""
        for request in self.pool:
            policy.arrive(request, now)
        self.policy = self.memory.policy = policy
        self._observer.switched(policy, now)

    # Planning

    def plan(self, now: float, oldest: Iteration | None = None) -> Iteration | None:
        """The next iteration, its KV reserved and its requests running; None if there is none.

        With lookahead, requests of the `oldest` iteration in flight may be in it: for them the
        worker goes on from the token that it samples there, unless that is known to be the last.
        """
        ahead = {r for r in oldest.requests if _may_go_ahead(r)} if oldest is not None else set()
        draft = BatchBuilder(self.settings.max_batch_size, self.settings.max_batch_tokens, ahead)
        draft.has_suspect = self.endings.has_suspect_in_flight
        draft.least_crashes = self.endings.least_crashes
        self.memory.begin()
        self._fill(draft, now)
        if not draft.is_empty:
            self.swap.look_ahead(now)
        swaps = self.memory.tiers.collect()
        if draft.is_empty:
            assert not swaps.moves, "KV moves for somebody, and nobody runs"
            if self.pool:
                self._observer.idled(now)
            return None
        iteration = draft.iteration(StepId(self._next_step_id), swaps)
        self._next_step_id += 1
        self._observer.planned(iteration, now)
        return iteration

    def _fill(self, draft: BatchBuilder, now: float) -> None:
        """From the front of the order; once nobody more may start, only those who have."""
        order = self.policy.order(now)
        whole_batch = self.settings.admission is Admission.REQUEST
        admits = not (whole_batch and self.pool.num_admitted)
        while admits and not draft.is_full:
            request = next(order, None)
            if request is None:
                return
            if request.state is READY or request in draft.ahead:
                self._take(draft, request, now)
            elif request.state is WAITING or request.state is SWAPPED:
                admits = self._admit(draft, request, now)
        while not draft.is_full and self._ready_left(draft):
            request = next((r for r in order if r.state is READY or r in draft.ahead), None)
            if request is None:
                return
            self._take(draft, request, now)

    def _take(self, draft: BatchBuilder, request: Request, now: float) -> None:
        """Put a request into the draft, unless tokens or KV do not allow it now.

        A prefill leaves a token for every other ready request: decodes come first. Where KV is
        short nobody behind goes ahead, so that all of them can soon be preempted.
        """
        unplanned = request.unplanned
        num_tokens = self._num_tokens_now(draft, request, unplanned)
        if draft.ahead:
            draft.ahead.discard(request)
        slots = request.num_planned + num_tokens
        if num_tokens > 0 and self.memory.secure(request, slots, now):
            draft.add(request, num_tokens, self.ledger, is_last=num_tokens == unplanned)
            self.pool.move(request, PLAN)
            return
        if request.state is READY:
            draft.num_skipped += 1
        if num_tokens > 0:
            draft.ahead.clear()

    def _num_tokens_now(self, draft: BatchBuilder, request: Request, num_tokens: int) -> int:
        """How many of its `num_tokens` unplanned tokens the draft has room for; 0: it waits."""
        if request.num_crashes and draft.keeps_apart(request):
            return 0
        if num_tokens > 1:
            others = self._num_others(draft, request, self._ready_left(draft) - 1)
            num_tokens = min(num_tokens, draft.tokens_left - others)
            is_bounded = self.settings.max_step_seconds < inf and not request.is_suspect
            if num_tokens > LEAST_PIECE and is_bounded:  # a suspect is to be cleared soon
                num_tokens = self._num_tokens_in_time(draft, request, num_tokens, others)
        return num_tokens if num_tokens <= draft.tokens_left else 0

    def _num_tokens_in_time(
        self, draft: BatchBuilder, request: Request, num_tokens: int, others: int
    ) -> int:
        """As many of a prompt's tokens as do not keep others waiting for too long; some for one
        prompt in each iteration, and once there is no time left, none for others."""
        if draft.is_late:
            return 0
        beside = self.settings.max_batch_tokens - draft.tokens_left + others
        if not beside:
            return num_tokens
        bound, start = self.settings.max_step_seconds, request.num_planned
        in_time = max(LEAST_PIECE, self.cost.tokens_within(bound, num_tokens, start, beside))
        draft.is_cut = draft.is_cut or in_time < num_tokens
        return in_time

    def _ready_left(self, draft: BatchBuilder) -> int:
        """Requests that the draft may take and has not looked at."""
        return self.pool.count(READY) - draft.num_skipped + len(draft.ahead)

    def _num_others(self, draft: BatchBuilder, request: Request, num_ready: int) -> int:
        """How many of so many ready requests `request` has to leave a token: no more than have
        seats, and none in the background if it is not there itself."""
        if self.pool.background and not request.spec.is_background:
            left = draft.ahead
            num_ready -= sum(r.state is READY or r in left for r in self.pool.background)
        return min(num_ready, draft.seats - 1)

    def _admit(self, draft: BatchBuilder, request: Request, now: float) -> bool:
        """Start a request without KV here if it fits; whether others behind it may be looked at."""
        if request.is_suspect and draft.keeps_apart(request):
            return True
        if self.swap.may_wait(request, self._ready_left(draft) - draft.seats):
            return True
        whole_batch = self.settings.admission is Admission.REQUEST
        if whole_batch and self.pool.num_admitted >= self.settings.max_batch_size:
            return False
        others = self._num_others(draft, request, self._ready_left(draft))
        if not whole_batch and (draft.is_late or draft.tokens_left <= others):
            return False
        if self.memory.admit(request, now):
            for other in draft.passed:
                other.num_step_overs += 1
            self._take(draft, request, now)
        else:
            draft.passed.append(request)
            if self.policy.preempts or self.pool.background:
                draft.ahead.clear()  # they come back, and may be preempted for it
        bound = self.settings.max_step_overs
        is_kept = any(other.num_step_overs >= bound for other in draft.passed)
        return not is_kept and len(draft.passed) < self.settings.scan_limit

    # Results

    def commit(self, iteration: Iteration, result: "StepResult", now: float) -> list[Delivery]:
        """Count what an iteration computed; the tokens for requests that still want them.

        Who has a fault fails, and is among them without a token. Who is late computes the last
        of its tokens again.
        """
        tokens = iter(result.tokens)
        logprobs = iter(result.logprobs or repeat(None))
        strays = iteration.strays(result)
        deliveries: list[Delivery] = []
        count, publish, seconds = self.policy.ran, self.memory.publish, result.seconds
        self.endings.num_committed += 1
        if iteration.step.moves or result.prompt_logprobs:
            self._settle(iteration, result, now)
        for entry, request in zip(iteration.step.entries, iteration.requests, strict=True):
            token = scores = None
            if entry.sample is not None:
                token, scores = next(tokens), next(logprobs)
            request.num_in_flight -= 1
            if request.state is LEAVING:
                self.endings.come_back(request, now)
                continue
            if strays and (fault := strays.get(request)):
                self.endings.fail(request, _error_of(fault), now)
                deliveries.append(Delivery(request, None))
                continue
            num_tokens = len(entry.tokens)
            request.num_computed = entry.start + num_tokens
            count(request, num_tokens, seconds, now)
            if strays and request in strays:
                request.land(request.num_computed - 1)
            elif token is not None:
                self._produce(request, token, now)
                deliveries.append(Delivery(request, token, scores))
            publish(request, entry.start)
            if request.finish is not None:
                self.endings.leave(request, now)
            elif not request.num_in_flight:
                self.pool.move(request, COMMIT)
        self.cost.observe(iteration.step, result.seconds)
        self._observer.committed(iteration, result.seconds, now)
        return deliveries

    def _settle(self, iteration: Iteration, result: "StepResult", now: float) -> None:
        """Count what few iterations bring: KV that moved, and log-probabilities of prompts."""
        for rider in self.memory.tiers.settle(iteration):
            self.endings.come_back(rider, now)
        if result.prompt_logprobs:
            for request, told in zip(iteration.requests, result.prompt_logprobs, strict=True):
                request.prompt_logprobs += told

    def _produce(self, request: Request, token: int, now: float) -> None:
        request.output.append(token)
        request.num_pending -= 1
        if request.num_crashes:
            self.endings.clear(request)
        request.last_token_at = now
        if request.first_token_at is None:
            request.first_token_at = now
        if token in request.spec.end_ids:
            request.finish = FinishReason.STOP
        elif len(request.output) == request.spec.max_tokens:
            request.finish = FinishReason.LENGTH

    def fail(self, iteration: Iteration, error: EngineError, now: float) -> list[Request]:
        """An iteration raised: its batch is lost. The requests that ended."""
        self._observer.failed(iteration, now)
        self.endings.num_committed += 1
        for rider in self.memory.tiers.void(iteration):
            self.endings.come_back(rider, now)
        for request in iteration.requests:
            request.num_in_flight -= 1
            self.endings.fail(request, error, now)
        return list(iteration.requests)

    # Endings from outside

    def fail_all(self, error: EngineError, now: float) -> list[Request]:
        """Nobody will be served any more. The requests; see `Lifecycle`."""
        return self.endings.fail_all(error, now)

    def lose_device(self, in_flight: "Collection[Iteration]", now: float) -> list[Request]:
        """All KV is gone, and the iterations in flight will not return. The requests that ended;
        see `Lifecycle`."""
        return self.endings.lose_device(in_flight, now)

    def cancel(self, request: Request, reason: Abort, now: float) -> None:
        """End a request; its KV is free now, or when its last iteration returns."""
        self.endings.cancel(request, reason, now)

    def expire(self, now: float) -> list[Request]:
        """End whoever is past its deadline; who is in flight ends at its commit. The requests."""
        return self.endings.expire(now)


def _may_go_ahead(request: Request) -> bool:
    """Whether one that is in flight will be there for another iteration, as far as is known."""
    is_once = request.state is State.RUNNING and request.num_in_flight == 1
    if request.num_pending and request.awaits_grammar:
        return False
    return is_once and request.produced + request.num_pending < request.spec.max_tokens


def _error_of(fault: "Fault") -> EngineError:
    return NoAllowedToken(fault.message) if fault.is_caller_error else RowFailed(fault.message)
