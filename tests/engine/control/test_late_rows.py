from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.errors import NoAllowedToken, RowFailed
from engine.iteration import Iteration
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import Request, RequestSpec, State
from engine.step import Fault, Grammar, GrammarKind, SamplingParams, StepResult, TokenLogprobs
from tests.models.drafts import a_drafter
from tests.scheduling import a_scheduler, planned, run_iteration

GREEDY = SamplingParams(temperature=0.0)
DIGITS = Grammar(GrammarKind.REGEX, "[0-9]+")


def a_pair(**fields: object) -> IterationScheduler:
    """Two requests of three tokens each, the first one with these fields."""
    scheduler = a_scheduler(FirstComeFirstServed(), max_batch_size=2)
    scheduler.add(RequestSpec((1, 2, 3), 2, GREEDY, **fields), 0.0)  # type: ignore[arg-type]
    scheduler.add(RequestSpec((1, 2, 3), 2, GREEDY), 0.0)
    return scheduler


def commit(scheduler: IterationScheduler, iteration: Iteration, **fields: object) -> list[object]:
    """(request, token) of each delivery; all tokens are 7."""
    samples = sum(entry.sample is not None for entry in iteration.step.entries)
    result = StepResult(iteration.step.step_id, (7,) * samples, 0.1, **fields)  # type: ignore[arg-type]
    found = scheduler.commit(iteration, result, 1.0)
    scheduler.ledger.check()
    scheduler.pool.check()
    return [(delivery.request.request_id, delivery.token) for delivery in found]


def test_a_fault_ends_its_request_and_no_other_request() -> None:
    scheduler = a_pair()
    iteration = planned(scheduler)
    failed, other = iteration.requests
    assert commit(scheduler, iteration, faults=(Fault(0, "no number"),)) == [(0, None), (1, 7)]
    assert failed.state is State.FAILED
    assert isinstance(failed.error, RowFailed)
    assert scheduler.ledger.num_held == 3
    assert (other.state, other.output) == (State.READY, [7])


def test_a_fault_caused_by_the_callers_parameters_has_its_own_error() -> None:
    scheduler = a_pair()
    iteration = planned(scheduler)
    commit(scheduler, iteration, faults=(Fault(1, "all banned", is_caller_error=True),))
    assert isinstance(iteration.requests[1].error, NoAllowedToken)
    assert str(iteration.requests[1].error) == "all banned"


def test_a_late_request_computes_its_last_token_again_and_delays_no_other() -> None:
    scheduler = a_pair(grammar=DIGITS)
    iteration = planned(scheduler)
    late, other = iteration.requests
    assert commit(scheduler, iteration, late=(0,)) == [(1, 7)]
    assert (late.state, late.num_computed, late.output) == (State.READY, 2, [])
    again = planned(scheduler)
    entry = next(entry for entry in again.step.entries if entry.request_id == 0)
    assert (entry.start, entry.tokens) == (2, (3,))
    assert entry.sample is not None
    assert (entry.sample.grammar, entry.sample.may_be_late) == (DIGITS, True)
    assert sorted(map(str, commit(scheduler, again))) == ["(0, 7)", "(1, 7)"]
    assert (late.output, other.output) == ([7], [7, 7])
    (entry,) = planned(scheduler).step.entries
    assert entry.sample is not None
    assert (entry.sample.continues, entry.sample.may_be_late) == (True, False)


def test_a_late_row_with_drafts_goes_on_before_all_of_them() -> None:
    drafter = a_drafter([range(7, 17)], error_rate=0.0)
    settings = SchedulerSettings(500, max_batch_size=1, max_batch_tokens=8)
    scheduler = IterationScheduler(
        settings, KVLedger(KVShape(100, 1)), FirstComeFirstServed(), drafter=drafter
    )
    request = scheduler.add(RequestSpec((1, 2, 3), 10, GREEDY), 0.0)
    assert commit(scheduler, planned(scheduler)) == [(0, 7)]
    drafted = planned(scheduler)
    assert drafted.step.entries[0].tokens == (7, 8, 9, 10, 11)
    assert commit(scheduler, drafted, late=(0,), num_accepted=(0,)) == []
    assert (request.state, request.output) == (State.READY, [7])
    assert request.num_computed == request.num_planned == 3
    assert (drafter.counts.num_drafts, drafter.counts.num_accepted) == (4, 0)
    assert planned(scheduler).step.entries[0].start == 3


def alone(max_tokens: int = 200) -> tuple[IterationScheduler, Request]:
    """A scheduler with one constrained request."""
    scheduler = a_scheduler(FirstComeFirstServed())
    spec = RequestSpec((1, 2, 3), max_tokens, GREEDY, grammar=DIGITS)
    return scheduler, scheduler.add(spec, 0.0)


def may_be_late(iteration: Iteration) -> bool:
    (entry,) = iteration.step.entries
    return entry.sample is not None and entry.sample.may_be_late


def test_every_sixteenth_token_may_be_late_to_find_slow_masks() -> None:
    scheduler, request = alone()
    allowed = []
    for _ in range(40):
        iteration = planned(scheduler)
        if may_be_late(iteration):
            allowed.append(request.produced)
        commit(scheduler, iteration)
    assert allowed == [0, 16, 32]


def test_a_request_with_a_slow_mask_may_be_late_from_then_on() -> None:
    scheduler, request = alone()
    while request.produced < 16:
        commit(scheduler, planned(scheduler))
    commit(scheduler, planned(scheduler), late=(0,))
    assert request.produced == 16
    for _ in range(20):
        iteration = planned(scheduler)
        assert may_be_late(iteration)
        assert scheduler.plan(0.0, iteration) is None
        commit(scheduler, iteration)


def test_without_lookahead_every_constrained_token_may_be_late() -> None:
    scheduler, _ = alone()
    scheduler.looks_ahead = False
    for _ in range(20):
        iteration = planned(scheduler)
        assert may_be_late(iteration)
        commit(scheduler, iteration)


def test_lookahead_stops_at_tokens_that_may_be_late() -> None:
    scheduler, _ = alone()
    allowed, stops = [], []
    iteration = planned(scheduler)
    for index in range(40):
        if may_be_late(iteration):
            allowed.append(index)
        ahead = scheduler.plan(0.0, iteration)
        commit(scheduler, iteration)
        if ahead is None:
            stops.append(index)
            ahead = planned(scheduler)
        iteration = ahead
    assert allowed == stops == [0, 16, 32]


def test_a_grammar_that_is_compiled_late_has_no_slow_masks() -> None:
    scheduler, _ = alone()
    commit(scheduler, planned(scheduler), late=(0,))
    commit(scheduler, planned(scheduler))
    assert not may_be_late(planned(scheduler))


def test_a_request_that_may_be_late_is_not_planned_ahead_of_its_token() -> None:
    scheduler = a_pair(grammar=DIGITS)
    first = planned(scheduler)
    ahead = scheduler.plan(0.0, first)
    assert ahead is not None
    assert [request.request_id for request in ahead.requests] == [1]


def test_a_late_request_does_not_compute_prompt_logprobs_again() -> None:
    scheduler = a_pair(grammar=DIGITS, prompt_logprobs=2)
    iteration = planned(scheduler)
    order = iteration.step.entries[0].prompt_logprobs
    assert order is not None
    assert (order.top, order.offset, order.ids) == (2, 0, (2, 3))
    scores = (TokenLogprobs(-1.0, 1), TokenLogprobs(-2.0, 2))
    commit(scheduler, iteration, late=(0,), prompt_logprobs=(scores, ()))
    entries = planned(scheduler).step.entries
    assert [entry.prompt_logprobs for entry in entries] == [None, None]
    assert tuple(iteration.requests[0].prompt_logprobs) == scores


def test_prompt_logprobs_of_a_chunked_prompt_are_computed_once_per_chunk() -> None:
    scheduler = a_scheduler(FirstComeFirstServed(), max_batch_tokens=4)
    scheduler.add(RequestSpec(tuple(range(10)), 2, GREEDY, prompt_logprobs=0), 0.0)
    orders = []
    for _ in range(3):
        iteration = planned(scheduler)
        (entry,) = iteration.step.entries
        assert entry.prompt_logprobs is not None
        orders.append(entry.prompt_logprobs.ids)
        scores = tuple(TokenLogprobs(float(-token), 1) for token in entry.prompt_logprobs.ids)
        commit(scheduler, iteration, prompt_logprobs=(scores,))
    assert orders == [(1, 2, 3, 4), (5, 6, 7, 8), (9,)]
    run_iteration(scheduler, 2.0)
    assert not scheduler.pool
