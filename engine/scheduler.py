"""IterationScheduler: add, plan, commit, cancel. Plain functions; time is given, nobody waits.

Orca's algorithm 1 with three changes. Prompts are computed in chunks beside the decodes. A
request that does not fit is stepped over, but only `max_step_overs` times: then slots are kept
for it. And KV may grow block by block: when it runs short the policy's last request gives its
blocks up and is recomputed later. One that was preempted `max_preemptions` times comes back
with all the slots that it may ever need, so preemptions are bounded and nobody deadlocks.
"""

from dataclasses import dataclass
from itertools import repeat
from math import inf
from typing import TYPE_CHECKING

from engine.cost import CostModel, LiveCost
from engine.draft import Draft
from engine.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineError,
    NothingAllowed,
    Overloaded,
    RowFailed,
    WorkerLost,
)
from engine.events import Observer, Silence
from engine.iteration import Delivery, Iteration
from engine.memory import Admission, Memory, Terms
from engine.pool import RequestPool
from engine.request import Abort, Ask, FinishReason, Move, Request, State
from engine.step import RequestId, StepId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.kv import KVLedger
    from engine.ports import Policy
    from engine.step import Fault, StepResult


WAITING, READY, CANCELLING = State.WAITING, State.READY, State.CANCELLING
PLAN, COMMIT = Move.PLAN, Move.COMMIT  # bound once, for the hot path (see pool)
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
        self.num_committed = 0
        self._observer = observer or Silence()
        terms = Terms(settings.admission, settings.max_preemptions, settings.reuses_prefixes)
        self.memory = Memory(terms, ledger, self.pool, policy, self._observer)
        self._next_request_id = 0
        self._next_step_id = 0

    def __repr__(self) -> str:
        return f"IterationScheduler({self.pool!r}, {self.ledger!r})"

    # Arrivals

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise `ContextTooLong` if so many tokens can never be served."""
        limit = self.settings.max_model_len
        if prompt_len + max_tokens > limit:
            raise ContextTooLong(prompt_len, max_tokens, limit, "maximum context length")
        if prompt_len + max_tokens - 1 > self.ledger.num_slots:
            raise ContextTooLong(prompt_len, max_tokens, self.ledger.num_slots, "KV cache size")

    def add(self, ask: Ask, now: float) -> Request:
        """Accept a request, or raise `ContextTooLong`, `Overloaded` or, if it would be late,
        `DeadlineUnmeetable` or `InvalidRequest`, and change nothing."""
        assert ask.prompt, "a prompt has at least one token"
        assert ask.max_tokens > 0, "an answer has at least one token"
        self.check_fits(len(ask.prompt), ask.max_tokens)
        self._check_queue(len(ask.prompt))
        request = Request(RequestId(self._next_request_id), ask, arrived_at=now)
        self.memory.arrive(request)
        self.policy.vet(ask, self.memory.num_to_compute(request), now)
        self._next_request_id += 1
        self.pool.add(request)
        self.policy.arrive(request, now)
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

    def plan(self, now: float) -> Iteration | None:
        """The next iteration, its KV reserved and its requests running; None if there is none."""
        draft = Draft(self.settings.max_batch_size, self.settings.max_batch_tokens)
        self.memory.begin()
        self._fill(draft, now)
        iteration = draft.iteration(StepId(self._next_step_id))
        if iteration is not None:
            self._next_step_id += 1
            self._observer.planned(iteration, now)
        elif self.pool:
            self._observer.idled(now)
        return iteration

    def _fill(self, draft: Draft, now: float) -> None:
        """From the front of the order; once nobody more may start, only those who have."""
        order = self.policy.order(now)
        whole_batch = self.settings.admission is Admission.REQUEST
        admits = not (whole_batch and self.pool.num_admitted)
        while admits and not draft.is_full:
            request = next(order, None)
            if request is None:
                return
            if request.state is READY:
                self._take(draft, request, now)
            elif request.state is WAITING:
                admits = self._admit(draft, request, now)
        while not draft.is_full and self._ready_left(draft):
            request = next((r for r in order if r.state is READY), None)
            if request is None:
                return
            self._take(draft, request, now)

    def _take(self, draft: Draft, request: Request, now: float) -> None:
        """Put a ready request into the draft, unless tokens or KV do not allow it now.

        A prefill leaves a token for every other ready request: decodes come first.
        """
        num_tokens = self._num_tokens_now(draft, request)
        slots = request.num_computed + num_tokens
        if num_tokens > 0 and self.memory.secure(request, slots, now):
            draft.add(request, num_tokens, self.ledger)
            self.pool.move(request, PLAN)
        else:
            draft.num_skipped += 1

    def _num_tokens_now(self, draft: Draft, request: Request) -> int:
        """Tokens that the draft has left for a ready request; 0 if it has to wait."""
        if draft.has_suspect and request.is_suspect:
            return 0
        num_tokens = request.remaining
        if num_tokens > 1:
            num_ready = self._ready_left(draft) - self._num_behind(request)
            num_tokens = min(num_tokens, draft.tokens_left - num_ready + 1)
            if num_tokens > LEAST_PIECE and self.settings.max_step_seconds < inf:
                num_tokens = self._num_tokens_in_time(draft, request, num_tokens, num_ready - 1)
        return num_tokens if num_tokens <= draft.tokens_left else 0

    def _num_tokens_in_time(
        self, draft: Draft, request: Request, num_tokens: int, others: int
    ) -> int:
        """As many of a prompt's tokens as do not keep others waiting for too long; some for one
        prompt in each iteration, and once there is no time left, none for others."""
        if draft.is_late:
            return 0
        beside = self.settings.max_batch_tokens - draft.tokens_left + others
        if not beside:
            return num_tokens
        bound, start = self.settings.max_step_seconds, request.num_computed
        in_time = max(LEAST_PIECE, self.cost.tokens_within(bound, num_tokens, start, beside))
        draft.is_cut = draft.is_cut or in_time < num_tokens
        return in_time

    def _ready_left(self, draft: Draft) -> int:
        """Ready requests that the draft has not looked at."""
        return self.pool.count(READY) - draft.num_skipped

    def _num_behind(self, request: Request) -> int:
        """Ready requests in the background, for one that is not: it leaves them no tokens."""
        if request.ask.is_background or not self.pool.background:
            return 0
        return sum(other.state is READY for other in self.pool.background)

    def _admit(self, draft: Draft, request: Request, now: float) -> bool:
        """Start a waiting request if it fits; whether others behind it may still be looked at."""
        if request.is_suspect and draft.has_suspect:
            return True
        whole_batch = self.settings.admission is Admission.REQUEST
        if whole_batch and self.pool.num_admitted >= self.settings.max_batch_size:
            return False
        num_ready = self._ready_left(draft) - self._num_behind(request)
        if not whole_batch and (draft.is_late or draft.tokens_left <= num_ready):
            return False
        if self.memory.admit(request, now):
            for other in draft.passed:
                other.num_step_overs += 1
            self._take(draft, request, now)
        else:
            draft.passed.append(request)
        bound = self.settings.max_step_overs
        is_kept = any(other.num_step_overs >= bound for other in draft.passed)
        return not is_kept and len(draft.passed) < self.settings.scan_limit

    # Results

    def commit(self, iteration: Iteration, result: "StepResult", now: float) -> list[Delivery]:
        """Count what an iteration computed; the tokens for requests that still want them.

        Who has a fault fails, and is among them without a token.
        """
        tokens = iter(result.tokens)
        logprobs = iter(result.logprobs or repeat(None))
        faults = {iteration.requests[fault.entry]: fault for fault in result.faults}
        deliveries: list[Delivery] = []
        self.num_committed += 1
        if result.prompt_logprobs:
            for request, told in zip(iteration.requests, result.prompt_logprobs, strict=True):
                request.prompt_logprobs += told
        for entry, request in zip(iteration.step.entries, iteration.requests, strict=True):
            token = scores = None
            if entry.draw is not None:
                token, scores = next(tokens), next(logprobs)
            if request.state is CANCELLING:
                self._return(request, now)
                continue
            if faults and request in faults:
                self._fail(request, _error_of(faults[request]), now)
                deliveries.append(Delivery(request, None))
                continue
            num_tokens = len(entry.tokens)
            request.num_computed = entry.start + num_tokens
            self.policy.ran(request, num_tokens, result.seconds, now)
            if token is not None:
                self._produce(request, token, now)
                deliveries.append(Delivery(request, token, scores))
            self.memory.publish(request, entry.start)
            if request.finish is None:
                self.pool.move(request, COMMIT)
            else:
                self._end(request, Move.FINISH, now)
        self.cost.observe(iteration.step, result.seconds)
        self._observer.committed(iteration, result.seconds, now)
        return deliveries

    def _produce(self, request: Request, token: int, now: float) -> None:
        request.output.append(token)
        request.num_crashes = 0
        request.last_token_at = now
        if request.first_token_at is None:
            request.first_token_at = now
        if token in request.ask.end_ids:
            request.finish = FinishReason.STOP
        elif request.produced == request.ask.max_tokens:
            request.finish = FinishReason.LENGTH

    def fail(self, iteration: Iteration, error: EngineError, now: float) -> list[Request]:
        """An iteration raised: its batch is lost. The requests that ended."""
        self._observer.failed(iteration, now)
        self.num_committed += 1
        return [self._fail(request, error, now) for request in iteration.requests]

    def fail_all(self, error: EngineError, now: float) -> list[Request]:
        """Nobody will be served any more; who is in flight ends at its commit. The requests."""
        self._observer.given_up(now)
        requests = list(self.pool)
        for request in requests:
            if request.state in (State.RUNNING, State.CANCELLING):
                request.error = error
                self.cancel(request, Abort.SHUTDOWN, now)
            else:
                self._fail(request, error, now)
        return requests

    def lose_device(self, in_flight: "Iterable[Iteration]", now: float) -> list[Request]:
        """All KV is gone: everybody waits again, to be computed from prompt and output.

        Who was in flight is suspect, and runs with no other suspect until it has produced a
        token; whoever saw `max_crashes` deaths in a row is failed. The requests that ended.
        """
        self._observer.worker_lost(now)
        ended: list[Request] = []
        for request in (r for iteration in in_flight for r in iteration.requests):
            request.num_crashes += 1
            if request.num_crashes >= self.settings.max_crashes or request.abort is not None:
                error = WorkerLost("This request was being computed each time a worker died.")
                ended.append(self._fail(request, error, now))
        for request in self.pool:
            if request.state is not State.WAITING:
                request.num_computed = 0
                self.pool.move(request, Move.LOSE)
        self.ledger.forget()
        return ended

    def cancel(self, request: Request, reason: Abort, now: float) -> None:
        """End a request from outside; its KV is free now, or when its iteration returns."""
        if request.state.is_terminal or request.abort is not None:
            return
        request.abort = reason
        request.cancelled_in = self.num_committed
        self._observer.cancelled(request, now)
        if request.state is State.RUNNING:
            self.pool.move(request, Move.CANCEL)
        else:
            self._end(request, Move.EXPIRE if reason is Abort.DEADLINE else Move.CANCEL, now)

    def expire(self, now: float) -> list[Request]:
        """End whoever is past its deadline; who is in flight ends at its commit. The requests."""
        overdue = [request for request in self.pool.overdue(now) if request.abort is None]
        for request in overdue:
            request.error = DeadlineExceeded(
                f"The request's deadline of {request.ask.deadline:g} s passed after "
                f"{request.produced} of its tokens."
            )
            self.cancel(request, Abort.DEADLINE, now)
        return overdue

    def _return(self, request: Request, now: float) -> None:
        """Someone who left in flight is back."""
        expired = request.abort is Abort.DEADLINE
        self._end(request, Move.EXPIRE if expired else Move.RETURN, now)

    def _fail(self, request: Request, error: EngineError, now: float) -> Request:
        if request.state is State.CANCELLING:
            self._return(request, now)
        else:
            request.error = error
            self._end(request, Move.FAIL, now)
        return request

    def _end(self, request: Request, move: Move, now: float) -> None:
        """The one way out: KV back, out of pool and policy, told once."""
        self.ledger.release(request.request_id)
        self.pool.move(request, move)
        self.policy.leave(request, now)
        request.ended_at = now
        if request.cancelled_in is not None:
            self._observer.freed(request, self.num_committed - request.cancelled_in)
        self._observer.ended(request, now)


def _error_of(fault: "Fault") -> EngineError:
    return NothingAllowed(fault.line) if fault.is_asked_for else RowFailed(fault.line)
