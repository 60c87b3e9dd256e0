"""The scheduler under any mix of policies, tiers, arrivals, cancels, failures and worker deaths.

Whatever happens: no slot is lost or owned twice in either tier, what is attended to is the KV of
the tokens before, every request ends exactly once, no request in flight is touched, protected
requests are preempted by earlier ones only, and when arrivals stop every request is served.
PODWAY_EXAMPLES=10000 runs as many cases. (`tests.fuzz.engine` has more kinds of events and tiers,
and the engine's loop; here events come in any order, and cases that fail are made small.)
"""

import os
from collections import Counter, deque
from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.control.admission import Admission, SwapMode
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.errors import DeadlineUnmeetable, InvalidRequest, StepFailed
from engine.events import Observer
from engine.iteration import Iteration
from engine.kv.cache import KVCache
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy import POLICIES, RESEARCH, Policy, PolicySettings
from engine.request import Abort, Request, RequestSpec, State
from engine.step import BlockTable, SamplingParams, StepResult
from tests.device import RememberingDevice, check_moves, tables_of
from tests.scheduling import HAND_COST, build_learned, check_preemption

NUM_SLOTS = 24
END = 3
STARVATION_SECONDS = 20.0
WINDOWS = ((None,), (None,), (3,), (None, 3), (5, None, 2), (None, 1))  # of layer groups
NAMES = st.sampled_from([*POLICIES, *RESEARCH])
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(presence_penalty=1.0),
    SamplingParams(repetition_penalty=2.0),
)


def held_tables(kv: KVCache, request: Request) -> tuple[BlockTable, ...]:
    """The blocks that the request holds now, by layer group."""
    return kv.ledger.holding(request.request_id).block_tables()


class Ends(Observer):
    """Counts how often each request is reported ended."""

    def __init__(self) -> None:
        self.count: Counter[int] = Counter()
        self.freed_after: list[int] = []
        self.scheduler: IterationScheduler  # from `initialize` on

    def ended(self, request: Request, now: float) -> None:
        self.count[request.request_id] += 1

    def freed(self, request: Request, iterations: int) -> None:
        self.freed_after.append(iterations)

    def preempted(self, request: Request, now: float) -> None:
        check_preemption(self.scheduler, request)


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler with up to `depth` iterations in flight, and with lookahead or not."""

    @initialize(
        name=NAMES,
        admission=st.sampled_from(Admission),
        depth=st.integers(1, 3),
        looks_ahead=st.booleans(),
        block_size=st.sampled_from([1, 2, 4]),
        batch=st.integers(1, 4),
        budget=st.integers(0, 5),
        reuses_prefixes=st.booleans(),
        swap=st.sampled_from(SwapMode),
        host_slots=st.sampled_from([0, 8, 64]),
        slowdown=st.sampled_from([1.0, 1.5, inf]),
        itl_goal=st.sampled_from([0.5, 2.0, inf, inf]),
        prefill_slowdown=st.sampled_from([1.5, 4.0, inf]),
        windows=st.sampled_from(WINDOWS),
        num_states=st.sampled_from([0, 0, 2, 3, 9]),
    )
    def start(
        self,
        name: str,
        admission: Admission,
        depth: int,
        looks_ahead: bool,
        block_size: int,
        batch: int,
        budget: int,
        reuses_prefixes: bool,
        swap: SwapMode,
        host_slots: int,
        slowdown: float,
        itl_goal: float,
        prefill_slowdown: float,
        windows: tuple[int | None, ...],
        num_states: int,
    ) -> None:
        self.ends = Ends()
        self.depth = depth
        self.looks_ahead = looks_ahead
        bounds = SchedulerSettings(
            max_model_len=20,
            max_batch_size=batch,
            max_batch_tokens=batch + budget,
            admission=admission,
            max_step_overs=3,
            max_preemptions=2,
            swap=swap,
            scan_limit=2,
            reuses_prefixes=reuses_prefixes,
            max_background_slowdown=slowdown,
            itl_goal=itl_goal,
            max_prefill_slowdown=prefill_slowdown,
        )
        if admission is not Admission.GROW:
            windows = (None,) * len(windows)
        ledger = KVLedger(
            KVShape(
                NUM_SLOTS // block_size * len(windows),
                block_size,
                host_slots // block_size,
                windows=windows,
                chunk=2 * bounds.max_batch_tokens,
                num_states=num_states,
                num_host_states=host_slots // 8,
            )
        )
        self.name = name
        self.cost = LiveCost(HAND_COST)
        policy = self.make_policy()
        self.scheduler = IterationScheduler(bounds, ledger, policy, self.ends, self.cost)
        self.ends.scheduler = self.scheduler
        self.now = 0.0
        self.in_flight: deque[Iteration] = deque()
        self.requests: list[Request] = []
        self.device = RememberingDevice(block_size, windows)

    def make_policy(self) -> Policy:
        settings = PolicySettings(starvation_seconds=STARVATION_SECONDS, seats=2)
        return build_learned(self.name, settings, cost=self.cost)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 8),
        tenant=st.sampled_from(["", "mine"]),
        priority=st.integers(-1, 1),
        ttft_deadline=st.sampled_from([None, 5.0, 50.0]),
        deadline=st.sampled_from([None, None, 10.0]),
        is_background=st.booleans(),
        sampling=st.sampled_from(SAMPLINGS),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        tenant: str,
        priority: int,
        ttft_deadline: float | None,
        deadline: float | None,
        is_background: bool,
        sampling: SamplingParams,
    ) -> None:
        spec = RequestSpec(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=sampling,
            end_ids=frozenset({END}),
            salt=tenant,
            tenant=tenant,
            priority=priority,
            ttft_deadline=ttft_deadline,
            deadline=deadline,
            is_background=is_background,
        )
        before = repr(self.scheduler)
        try:
            self.requests.append(self.scheduler.add(spec, self.now))
        except (DeadlineUnmeetable, InvalidRequest):
            assert self.name == "deadline"
            assert repr(self.scheduler) == before

    @rule(name=NAMES)
    def switch(self, name: str) -> None:
        self.name = name
        self.scheduler.switch(self.make_policy(), self.now)

    @rule(seconds=st.sampled_from([0.25, 1.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for request in self.scheduler.expire(self.now):
            assert request.spec.deadline is not None
            assert self.now >= request.times.arrived_at + request.spec.deadline

    @rule()
    def plan(self) -> None:
        if len(self.in_flight) < self.depth:
            is_ahead = self.looks_ahead and self.in_flight
            iteration = self.scheduler.plan(self.now, self.in_flight[0] if is_ahead else None)
            if iteration is not None:
                self.check_iteration(iteration)
                self.in_flight.append(iteration)

    def check_iteration(self, iteration: Iteration) -> None:
        bounds = self.scheduler.settings
        assert 0 < len(iteration.requests) <= bounds.max_batch_size
        assert iteration.step.num_tokens <= bounds.max_batch_tokens
        check_moves(iteration.step, self.in_flight, self.scheduler.ledger.block_size)
        in_flight = [request for other in self.in_flight for request in other.requests]
        suspects = [r for r in (*in_flight, *iteration.requests) if r.num_crashes]
        assert len(suspects) <= 1
        for entry, request in zip(iteration.step.entries, iteration.requests, strict=True):
            assert request.state is State.RUNNING
            assert request.num_in_flight == in_flight.count(request) + 1
            assert request.num_in_flight <= 1 + self.looks_ahead
            assert entry.start + len(entry.tokens) == request.num_planned
            assert request.num_planned <= request.spec.max_slots

    def run(self, iteration: Iteration) -> None:
        """Do what the workers do: all blocks that the step names must still be held."""
        for entry, request in zip(iteration.step.entries, iteration.requests, strict=True):
            kv = self.scheduler.kv
            for planned, held in zip(tables_of(entry), held_tables(kv, request), strict=True):
                missing = 4 * (held.first - planned.first)  # given back since it was planned
                assert held.blocks.startswith(planned.blocks[missing:])
        self.device.run(iteration)

    @precondition(lambda self: self.in_flight)
    @rule(tokens=st.lists(st.integers(0, 12), min_size=4, max_size=4))
    def commit(self, tokens: list[int]) -> None:
        iteration = self.in_flight.popleft()
        self.run(iteration)
        samples = sum(entry.sample is not None for entry in iteration.step.entries)
        seconds = HAND_COST.step(iteration.step)
        self.now += seconds
        result = StepResult(iteration.step.step_id, tuple(tokens[:samples]), seconds)
        for delivery in self.scheduler.commit(iteration, result, self.now):
            assert delivery.request.abort is None

    @precondition(lambda self: self.in_flight)
    @rule()
    def fail(self) -> None:
        self.scheduler.fail(self.in_flight.popleft(), StepFailed("boom"), self.now)

    @rule()
    def lose_the_worker(self) -> None:
        self.scheduler.lose_device(self.in_flight, self.now)
        self.in_flight.clear()
        self.device.forget()
        ledger = self.scheduler.ledger
        assert ledger.num_held == ledger.num_moving == ledger.blocks.host.num_held == 0

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1 << 16))
    def cancel(self, which: int) -> None:
        request = self.requests[which % len(self.requests)]
        self.scheduler.cancel(request, Abort.CLIENT_GONE, self.now)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        self.scheduler.ledger.check()
        self.scheduler.pool.check()
        live = {request.request_id for request in self.scheduler.pool}
        assert self.scheduler.ledger.num_leaked(live) == 0
        for request in self.requests:
            assert self.ends.count[request.request_id] == int(request.state.is_terminal)
            assert (request.request_id in live) != request.state.is_terminal
        order = list(self.scheduler.policy.order(self.now))
        assert len(order) == len(live)
        assert {request.request_id for request in order} == live
        assert max(self.ends.freed_after, default=0) <= self.depth

    def teardown(self) -> None:
        """Arrivals stop: every live request is served in a bounded number of iterations."""
        if not hasattr(self, "scheduler"):
            return
        work = sum(r.prompt_len + r.spec.max_tokens for r in self.scheduler.pool)
        iterations_left = 8 * work + 8
        while self.scheduler.pool and iterations_left:
            iterations_left -= 1
            self.plan()
            assert self.in_flight, f"stuck: {self.scheduler!r}"
            self.commit([5] * 4)
        assert not self.scheduler.pool, f"starved: {self.scheduler!r}"
        ledger = self.scheduler.ledger
        assert ledger.num_held == ledger.num_moving == 0
        assert ledger.blocks.host.num_free == ledger.blocks.host.num_pages
        assert ledger.states.num_leaked(()) == 0
        self.nothing_is_lost_or_doubled()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=int(os.environ.get("PODWAY_EXAMPLES", "100")),
    stateful_step_count=50,
    deadline=None,
)
