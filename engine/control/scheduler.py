"""IterationScheduler: add, plan, commit, cancel. Plain functions; `now` is an argument.

Orca's algorithm 1 with three changes. Prompts are computed in chunks beside the decodes. A request
that does not fit is stepped over, but only `max_step_overs` times; after that no request behind it
is admitted before it. KV may grow block by block; requests are preempted if blocks run short.
"""

from typing import TYPE_CHECKING

from engine.control.admission import AdmissionControl, AdmissionSettings, SwapMode
from engine.control.batch_builder import BatchBuilder
from engine.control.batch_planner import BatchPlanner
from engine.control.draft_planner import add_drafts
from engine.control.lifecycle import Lifecycle
from engine.control.settings import SchedulerSettings
from engine.control.swap_planner import SwapPlanner
from engine.cost.live import LiveCost
from engine.cost.model import UNMEASURED
from engine.errors import (
    ContextTooLong,
    EngineError,
    InvalidRequest,
    NoAllowedToken,
    Overloaded,
    RowFailed,
)
from engine.events import NullObserver, Observer, ObserverGroup
from engine.iteration import Delivery, Iteration, SampledToken
from engine.kv.manager import IDLE_SAVES_PER_STEP, SAVES_PER_STEP, KVManager
from engine.pool import RequestPool
from engine.request import Abort, FinishReason, Move, Request, RequestSpec, State
from engine.step import RequestId, Step, StepId

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Iterator, Sequence

    from engine.kv.ledger import KVLedger
    from engine.policy.port import Policy
    from engine.speculation.drafter import Drafter
    from engine.step import Fault, StepEntry, StepResult


WAITING, LEAVING, COMMIT = State.WAITING, State.LEAVING, Move.COMMIT  # bound once (engine.pool)


class IterationScheduler:
    """Plans which requests run in the next iteration, and applies its result to them."""

    def __init__(
        self,
        settings: SchedulerSettings,
        ledger: "KVLedger",
        policy: "Policy",
        observer: Observer | None = None,
        cost: LiveCost | None = None,
        drafter: "Drafter | None" = None,
    ) -> None:
        self.settings = settings
        self.pool = RequestPool(policy)
        self.cost = cost or LiveCost(UNMEASURED)
        observer = observer or NullObserver()
        self.drafter = drafter
        self._observer = observer
        self.kv = KVManager(ledger, self.pool, observer, reuses_prefixes=settings.reuses_prefixes)
        swap = settings.swap if ledger.host.num_blocks else SwapMode.OFF
        terms = AdmissionSettings(settings.admission, settings.max_preemptions, swap)
        self.admission = AdmissionControl(terms, self.kv, self.pool, observer)
        self._swap_planner = SwapPlanner(
            terms, self.kv, self.pool, self.admission, settings.max_batch_size
        )
        self._planner = BatchPlanner(
            settings, self.pool, self.kv, self.admission, self._swap_planner, self.cost
        )
        ends = observer if drafter is None else ObserverGroup(observer, drafter)
        self.lifecycle = Lifecycle(self.kv, self.pool, ends, settings.max_crashes)
        self.looks_ahead = True  # whether `plan` may be called with an iteration in flight
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
        return self.lifecycle.num_committed

    # Arrivals

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise `ContextTooLong` if so many tokens exceed the context or the KV cache."""
        limit = self.settings.max_model_len
        if prompt_len + max_tokens > limit:
            raise ContextTooLong(prompt_len, max_tokens, limit, "maximum context length")
        if prompt_len + max(0, max_tokens - 1) > self.ledger.longest_request:
            most = self.ledger.longest_request
            raise ContextTooLong(prompt_len, max_tokens, most, "KV cache size")

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
        assert (spec.max_tokens == 0) == spec.is_pooling, "max_tokens is 0 only without output"
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
        self._planner.step_time.watch(request)
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

    def may_start_in_time(self, request: Request) -> bool:
        """Whether the ITL goals would be met with this waiting request as one more decode."""
        step_time = self._planner.step_time
        return not step_time.has_goals or step_time.may_start(request)

    def switch(self, policy: "Policy", now: float) -> None:
        """Continue under another policy, which is empty; no request is lost or restarted."""
        for request in self.pool:
            policy.arrive(request, now)
        for request in self.pool.started:
            policy.start(request)
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
        ahead: dict[Request, None] = {}  # in the order of their entries
        if oldest is not None:  # KV that is being loaded might not be readable
            loading = {load.request for load in oldest.loads}
            may_go = (r for r in oldest.requests if r.may_go_ahead and r not in loading)
            ahead = dict.fromkeys(may_go)
        if oldest is not None and self.drafter is not None and self.drafter.is_active and ahead:
            for request in self.drafter.waiting(oldest, ahead):
                del ahead[request]
        settings = self.settings
        batch = BatchBuilder(
            StepId(self._next_step_id), settings.max_batch_size, settings.max_batch_tokens, ahead
        )
        batch.looks_ahead = self.looks_ahead
        batch.has_suspect = self.lifecycle.has_suspect_in_flight
        batch.least_crashes = self.lifecycle.least_crashes
        self.admission.begin_plan()
        self.kv.search.begin_plan()
        self._planner.step_time.begin_plan(now)
        self._planner.fill(batch, now)
        while batch.is_empty and batch.is_deferred:  # only requests whose prefix is looked for
            batch.is_deferred = False
            batch.background = None
            self.kv.search.begin_plan()
            self._planner.fill(batch, now)
        if not batch.is_empty:
            self._swap_planner.order_moves(now)
            drafter = self.drafter
            if drafter is not None and drafter.is_active and not batch.has_prefills:
                add_drafts(batch, drafter, self.kv, self.pool, settings)
            self.kv.save(SAVES_PER_STEP)
        swaps = self.kv.collect_swaps()
        if batch.is_empty:
            assert not swaps.moves, "KV is swapped by an iteration without entries"
            if self.pool:
                self._observer.idled(now)
            return None
        iteration = batch.iteration(swaps, self._planner.step_time.goal(batch))
        self._next_step_id += 1
        if self.drafter is not None and self.drafter.is_active:
            self.drafter.sent(iteration)
        self._observer.planned(iteration, now)
        return iteration

    def save(self) -> Iteration | None:
        """An iteration that saves cached blocks in the tiers below, if any; no request is live."""
        assert not self.pool, "live requests come first"
        self.kv.save(IDLE_SAVES_PER_STEP)
        swaps = self.kv.collect_swaps()
        if not swaps.moves:
            return None
        step = Step(StepId(self._next_step_id), (), swaps.moves)
        self._next_step_id += 1
        return Iteration(step, (), (), swaps.saves)

    # Results

    def commit(self, iteration: Iteration, result: "StepResult", now: float) -> list[Delivery]:
        """Apply the result of an iteration; returns the tokens of requests that are not leaving.

        A request with a fault fails, and one that is pooled finishes; both are returned without a
        token. A late request computes the last of its tokens again in a later iteration.
        """
        tokens, logprobs, accepted, vectors = iteration.results(result)
        without_token = iteration.rows_without_token(result)
        deliveries: list[Delivery] = []
        new = tuple.__new__  # in place of Delivery(…), which takes twice as long
        count, publish, seconds = self.policy.ran, self.kv.publish, result.seconds
        block_size, keeps_all, move = self.kv.block_size, self.kv.keeps_all, self.pool.move
        self.lifecycle.num_committed += 1
        unread = self._apply_extras(iteration, result, now)
        rows = zip(iteration.step.entries, iteration.requests, tokens, logprobs, strict=True)
        for entry, request, token, scores in rows:
            request.num_in_flight -= 1
            fault = without_token.get(request) if without_token else None
            if request.state is LEAVING or fault is not None or request in unread:
                deliveries += self._drop_row(request, unread, fault, now)
                continue
            num_tokens = len(entry.tokens)
            if entry.num_drafts:
                num_tokens = self._settle_drafts(request, entry, len(accepted[request]))
            request.num_computed = num_computed = entry.start + num_tokens
            count(request, num_tokens, seconds, now)
            if token is None or request in without_token:
                is_late = request in without_token
                deliveries += self._without_token(request, vectors.get(request), is_late=is_late)
            else:
                self._produce(request, token, now)
                deliveries.append(new(Delivery, (request, token, scores)))
                if accepted:
                    deliveries += self._deliver(request, accepted.get(request, ()))
            if num_computed % block_size < num_tokens or not keeps_all:  # a block is full
                publish(request, entry.start)
            if request.finish is not None:
                self.lifecycle.leave(request, now)
            elif not request.num_in_flight:
                move(request, COMMIT)
        self._forget_late(without_token)
        self._learn(iteration, result, now)
        self._observer.committed(iteration, result.seconds, now)
        return deliveries

    def _learn(self, iteration: Iteration, result: "StepResult", now: float) -> None:
        """Learn what the step and its proposals cost, and keep the proposals."""
        if self.drafter is not None:
            self.drafter.iteration_took(iteration, result, now)
        self.cost.observe(iteration.step, result.seconds - result.proposal_seconds)

    def _drop_row(
        self, request: Request, unread: "Container[Request]", fault: "Fault | None", now: float
    ) -> list[Delivery]:
        """An entry whose result is not needed, was computed from KV that could not be read, or has
        a fault, with which its request fails."""
        if request.state is LEAVING:
            self.lifecycle.iteration_returned(request, now)
        elif request in unread:
            self.kv.forget(request)
        elif fault is not None:
            self.lifecycle.fail(request, _error_of(fault), now)
            return [Delivery(request, None)]
        return []

    def _without_token(
        self, request: Request, vector: bytes | None, *, is_late: bool
    ) -> list[Delivery]:
        """An entry that has sampled no token: it was late, pooled, or a chunk of a prompt. A late
        request computes the last of its tokens again."""
        if is_late:
            request.was_late()
            if self.kv.states is None:
                request.reset_to(request.num_computed - 1)
        elif vector is not None:
            request.vector, request.finish = vector, FinishReason.STOP
            return [Delivery(request, None)]
        return []

    def _forget_late(self, rows: "dict[Request, Fault | None]") -> None:
        """A recurrent state has gone past the token to compute again: a late request of a model
        with such states waits again, to start behind its newest snapshot."""
        for request, fault in rows.items():
            if self.kv.states is not None and fault is None and request.state is State.READY:
                self.kv.forget(request)

    def saved(self, iteration: Iteration) -> None:
        """An iteration of `save` has returned."""
        self.kv.finish_swaps(iteration)

    def _settle_drafts(self, request: Request, entry: "StepEntry", num_accepted: int) -> int:
        """The request goes on behind its accepted drafts; no iteration was planned behind them.
        Returns the number of tokens whose KV the entry has computed."""
        assert not request.num_in_flight, "no iteration is planned behind drafts"
        request.num_planned = entry.start + 1 + num_accepted
        if self.drafter is not None:
            self.drafter.returned(request, entry.num_drafts, num_accepted)
        return 1 + num_accepted

    def _deliver(self, request: Request, tokens: "Iterable[SampledToken]") -> "Iterator[Delivery]":
        """The tokens behind the entry's first one, up to the one that ends the request."""
        for token, scores in tokens:
            if request.finish is None:
                request.append(token)
                yield Delivery(request, token, scores)

    def _apply_extras(
        self, iteration: Iteration, result: "StepResult", now: float
    ) -> "Container[Request]":
        """Apply what few iterations have: KV moves and log-probabilities of prompts. Returns the
        requests whose KV could not be read."""
        if iteration.step.moves or iteration.saves:
            for leaving in self.kv.finish_swaps(iteration):
                self.lifecycle.iteration_returned(leaving, now)
        if result.prompt_logprobs:
            for request, scores in zip(iteration.requests, result.prompt_logprobs, strict=True):
                request.prompt_logprobs += scores
        if not iteration.loads:
            return ()
        unread = self.kv.copies.finish_loads(iteration, result.unread, result.unread_states)
        for request in unread:
            if request.state is State.READY:  # it had no entry
                self.kv.forget(request)
        return unread

    def _produce(self, request: Request, token: int, now: float) -> None:
        request.num_pending -= 1
        if request.num_crashes:
            self.lifecycle.clear(request)
        request.last_token_at = now
        if request.first_token_at is None:
            request.first_token_at = now
        request.append(token)

    def fail(self, iteration: Iteration, error: EngineError, now: float) -> list[Request]:
        """An iteration raised an error: its requests fail. Returns them."""
        self._observer.failed(iteration, now)
        if self.drafter is not None:
            self.drafter.dropped(iteration)
        self.lifecycle.num_committed += 1
        for leaving in self.kv.abandon_swaps(iteration):
            self.lifecycle.iteration_returned(leaving, now)
        for request in iteration.requests:
            request.num_in_flight -= 1
            self.lifecycle.fail(request, error, now)
        return list(iteration.requests)

    # Ends from outside

    def fail_all(self, error: EngineError, now: float) -> list[Request]:
        """End all requests with an error, because none can be served any more. Returns them."""
        return self.lifecycle.fail_all(error, now)

    def lose_device(self, in_flight: "Collection[Iteration]", now: float) -> list[Request]:
        """A worker died: all KV is lost, and the iterations in flight will not return. Returns the
        requests that ended (`Lifecycle.lose_device`); all others wait to be recomputed."""
        return self.lifecycle.lose_device(in_flight, now)

    def cancel(self, request: Request, reason: Abort, now: float) -> None:
        """End a request; its KV is freed now, or when its last iteration returns."""
        self.lifecycle.cancel(request, reason, now)

    def expire(self, now: float) -> list[Request]:
        """End the requests whose deadline has passed; those in flight end at their commit. Returns
        them."""
        return self.lifecycle.expire(now)


def _error_of(fault: "Fault") -> EngineError:
    return NoAllowedToken(fault.message) if fault.is_caller_error else RowFailed(fault.message)
