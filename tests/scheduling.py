"""Helpers that run a scheduler one iteration at a time, with costs that can be added up by hand."""

from collections.abc import Callable, Sequence

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.iteration import Iteration
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy import Policy
from engine.request import Request, RequestSpec, Times
from engine.step import RequestId, SamplingParams, Step, StepResult

# An iteration of n tokens takes 0.5 + n / 2 seconds: one decode alone takes a second.
HAND_COST = CostModel.linear(per_step=0.5, per_token=0.5, per_slot=0.0)
GREEDY = SamplingParams(temperature=0.0)


class CountingCost:
    """`HAND_COST`, and how often a duration was predicted."""

    def __init__(self) -> None:
        self.num_calls = 0

    def compute(self, num_tokens: int, start: int) -> float:
        self.num_calls += 1
        return HAND_COST.compute(num_tokens, start)

    def step(self, step: Step) -> float:
        return HAND_COST.step(step)


def a_spec(prompt_len: int, max_tokens: int, **fields: object) -> RequestSpec:
    """A request for exactly `max_tokens` output tokens."""
    return RequestSpec((1,) * prompt_len, max_tokens, GREEDY, **fields)  # type: ignore[arg-type]


def a_request(number: int, prompt_len: int, max_tokens: int, **fields: object) -> Request:
    """A request for tests of a policy alone."""
    return Request(RequestId(number), a_spec(prompt_len, max_tokens, **fields), Times(0.0))


def a_scheduler(
    policy: Policy,
    num_blocks: int = 1000,
    num_host_blocks: int = 0,
    block_size: int = 1,
    **bounds: object,
) -> IterationScheduler:
    """A scheduler with one seat and eight tokens per iteration, unless `bounds` says otherwise."""
    values: dict[str, object] = {
        "max_model_len": 500,
        "max_batch_size": 1,
        "max_batch_tokens": 8,
        "reuses_prefixes": False,
    }
    settings = SchedulerSettings(**(values | bounds))  # type: ignore[arg-type]
    ledger = KVLedger(KVShape(num_blocks, block_size, num_host_blocks))
    return IterationScheduler(settings, ledger, policy, cost=LiveCost(HAND_COST))


def planned(
    scheduler: IterationScheduler, now: float = 0.0, oldest: Iteration | None = None
) -> Iteration:
    """The next iteration, which there is."""
    iteration = scheduler.plan(now, oldest)
    assert iteration is not None
    return iteration


def run_iteration(scheduler: IterationScheduler, now: float) -> float:
    """Run one iteration. Returns the time when it returned, or `now` if none was planned."""
    scheduler.expire(now)
    iteration = scheduler.plan(now)
    if iteration is None:
        return now
    return commit_iteration(scheduler, iteration, now)


def commit_iteration(scheduler: IterationScheduler, iteration: Iteration, now: float) -> float:
    """Commit an iteration that began at `now`. Returns the time when it returned."""
    seconds = HAND_COST.step(iteration.step)
    samples = sum(entry.sample is not None for entry in iteration.step.entries)
    vectors = (b"vector",) * sum(entry.pooling is not None for entry in iteration.step.entries)
    result = StepResult(iteration.step.step_id, (5,) * samples, seconds, vectors=vectors)
    scheduler.commit(iteration, result, now + seconds)
    scheduler.ledger.check()
    scheduler.pool.check()
    return now + seconds


def play(
    scheduler: IterationScheduler,
    arrivals: Sequence[tuple[float, RequestSpec]],
    after_each: Callable[[float], None] = lambda now: None,
) -> list[Request]:
    """Serve all arrivals (time, spec), earliest first, to their end."""
    now = 0.0
    requests: list[Request] = []
    while scheduler.pool or len(requests) < len(arrivals):
        if not scheduler.pool:
            now = max(now, arrivals[len(requests)][0])
        for at, spec in arrivals[len(requests) :]:
            if at > now:
                break
            requests.append(scheduler.add(spec, at))
        now = run_iteration(scheduler, now)
        after_each(now)
    return requests


def check_preemption(scheduler: IterationScheduler, victim: Request) -> None:
    """Call from `Observer.preempted`: a protected request is preempted by an earlier one only."""
    bound = scheduler.settings.max_preemptions
    if victim.setbacks.num_preemptions > bound and not victim.spec.is_background:
        assert any(
            other.setbacks.num_preemptions >= bound and other.request_id < victim.request_id
            for other in scheduler.pool
        ), f"request {victim.request_id} lost its KV {victim.setbacks.num_preemptions} times"


def ends(requests: Sequence[Request]) -> list[float | None]:
    """The time of each request's last token."""
    return [request.times.last_token_at for request in requests]
