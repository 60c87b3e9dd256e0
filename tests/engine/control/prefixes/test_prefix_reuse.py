from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import RequestSpec, State
from engine.step import StepResult
from tests.scheduling import GREEDY, planned


def make(num_blocks: int = 100, block_size: int = 2) -> IterationScheduler:
    settings = SchedulerSettings(max_model_len=1000, max_batch_size=4, max_batch_tokens=8)
    return IterationScheduler(
        settings, KVLedger(KVShape(num_blocks, block_size)), FirstComeFirstServed()
    )


def spec(prompt_len: int, max_tokens: int) -> RequestSpec:
    return RequestSpec(tuple(range(100, 100 + prompt_len)), max_tokens, GREEDY)


def run_iteration(scheduler: IterationScheduler) -> list[tuple[int, int]]:
    """One iteration: (request, tokens computed) for each entry."""
    iteration = planned(scheduler)
    entries = iteration.step.entries
    samples = sum(entry.sample is not None for entry in entries)
    scheduler.commit(iteration, StepResult(iteration.step.step_id, (5,) * samples, 0.01), 0.0)
    scheduler.ledger.check()
    return [(entry.request_id, len(entry.tokens)) for entry in entries]


def test_a_chat_that_continues_computes_only_its_new_tokens() -> None:
    scheduler = make()
    first = scheduler.add(spec(4, 5), 0.0)
    while first.state is not State.FINISHED:
        run_iteration(scheduler)
    history = first.tokens(0, first.num_tokens)
    second = scheduler.add(RequestSpec((*history, 7, 7), 2, GREEDY), 0.0)
    assert run_iteration(scheduler) == [(1, 3)]  # the last token of the answer was never computed
    assert second.num_cached == 8


def test_a_prompt_that_is_cached_to_its_end_computes_one_token_again() -> None:
    scheduler = make()
    for _ in range(2):
        scheduler.add(spec(6, 1), 0.0)
        while scheduler.pool:
            computed = run_iteration(scheduler)
    assert computed == [(1, 2)]


def test_requests_with_different_salts_share_no_block() -> None:
    scheduler = make()
    for salt in ("a", "b", "a"):
        request = scheduler.add(RequestSpec((1,) * 6, 1, GREEDY, salt=salt), 0.0)
        while scheduler.pool:
            run_iteration(scheduler)
    assert request.num_cached == 4
    assert scheduler.ledger.num_cached == 6


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    scheduler = make(num_blocks=8, block_size=1)
    old = scheduler.add(RequestSpec((1, 2), 4, GREEDY), 0.0)
    young = scheduler.add(RequestSpec((3, 4), 6, GREEDY), 0.0)
    computed = 0
    while scheduler.pool:
        computed += sum(tokens for _, tokens in run_iteration(scheduler))
    assert young.setbacks.num_preemptions == 1
    recomputed = computed - old.spec.max_slots - young.spec.max_slots
    assert 0 < recomputed < young.spec.max_slots // 2
