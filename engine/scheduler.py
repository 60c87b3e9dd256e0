"""IterationScheduler: add, plan, commit, cancel. Plain functions; time is given, nobody waits.

Orca's algorithm 1 with three changes. Prompts are computed in chunks beside the decodes. A
request that does not fit is stepped over, but only `max_step_overs` times: then slots are kept
for it. And KV may grow block by block: when it runs short the policy's last request gives its
blocks up and is recomputed later. One that was preempted `max_preemptions` times comes back
with all the slots that it may ever need, so preemptions are bounded and nobody deadlocks.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from engine.cost import TokenRate
from engine.draft import Draft
from engine.errors import ContextTooLong, EngineError, Overloaded, WorkerLost
from engine.events import Observer, Silence
from engine.iteration import Delivery, Iteration
from engine.pool import RequestPool
from engine.request import Abort, Ask, FinishReason, Move, Request, State
from engine.step import RequestId, StepId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.kv import KVLedger
    from engine.ports import Policy
    from engine.step import StepResult


class Admission(Enum):
    """What a request must find free before it starts, and who may join a running batch."""

    GROW = "grow"  # blocks as needed
    RESERVE = "reserve"  # prompt + max_tokens at once (Orca)
    REQUEST = "request"  # as reserve, and nobody joins before the whole batch is done


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
    scan_limit: int = 16  # waiting requests that may be found not to fit, per plan

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
    ) -> None:
        self.settings = settings
        self.ledger = ledger
        self.policy = policy
        self.pool = RequestPool()
        self.rate = TokenRate()
        self.num_committed = 0
        self._observer = observer or Silence()
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
        """Accept a request, or raise `ContextTooLong` or `Overloaded` and change nothing."""
        assert ask.prompt, "a prompt has at least one token"
        assert ask.max_tokens > 0, "an answer has at least one token"
        self.check_fits(len(ask.prompt), ask.max_tokens)
        self._check_queue(len(ask.prompt))
        request = Request(RequestId(self._next_request_id), ask, arrived_at=now)
        self._next_request_id += 1
        self.pool.add(request)
        self.policy.arrive(request, now)
        self._observer.arrived(request, now)
        return request

    def _check_queue(self, prompt_len: int) -> None:
        waiting = self.pool.count(State.WAITING)
        tokens = self.pool.waiting_tokens
        too_many = waiting >= self.settings.max_queue_requests
        if too_many or (waiting and tokens + prompt_len > self.settings.max_queue_tokens):
            raise Overloaded(
                f"The server is full: {waiting} requests with {tokens} tokens are waiting.",
                retry_after=self.rate.seconds_for(tokens),
            )

    # Planning

    def plan(self, now: float) -> Iteration | None:
        """The next iteration, its KV reserved and its requests running; None if there is none."""
        draft = Draft(self.settings.max_batch_size, self.settings.max_batch_tokens)
        self._fill(draft, now)
        iteration = draft.iteration(StepId(self._next_step_id))
        if iteration is not None:
            self._next_step_id += 1
            self._observer.planned(iteration, now)
        return iteration

    def _fill(self, draft: Draft, now: float) -> None:
        whole_batch = self.settings.admission is Admission.REQUEST
        admits = not (whole_batch and self.pool.num_admitted)
        ready_left = self.pool.count(State.READY)
        for request in self.policy.order(now):
            if not draft.seats or not (admits or ready_left):
                return
            if request.state is State.READY:
                ready_left -= 1
                if not self._take(draft, request, now):
                    draft.num_skipped += 1
            elif request.state is State.WAITING and admits:
                admits = self._admit(draft, request, now)

    def _take(self, draft: Draft, request: Request, now: float) -> bool:
        """Put a ready request into the draft; False if tokens or KV do not allow it now.

        A prefill leaves a token for every other ready request: decodes come first.
        """
        if draft.has_suspect and request.is_suspect:
            return False
        num_tokens = request.remaining
        if num_tokens > 1:
            others = self.pool.count(State.READY) - draft.num_skipped - 1
            num_tokens = min(num_tokens, draft.tokens_left - others)
        if not 0 < num_tokens <= draft.tokens_left:
            return False
        num_slots = request.num_computed + num_tokens
        is_secured = self.ledger.reserve(request.request_id, num_slots)
        if not is_secured and not self._secure(request, num_slots, now):
            return False
        draft.add(request, num_tokens, self.ledger)
        self.pool.move(request, Move.PLAN)
        return True

    def _admit(self, draft: Draft, request: Request, now: float) -> bool:
        """Start a waiting request if it fits; whether others behind it may still be looked at."""
        if request.is_suspect and draft.has_suspect:
            return True
        whole_batch = self.settings.admission is Admission.REQUEST
        if whole_batch and self.pool.num_admitted >= self.settings.max_batch_size:
            return False
        ready_left = self.pool.count(State.READY) - draft.num_skipped
        if not whole_batch and draft.tokens_left <= ready_left:
            return False
        if self._fits(request):
            self._start(request, now)
            for other in draft.passed:
                other.num_step_overs += 1
            if not self._take(draft, request, now):
                draft.num_skipped += 1
        else:
            draft.passed.append(request)
        bound = self.settings.max_step_overs
        is_kept = any(other.num_step_overs >= bound for other in draft.passed)
        return not is_kept and len(draft.passed) < self.settings.scan_limit

    def _start(self, request: Request, now: float) -> None:
        reserved = self.ledger.reserve(request.request_id, self._slots_to_start(request))
        assert reserved, "admission found room that the ledger does not have"
        self.pool.move(request, Move.ADMIT)
        request.num_step_overs = 0
        if request.admitted_at is None:
            request.admitted_at = now

    def _fits(self, request: Request) -> bool:
        """Whether it may start; growing neighbours keep a block each to grow into."""
        need = self.ledger.blocks_for(self._slots_to_start(request))
        headroom = self.pool.num_admitted if self.settings.admission is Admission.GROW else 0
        return need + headroom <= self.ledger.num_free

    def _slots_to_start(self, request: Request) -> int:
        return request.max_slots if self._is_reserved(request) else request.num_tokens

    def _is_reserved(self, request: Request) -> bool:
        """Whether it holds all it may ever need, and so is never preempted."""
        if self.settings.admission is not Admission.GROW:
            return True
        return request.num_preemptions >= self.settings.max_preemptions

    def _secure(self, request: Request, num_slots: int, now: float) -> bool:
        """Reserve the slots at the expense of less urgent requests."""
        while victim := self._victim(request, now):
            self._preempt(victim, now)
            if self.ledger.reserve(request.request_id, num_slots):
                return True
        return False

    def _victim(self, request: Request, now: float) -> Request | None:
        """The least urgent request that may give its KV up for `request`."""
        for other in reversed(list(self.policy.order(now))):
            if other is request:
                return None
            if other.state is State.READY and not self._is_reserved(other):
                return other
        return None

    def _preempt(self, victim: Request, now: float) -> None:
        self.ledger.release(victim.request_id)
        victim.num_computed = 0
        victim.num_preemptions += 1
        self.pool.move(victim, Move.PREEMPT)
        self._observer.preempted(victim, now)

    # Results

    def commit(self, iteration: Iteration, result: "StepResult", now: float) -> list[Delivery]:
        """Count what an iteration computed; the tokens for requests that still want them."""
        tokens = iter(result.tokens)
        deliveries: list[Delivery] = []
        self.num_committed += 1
        for entry, request in zip(iteration.step.entries, iteration.requests, strict=True):
            token = next(tokens) if entry.draw is not None else None
            if request.state is State.CANCELLING:
                self._end(request, Move.RETURN, now)
                continue
            request.num_computed = entry.start + len(entry.tokens)
            self.policy.ran(request, len(entry.tokens), now)
            if token is not None:
                self._produce(request, token, now)
                deliveries.append(Delivery(request, token))
            if request.finish is None:
                self.pool.move(request, Move.COMMIT)
            else:
                self._end(request, Move.FINISH, now)
        self.rate.observe(iteration.step.num_tokens, result.seconds)
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
        self.num_committed += 1
        return [self._fail(request, error, now) for request in iteration.requests]

    def fail_all(self, error: EngineError, now: float) -> list[Request]:
        """Nobody will be served any more; who is in flight ends at its commit. The requests."""
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
                self.ledger.release(request.request_id)
                request.num_computed = 0
                self.pool.move(request, Move.LOSE)
        return ended

    def cancel(self, request: Request, reason: Abort, now: float) -> None:
        """End a request from outside; its KV is free now, or when its iteration returns."""
        if request.state.is_terminal or request.abort is not None:
            return
        request.abort = reason
        request.cancelled_in = self.num_committed
        if request.state is State.RUNNING:
            self.pool.move(request, Move.CANCEL)
        else:
            self._end(request, Move.CANCEL, now)

    def _fail(self, request: Request, error: EngineError, now: float) -> Request:
        if request.state is State.CANCELLING:
            self._end(request, Move.RETURN, now)
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
