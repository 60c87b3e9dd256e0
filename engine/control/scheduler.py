"""IterationScheduler: add, plan, commit, cancel. Plain functions; `now` is an argument.

Orca's algorithm 1 with three changes. Prompts are computed in chunks beside the decodes. A request
that does not fit is stepped over, but only `max_step_overs` times; after that no request behind it
is admitted before it. KV may grow block by block; requests are preempted if blocks run short.
"""

from collections.abc import Collection, Sequence

from engine.control.admission import AdmissionControl, AdmissionSettings, SwapMode
from engine.control.batch_planner import BatchPlanner
from engine.control.images import Images
from engine.control.lifecycle import Arrivals, Lifecycle
from engine.control.proposals import Proposals
from engine.control.results import StepResults
from engine.control.settings import SchedulerSettings
from engine.control.swap_planner import SwapPlanner
from engine.cost.live import LiveCost
from engine.cost.model import UNMEASURED
from engine.errors import EngineError, RowFailed
from engine.iteration import Delivery, Iteration, Observer, ObserverGroup
from engine.kv.cache import KVCache
from engine.kv.counts import KVCounts
from engine.kv.ledger import KVLedger
from engine.media import EncoderReport
from engine.policy.base import Policy
from engine.pool import RequestPool
from engine.request import Abort, FoundPrefix, Request, RequestSpec, State
from engine.speculation.drafter import Drafter
from engine.step import Step, StepId, StepResult

SAVES_PER_STEP = 16  # cached blocks that are copied to the tiers below; swept in results/constants


class IterationScheduler:
    """Plans which requests run in the next iteration, and applies its result to them."""

    def __init__(
        self,
        settings: SchedulerSettings,
        ledger: KVLedger,
        policy: Policy,
        observer: Observer | None = None,
        cost: LiveCost | None = None,
        drafter: Drafter | None = None,
        encoder: EncoderReport | None = None,
    ) -> None:
        self.settings = settings
        self.images = Images(encoder, settings)
        self.pool = RequestPool(policy)
        self.cost = cost or LiveCost(UNMEASURED)
        observer = observer or Observer()
        self.drafter = drafter
        self._observer = observer
        self.kv = KVCache(ledger, self.pool, observer, reuses_prefixes=settings.reuses_prefixes)
        swap = settings.swap if ledger.shape.num_host_blocks else SwapMode.OFF
        terms = AdmissionSettings(settings.admission, settings.max_preemptions, swap)
        self.admission = AdmissionControl(terms, self.kv, self.pool, observer)
        self._swap_planner: SwapPlanner | None = None
        if terms.swaps and swap is SwapMode.PROACTIVE:
            self._swap_planner = SwapPlanner(
                self.kv, self.pool, self.admission, settings.max_batch_size
            )
        self._planner = BatchPlanner(
            settings, self.pool, self.kv, self.admission, self.cost, self.images
        )
        ends = observer if drafter is None else ObserverGroup(observer, drafter)
        self.lifecycle = Lifecycle(self.kv, self.pool, ends, settings.max_crashes)
        self.arrivals = Arrivals(settings, self.kv, self.pool, self.cost, self.images)
        self._proposals: Proposals | None = None
        if drafter is not None:
            self._proposals = Proposals(drafter, self.kv, self.pool, settings)
        self._results = StepResults(self.kv, self.pool, self.lifecycle, drafter)
        self.looks_ahead = True  # whether `plan` may be called with an iteration in flight
        self._next_step_id = 0

    @property
    def max_request_len(self) -> int:
        """The most tokens of a prompt and its output: of the context, and of what the KV cache
        holds. The last token needs no slot."""
        return min(self.settings.max_model_len, self.kv.longest_request + 1)

    def __repr__(self) -> str:
        return f"IterationScheduler({self.pool!r}, {self.ledger!r})"

    @property
    def ledger(self) -> KVLedger:
        """The pages that each request holds, for checks."""
        return self.kv.ledger

    @property
    def kv_counts(self) -> KVCounts:
        """How many KV blocks are in which state, for metrics."""
        return KVCounts.of(self.kv.ledger, self.pool)

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.pool.policy

    # Arrivals

    def add(self, spec: RequestSpec, now: float, block_hashes: Sequence[bytes] = ()) -> Request:
        """Accept a request, of which the first `block_hashes` may be known. Raises
        `ContextTooLong`, `Overloaded`, or, if it cannot meet its deadline, `DeadlineUnmeetable` or
        `InvalidRequest`; then nothing is changed."""
        request = self.arrivals.accept(spec, now, block_hashes)
        if self._swap_planner is not None:
            self._swap_planner.arrive(request)
        self._planner.time.watch(request)
        self._observer.arrived(request, now)
        return request

    def hand_over(self, request: Request, to: "IterationScheduler", now: float) -> None:
        """Let another scheduler of the same model and queue go on with a waiting request."""
        self.kv.release(request)
        self.pool.withdraw(request)
        self.pool.policy.leave(request, now)
        self.lifecycle.withdraw(request)
        self.images.leave(request)
        if self.drafter is not None:
            self.drafter.ended(request, now)
        self._observer.withdrawn(request, now)
        request.found = FoundPrefix()
        request.setbacks.num_step_overs = 0
        to.pool.add(request)
        to.pool.policy.arrive(request, now)
        to.lifecycle.adopt(request)
        if request.spec.media:
            to.images.arrive(request)
        if to._swap_planner is not None:
            to._swap_planner.arrive(request)
        to._planner.time.watch(request)
        to._observer.adopted(request, now)

    def may_start_in_time(self, request: Request) -> bool:
        """Whether the ITL goals would be met with this waiting request as one more decode."""
        return self._planner.time.may_start(request)

    def switch(self, policy: Policy, now: float) -> None:
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
        ahead = {} if oldest is None else oldest.may_go_ahead()
        if oldest is not None and self._proposals is not None:
            self._proposals.hold_back(oldest, ahead)
        batch = self._planner.begin(StepId(self._next_step_id), ahead)
        batch.looks_ahead = self.looks_ahead
        batch.has_suspect = self.lifecycle.has_suspect_in_flight
        batch.least_crashes = self.lifecycle.least_crashes
        self._planner.plan(batch, now)
        if not batch.is_empty:
            if self._swap_planner is not None:
                self._swap_planner.order_moves(now)
            if self._proposals is not None:
                self._proposals.add_to(batch)
        if not batch.is_empty or not self.pool.count(State.RUNNING):
            batch.encodes = self.images.plan(self._planner.time.left(batch))
        swaps = self.kv.collect_moves(0 if batch.is_empty else SAVES_PER_STEP)
        if batch.is_empty and not batch.encodes and not swaps.moves:
            if self.pool:
                self._observer.idled(now)
            return None
        assert not batch.is_empty or not swaps.moves or self.images.num_live, "moves for no entry"
        batch.dropped = self.images.take_dropped()
        self._next_step_id += 1
        iteration = batch.iteration(swaps, self._planner.time.goal(batch))
        self._observer.planned(iteration, now)
        return iteration

    def save(self) -> Iteration | None:
        """An iteration that saves cached blocks in the tiers below, if any; no request is live."""
        assert not self.pool, "live requests come first"
        swaps = self.kv.collect_moves(SAVES_PER_STEP)
        if not swaps.moves:
            return None
        step = Step(StepId(self._next_step_id), (), swaps.moves)
        self._next_step_id += 1
        return Iteration(step, (), saves=swaps.saves, only_saves=True)

    # Results

    def commit(self, iteration: Iteration, result: StepResult, now: float) -> list[Delivery]:
        """Apply the result of an iteration; returns the tokens of requests that are not leaving.

        A request with a fault fails, and one that is pooled finishes; both are returned without a
        token. A late request computes the last of its tokens again in a later iteration.
        """
        self.lifecycle.num_committed += 1
        failed = [r for r in self.images.failed(result.failed_images) if not r.state.is_terminal]
        for request in failed:
            self.lifecycle.fail(request, RowFailed("An image could not be encoded."), now)
        deliveries = self._results.apply(iteration, result, now)
        deliveries += [Delivery(request, None) for request in failed]
        if self.drafter is not None:
            self.drafter.iteration_took(iteration, result, now)
        self.images.committed(iteration, result)
        if iteration.requests:
            others = result.proposal_seconds + result.encoder_seconds
            self.cost.observe(iteration.step, result.seconds - others)
        self._observer.committed(iteration, result.seconds, now)
        return deliveries

    def fail(self, iteration: Iteration, error: EngineError, now: float) -> list[Request]:
        """An iteration raised an error: its requests fail. Returns them."""
        self._observer.failed(iteration, now)
        if self.drafter is not None:
            self.drafter.dropped(iteration)
        self.lifecycle.num_committed += 1
        for leaving in self.kv.finish(iteration, None).leaving:
            self.lifecycle.iteration_returned(leaving, now)
        for request in iteration.requests:
            request.num_in_flight -= 1
            self.lifecycle.fail(request, error, now)
        self.images.step_failed(iteration)
        return list(iteration.requests)

    # Ends from outside

    def fail_all(self, error: EngineError, now: float) -> list[Request]:
        """End all requests with an error, because none can be served any more. Returns them."""
        return self.lifecycle.fail_all(error, now)

    def lose_device(self, in_flight: Collection[Iteration], now: float) -> list[Request]:
        """A worker died: all KV is lost, and the iterations in flight will not return. Returns the
        requests that ended (`Lifecycle.lose_device`); all others wait to be recomputed."""
        self.images.lose()
        return self.lifecycle.lose_device(in_flight, now)

    def cancel(self, request: Request, reason: Abort, now: float) -> None:
        """End a request; its KV is freed now, or when its last iteration returns."""
        self.lifecycle.cancel(request, reason, now)

    def expire(self, now: float) -> list[Request]:
        """End requests whose deadline has passed, at most `ENDS_AT_ONCE`; those in flight end at
        their commit. Returns them."""
        return self.lifecycle.expire(now)
