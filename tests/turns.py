"""A scheduler played turn by turn on costs that can be added up by hand."""

from collections.abc import Callable, Sequence

from engine.control.scheduler import IterationScheduler, SchedulerSettings
from engine.cost.model import CostModel, LiveCost
from engine.iteration import Iteration
from engine.kv.ledger import KVLedger
from engine.ports import Policy
from engine.request import Request, RequestSpec
from engine.step import RequestId, SamplingParams, StepResult

# An iteration of n tokens takes 0.5 + n / 2 seconds: one decode alone takes a second.
HAND = CostModel.linear(per_step=0.5, per_token=0.5, per_slot=0.0)
GREEDY = SamplingParams(temperature=0.0)


def an_ask(prompt_len: int, max_tokens: int, **fields: object) -> RequestSpec:
    """An ask for exactly so many tokens."""
    return RequestSpec((1,) * prompt_len, max_tokens, GREEDY, **fields)  # type: ignore[arg-type]


def a_request(number: int, prompt_len: int, max_tokens: int, **fields: object) -> Request:
    """A request that only a policy will see."""
    return Request(RequestId(number), an_ask(prompt_len, max_tokens, **fields), arrived_at=0.0)


def a_scheduler(
    policy: Policy, num_slots: int = 1000, num_host_slots: int = 0, **bounds: object
) -> IterationScheduler:
    """One seat and eight tokens an iteration, unless `bounds` says otherwise."""
    values: dict[str, object] = {
        "max_model_len": 500,
        "max_batch_size": 1,
        "max_batch_tokens": 8,
        "reuses_prefixes": False,
    }
    settings = SchedulerSettings(**(values | bounds))  # type: ignore[arg-type]
    return IterationScheduler(
        settings, KVLedger(num_slots, 1, num_host_slots), policy, cost=LiveCost(HAND)
    )


def turn(scheduler: IterationScheduler, now: float) -> float:
    """One iteration; the moment when it returns, or `now` if there is nothing to do."""
    scheduler.expire(now)
    iteration = scheduler.plan(now)
    if iteration is None:
        return now
    return answer(scheduler, iteration, now)


def answer(scheduler: IterationScheduler, iteration: Iteration, now: float) -> float:
    """Commit an iteration that began at `now`; the moment when it returns."""
    seconds = HAND.step(iteration.step)
    draws = sum(entry.sample is not None for entry in iteration.step.entries)
    result = StepResult(iteration.step.step_id, (5,) * draws, seconds)
    scheduler.commit(iteration, result, now + seconds)
    scheduler.ledger.check()
    scheduler.pool.check()
    return now + seconds


def play(
    scheduler: IterationScheduler,
    arrivals: Sequence[tuple[float, RequestSpec]],
    each_turn: Callable[[float], None] = lambda now: None,
) -> list[Request]:
    """All arrivals (moment, ask), earliest first, to their end."""
    now = 0.0
    requests: list[Request] = []
    while scheduler.pool or len(requests) < len(arrivals):
        if not scheduler.pool:
            now = max(now, arrivals[len(requests)][0])
        for at, ask in arrivals[len(requests) :]:
            if at > now:
                break
            requests.append(scheduler.add(ask, at))
        now = turn(scheduler, now)
        each_turn(now)
    return requests


def ends(requests: Sequence[Request]) -> list[float | None]:
    """When each request had its last token."""
    return [request.last_token_at for request in requests]
