"""The scheduler with far more work than KV blocks: every policy, admission and kind of swap.

A case is a load on a small device, played to its end with cancels, failed steps, dead workers and
switched policies on the way. PODWAY_EXAMPLES=10000 plays as many cases.
"""

import os
from collections import Counter, deque
from random import Random
from typing import Any

from engine.control.admission import Admission, SwapMode
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.errors import DeadlineUnmeetable, InvalidRequest, StepFailed
from engine.events import Observer
from engine.iteration import Iteration
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy import POLICIES, RESEARCH, Policy, PolicySettings
from engine.request import Abort, Request, RequestSpec, State
from engine.step import BlockMove, SamplingParams, StepResult
from tests.device import RememberingDevice, check_moves
from tests.scheduling import HAND_COST, build_learned, check_preemption

NUM_CASES = int(os.environ.get("PODWAY_EXAMPLES", "300"))
NUM_SLOTS = 24
WINDOWS = [(None,), (None,), (3,), (None, 3), (5, None, 2), (None, 1)]  # of layer groups
NAMES = [*POLICIES, *RESEARCH]
MODES = [Admission.GROW] * 4 + [Admission.RESERVE, Admission.REQUEST]


class SeenEvents(Observer):
    """Counts ends per request, preemptions and swaps."""

    def __init__(self) -> None:
        self.ends: Counter[int] = Counter()
        self.kinds: Counter[str] = Counter()
        self.late = 0  # the most iterations from a cancel to its free slots
        self.scheduler: IterationScheduler  # set by `Case`

    def ended(self, request: Request, now: float) -> None:
        self.ends[request.request_id] += 1

    def freed(self, request: Request, iterations: int) -> None:
        self.late = max(self.late, iterations)

    def preempted(self, request: Request, now: float) -> None:
        self.kinds["recompute"] += 1
        check_preemption(self.scheduler, request)

    def swapped(self, request: Request, move: BlockMove, now: float) -> None:
        self.kinds[f"{move.direction} {'awaited' if move.is_awaited else 'ahead'}"] += 1


class Case:
    """One scheduler under one load; all choices are made from the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.seen = SeenEvents()
        self.depth = random.randint(1, 3)
        self.looks_ahead = random.random() < 0.5
        size = random.choice([1, 2, 4])
        batch = random.randint(1, 4)
        self.settings = SchedulerSettings(
            max_model_len=24,
            max_batch_size=batch,
            max_batch_tokens=batch + random.randint(0, 5),
            admission=random.choice(MODES),
            max_step_overs=3,
            max_preemptions=2,
            swap=random.choice(list(SwapMode)),
            scan_limit=2,
            reuses_prefixes=random.random() < 0.5,
        )
        host_blocks = random.choice([0, 8, 64]) // size
        windows = random.choice(WINDOWS)
        if self.settings.admission is not Admission.GROW:
            windows = (None,) * len(windows)
        ledger = KVLedger(
            KVShape(
                NUM_SLOTS // size * len(windows),
                size,
                host_blocks * len(windows),
                windows=windows,
                chunk=2 * self.settings.max_batch_tokens,
                num_states=random.choice([0, 0, 2, 3, 9]),
                num_host_states=random.choice([1, 3]),
                **self.tiers(seed),
            )
        )
        self.cost = LiveCost(HAND_COST)
        self.scheduler = IterationScheduler(
            self.settings, ledger, self.policy(), self.seen, self.cost
        )
        self.seen.scheduler = self.scheduler
        self.device = RememberingDevice(size, windows)
        self.device.unreadable = self.unreadable
        self.in_flight: deque[Iteration] = deque()
        self.requests: list[Request] = []
        self.to_come = random.randint(2, 14)
        self.has_trouble = random.random() < 0.5
        self.now = 0.0

    def tiers(self, seed: int) -> dict[str, Any]:
        """Which tiers keep cached blocks; some slots of the disk cannot be read."""
        random = Random(f"tiers {seed}")
        sizes = random.choice([(0, 0), (3, 1), (20, 4), (200, 40)])
        num_unreadable = random.choice([0, 0, 1, 5])
        self.unreadable = set(random.sample(range(20), num_unreadable))
        return {
            "num_disk_blocks": sizes[0],
            "num_disk_states": sizes[1],
            "saves_on_host": random.random() < 0.5,
            "num_store_names": random.choice([0, 0, 2, 50]),
        }

    def policy(self) -> Policy:
        settings = PolicySettings(self.random.choice([4.0, 20.0]), seats=2)
        name = self.random.choice(NAMES)
        return build_learned(name, settings, cost=self.cost)

    def play(self) -> None:
        """Serve every request to its end, in a bounded number of iterations."""
        iterations_left = 4000
        while iterations_left and (self.to_come or self.scheduler.pool):
            iterations_left -= 1
            if self.to_come and self.random.random() < 0.5:
                self.arrive()
            if self.has_trouble:
                self.trouble()
            self.run_iteration()
            self.check()
        assert iterations_left, f"never served: {self.scheduler!r}"
        ledger = self.scheduler.ledger
        assert ledger.num_held == ledger.num_moving == 0
        assert ledger.blocks.host.num_free == ledger.blocks.host.num_pages
        assert ledger.states.num_leaked(()) == 0
        assert all(request.state.is_terminal for request in self.requests)

    def arrive(self) -> None:
        random = self.random
        self.to_come -= 1
        spec = RequestSpec(
            prompt=tuple(random.choices((0, 1), k=random.randint(1, 12))),
            max_tokens=random.randint(1, 12),
            sampling=SamplingParams(presence_penalty=float(self.to_come % 2)),
            tenant=random.choice("ab"),
            priority=random.randint(-1, 1),
            ttft_deadline=random.choice([None, 5.0, 50.0]),
            deadline=random.choice([None, None, None, 30.0]),
            is_background=random.random() < 0.15,
        )
        try:
            self.requests.append(self.scheduler.add(spec, self.now))
        except (DeadlineUnmeetable, InvalidRequest):
            assert spec.deadline or spec.ttft_deadline

    def trouble(self) -> None:
        """Sometimes cancel a request, fail a step, lose the worker or switch the policy."""
        random = self.random
        for request in list(self.scheduler.pool):
            if random.random() < 0.01:
                self.scheduler.cancel(request, Abort.CLIENT_GONE, self.now)
        if self.in_flight and random.random() < 0.01:
            self.scheduler.fail(self.in_flight.popleft(), StepFailed("boom"), self.now)
        if random.random() < 0.01:
            self.scheduler.lose_device(self.in_flight, self.now)
            self.in_flight.clear()
            self.device.forget()
        if random.random() < 0.02:
            self.scheduler.switch(self.policy(), self.now)

    def run_iteration(self) -> None:
        """As the engine: plan while fewer than `depth` are in flight, then commit the oldest."""
        self.scheduler.expire(self.now)
        while len(self.in_flight) < self.depth:
            oldest = self.in_flight[0] if self.in_flight and self.looks_ahead else None
            iteration = self.scheduler.plan(self.now, oldest)
            if iteration is None:
                break
            assert iteration.requests, "an iteration computes something"
            assert iteration.step.num_tokens <= self.settings.max_batch_tokens
            assert len(iteration.requests) <= self.settings.max_batch_size
            check_moves(iteration.step, self.in_flight, self.scheduler.ledger.block_size)
            self.in_flight.append(iteration)
            self.check()
        assert self.in_flight or not self.scheduler.pool, f"stuck: {self.scheduler!r}"
        if self.in_flight:
            self.commit(self.in_flight.popleft())

    def commit(self, iteration: Iteration) -> None:
        samples = sum(entry.sample is not None for entry in iteration.step.entries)
        unread = self.device.run(iteration)
        seconds = HAND_COST.step(iteration.step)
        self.now += seconds
        result = StepResult(
            iteration.step.step_id,
            (5,) * samples,
            seconds,
            unread=unread,
        )
        self.scheduler.commit(iteration, result, self.now)

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.ledger.check()
        scheduler.pool.check()
        assert scheduler.ledger.num_leaked(scheduler.pool) == 0
        assert self.seen.late <= self.depth
        for request in self.requests:
            assert self.seen.ends[request.request_id] == int(request.state.is_terminal)
            if request.state is State.FINISHED:
                assert request.produced == request.spec.max_tokens


def test_under_any_load_every_request_is_served_and_no_block_is_lost() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(NUM_CASES):
        case = Case(seed)
        try:
            case.play()
        except Exception as error:
            error.add_note(f"the case of seed {seed}: {case.settings}")
            raise
        kinds += case.seen.kinds
        kinds["loaded"] += case.device.num_loaded
        ledger = case.scheduler.ledger
        kinds["loaded beside windows or states"] += (
            0 if ledger.keeps_all else case.device.num_loaded
        )
    assert min(kinds[kind] for kind in ("recompute", "out awaited", "in awaited")) > NUM_CASES // 20
    assert min(kinds[kind] for kind in ("out ahead", "in ahead")) > 0
    assert min(kinds[kind] for kind in kinds if kind.startswith("loaded")) > NUM_CASES // 20
