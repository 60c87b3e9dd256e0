from dataclasses import replace
from math import inf
from random import Random

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.control.step_time import (
    MIN_FIRST_PIECE,
    MIN_PIECE,
    MIN_SHARE,
    PATIENCE,
    PIECE_TIMES,
)
from engine.cost.live import LiveCost
from engine.cost.model import CostModel, StepCounts
from engine.iteration import Iteration
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy import build
from engine.policy.fcfs import FirstComeFirstServed
from engine.step import StepResult
from tests.scheduling import HAND_COST, a_scheduler, a_spec, commit_iteration, planned, play

SEATS = 64


def make(itl_goal: float, **bounds: object) -> IterationScheduler:
    """Under `HAND_COST` an iteration of n tokens takes (n + 1) / 2 seconds."""
    values: dict[str, object] = {"max_batch_size": SEATS, "max_batch_tokens": 512}
    values |= {"itl_goal": itl_goal, **bounds}
    return a_scheduler(FirstComeFirstServed(), 10_000, 0, **values)  # type: ignore[arg-type]


def decoding(scheduler: IterationScheduler, count: int, **fields: object) -> float:
    """Start `count` requests of one prompt token; returns the time when all of them decode."""
    now = 0.0
    for _ in range(count):
        scheduler.add(a_spec(1, 60, **fields), now)
    while scheduler.pool.num_admitted < count:
        now = commit_iteration(scheduler, planned(scheduler, now), now)
    return now


def sizes(iteration: Iteration) -> list[int]:
    return [len(entry.tokens) for entry in iteration.step.entries]


@pytest.mark.parametrize(("num_decodes", "piece"), [(1, 198), (20, 179), (100, 99), (160, 39)])
def test_a_prompt_gets_the_tokens_that_the_decodes_leave_until_the_goal(
    num_decodes: int, piece: int
) -> None:
    scheduler = make(100.0, max_batch_size=200)
    now = decoding(scheduler, num_decodes)
    scheduler.add(a_spec(400, 2), now)
    iteration = planned(scheduler, now)
    assert sizes(iteration) == [1] * num_decodes + [piece]
    assert iteration.itl_goal == 100.0
    assert HAND_COST.step(iteration.step) == 100.0


@pytest.mark.parametrize(("wanted", "pieces"), [(None, [59, 136]), (5, [60, 38])])
def test_prompts_whose_log_probabilities_are_wanted_are_priced_with_the_logits_of_each_token(
    wanted: int | None, pieces: list[int]
) -> None:
    settings = SchedulerSettings(
        max_model_len=500, max_batch_size=SEATS, max_batch_tokens=512, itl_goal=100.0
    )
    cost = LiveCost(replace(HAND_COST, per_draw=0.5))
    ledger = KVLedger(KVShape(10_000, 1, 0))
    scheduler = IterationScheduler(settings, ledger, FirstComeFirstServed(), cost=cost)
    now = decoding(scheduler, 1)
    for prompt_len in (60, 400, 400):
        scheduler.add(a_spec(prompt_len, 2, prompt_logprobs=wanted), now)
    iteration = planned(scheduler, now)
    assert sizes(iteration) == [1, *pieces]
    assert sum(cost.model.parts(StepCounts.of(iteration.step))) <= 100.0


def test_beside_decodes_that_take_the_whole_goal_a_prompt_gets_a_tenth_of_it() -> None:
    scheduler = make(inf, max_batch_size=300)
    now = decoding(scheduler, 250, itl_goal=1000.0)
    scheduler.add(a_spec(200, 2, itl_goal=200.0), now)  # its own goal counts once it decodes
    assert sizes(planned(scheduler, now))[-1] == 200, "1000 s leave time for all of it"

    scheduler = make(100.0, max_batch_size=300)
    now = decoding(scheduler, 190)
    scheduler.add(a_spec(400, 2), now)
    iteration = planned(scheduler, now)
    least = int(MIN_SHARE * 100.0 / 0.5)
    assert sizes(iteration)[-1] == max(MIN_PIECE, least) == 20


def test_a_second_prompt_gets_only_the_time_that_is_left() -> None:
    scheduler = make(100.0)
    now = decoding(scheduler, 20)
    for prompt_len in (100, 400, 400):
        scheduler.add(a_spec(prompt_len, 2), now)
    assert sizes(planned(scheduler, now)) == [1] * 20 + [100, 79]


def test_without_decodes_prompts_use_whole_iterations() -> None:
    scheduler = make(10.0)
    scheduler.add(a_spec(400, 2), 0.0)
    iteration = planned(scheduler)
    assert sizes(iteration) == [400]
    assert iteration.itl_goal == inf


def test_a_request_waits_if_one_more_decode_would_exceed_the_goal() -> None:
    scheduler = make(5.0)
    requests = [scheduler.add(a_spec(1, 30), 0.0) for _ in range(12)]
    now, most = 0.0, 0
    while scheduler.pool:
        iteration = planned(scheduler, now)
        now = commit_iteration(scheduler, iteration, now)
        most = max(most, len(iteration.requests))
    assert most == 9, "ten tokens would take 5.5 s"
    assert all(request.produced == 30 for request in requests)


def test_a_goal_below_a_lone_decode_still_serves_all_requests() -> None:
    scheduler = make(0.001)
    requests = play(scheduler, [(0.0, a_spec(40, 5))] * 5)
    assert all(request.produced == 5 for request in requests)


def test_a_goal_of_a_request_bounds_only_the_steps_in_which_it_is_decoded() -> None:
    scheduler = make(inf)
    now = decoding(scheduler, 1)
    strict = scheduler.add(a_spec(1, 3, itl_goal=20.0), now)
    scheduler.add(a_spec(490, 2), now)
    iteration = planned(scheduler, now)
    assert (sizes(iteration), iteration.itl_goal) == ([1, 1, 490], inf)
    now = commit_iteration(scheduler, iteration, now)
    scheduler.add(a_spec(490, 2), now)
    iteration = planned(scheduler, now)
    assert (sizes(iteration)[-1], iteration.itl_goal) == (36, 20.0)
    while not strict.state.is_terminal:
        now = commit_iteration(scheduler, iteration, now)
        iteration = planned(scheduler, now)
    assert iteration.itl_goal == inf


def test_background_requests_get_the_time_that_is_left_until_the_goal() -> None:
    scheduler = a_scheduler(
        build("fcfs", HAND_COST), num_blocks=10_000, max_batch_size=64, max_batch_tokens=512,
        itl_goal=30.0,
    )  # fmt: skip
    now = decoding(scheduler, 19)
    scheduler.add(a_spec(400, 2, is_background=True), now)
    iteration = planned(scheduler, now)
    assert HAND_COST.step(iteration.step) == 30.0


@pytest.mark.parametrize("seed", range(4))
def test_no_prompt_starves_and_predictions_keep_the_goal(seed: int) -> None:
    random = Random(seed)
    goal = random.choice([5.0, 12.0, 40.0])
    scheduler = make(goal, max_batch_size=32, max_batch_tokens=256)
    now, waited = 0.0, 0
    least = max(MIN_PIECE, int(2 * MIN_SHARE * goal))
    for _ in range(300):
        if random.random() < 0.3 and len(scheduler.pool) < 40:
            scheduler.add(a_spec(random.choice([1, 30, 200]), random.randint(1, 40)), now)
        iteration = scheduler.plan(now)
        if iteration is None:
            continue
        pieces = [each for each in sizes(iteration) if each > 1]
        prefills = any(request.remaining > 1 for request in iteration.requests)
        decodes = len(iteration.requests) - len(pieces)
        if iteration.itl_goal < inf and not (pieces and pieces[0] <= least):
            single = sum(not request.output for request in iteration.requests) - len(pieces)
            seconds = HAND_COST.step(iteration.step) - 0.5 * single  # prompts of one token
            assert seconds <= max(goal, 0.5 * (decodes + 1))
        is_waiting = any(
            request.remaining > 1 and not request.num_in_flight
            for request in scheduler.pool.started
        )
        waited = waited + 1 if is_waiting and not prefills else 0
        assert waited == 0, "a started prompt got no piece"
        now = commit_iteration(scheduler, iteration, now)
    while scheduler.pool:
        now = commit_iteration(scheduler, planned(scheduler, now), now)


@pytest.mark.parametrize(("num_decodes", "piece"), [(1, 6), (9, 30), (20, 63), (99, 300)])
def test_a_prompt_makes_an_iteration_with_decodes_longer_by_a_bounded_factor(
    num_decodes: int, piece: int
) -> None:
    """4 times (n + 1) / 2 seconds, of which the decodes take a fourth."""
    scheduler = make(inf, max_batch_size=200, max_prefill_slowdown=4.0)
    now = decoding(scheduler, num_decodes)
    scheduler.add(a_spec(490, 2), now)
    iteration = planned(scheduler, now)
    assert sizes(iteration) == [1] * num_decodes + [piece]
    assert iteration.itl_goal == inf


@pytest.mark.parametrize(("num_prompts", "factor"), [(1, 2.0), (16, 2.0), (32, 3.0), (50, 3.0)])
def test_the_factor_is_larger_if_many_more_prompts_than_decodes_have_a_seat(
    num_prompts: int, factor: float
) -> None:
    """Beside four decodes, with 36 seats: 2.5 seconds, times the factor."""
    scheduler = make(inf, max_batch_size=36, max_prefill_slowdown=2.0)
    now = decoding(scheduler, 4)
    for _ in range(num_prompts):
        scheduler.add(a_spec(490, 2), now)
    assert HAND_COST.step(planned(scheduler, now).step) == 2.5 * factor


@pytest.mark.parametrize(
    ("age", "factor"), [(0.0, 2.0), (1.0, 2.0), (1.5, 2.5), (2.0, 3.0), (9.0, 3.0)]
)
def test_the_factor_grows_with_the_age_of_the_oldest_prompt(age: float, factor: float) -> None:
    """Ages in units of the seconds after which it begins to; the first piece has it too. Half of
    the seats decode."""
    scheduler = make(inf, max_batch_size=38, max_prefill_slowdown=2.0)
    now = decoding(scheduler, 19)
    prompt = scheduler.add(a_spec(490, 2), now)
    patience = PATIENCE * HAND_COST.tokens(490)
    later = prompt.times.arrived_at + age * patience
    for _ in range(2):
        iteration = planned(scheduler, later)
        assert HAND_COST.step(iteration.step) == 10.0 * factor
        commit_iteration(scheduler, iteration, later)


@pytest.mark.parametrize(("clients", "factor"), [("abc", 3.0), ("aab", 2.0), ("aaa", 3.0)])
def test_the_queue_of_one_client_does_not_make_the_iterations_of_another_longer(
    clients: str, factor: float
) -> None:
    """Two prompts that waited for long beside 19 decodes of the last client: those of one client
    age from their start, unless it has all requests."""
    scheduler = make(inf, max_batch_size=38, max_prefill_slowdown=2.0)
    now = decoding(scheduler, 19, client=clients[-1])
    for client in clients[:2]:
        scheduler.add(a_spec(490, 2, client=client), now)
    iteration = planned(scheduler, now + 10 * (PATIENCE * HAND_COST.tokens(490)))
    assert HAND_COST.step(iteration.step) == 10.0 * factor


@pytest.mark.parametrize(
    ("num_decodes", "client", "milliseconds"),
    [(20, "alone", 80), (30, "alone", 100), (60, "alone", 120), (20, "another", 40)],
)
def test_prompts_of_a_client_that_is_alone_may_take_as_long_as_no_reader_notices(
    num_decodes: int, client: str, milliseconds: int
) -> None:
    cost = CostModel(((1, 0.001), (1000, 1.0)), 0.0, 0.0)  # a millisecond for each token
    settings = SchedulerSettings(
        max_model_len=2100, max_batch_size=200, max_batch_tokens=512, max_prefill_slowdown=2.0
    )
    scheduler = IterationScheduler(
        settings, KVLedger(KVShape(10_000, 1)), FirstComeFirstServed(), cost=LiveCost(cost)
    )
    for _ in range(num_decodes):
        scheduler.add(a_spec(1, 1000, client="alone"), 0.0)
    while scheduler.pool.num_admitted < num_decodes:
        returned(scheduler, planned(scheduler), num_decodes / 1000)
    scheduler.add(a_spec(400, 2, client=client), num_decodes / 1000)
    assert sum(sizes(planned(scheduler, num_decodes / 1000))) == milliseconds


def returned(scheduler: IterationScheduler, iteration: Iteration, seconds: float) -> None:
    """Commit an iteration that took so many seconds."""
    tokens = (7,) * sum(entry.sample is not None for entry in iteration.step.entries)
    result = StepResult(iteration.step.step_id, tokens, seconds)
    scheduler.commit(iteration, result, seconds)


def test_far_behind_its_start_a_prompt_makes_iterations_longer_by_the_same_factor() -> None:
    """Attention over the context makes 16 tokens take longer than all decodes."""
    cost = CostModel(((1, 1.0), (1000, 1000.0)), per_slot=0.0, per_pair=0.001)
    settings = SchedulerSettings(
        max_model_len=2100, max_batch_size=SEATS, max_batch_tokens=512, max_prefill_slowdown=3.0
    )
    scheduler = IterationScheduler(
        settings, KVLedger(KVShape(10_000, 1)), FirstComeFirstServed(), cost=LiveCost(cost)
    )
    for _ in range(20):
        scheduler.add(a_spec(1, 1000), 0.0)
    while scheduler.pool.num_admitted < 20:
        returned(scheduler, planned(scheduler), 20.0)
    prompt = scheduler.add(a_spec(2000, 2), 0.0)
    pieces: list[int] = []
    while prompt.remaining > 100 or not pieces:
        iteration = planned(scheduler)
        pieces.append(sizes(iteration)[-1])
        assert cost.step(iteration.step) <= 3 * 20.0
        returned(scheduler, iteration, cost.step(iteration.step))
    assert MIN_FIRST_PIECE <= min(pieces) < MIN_PIECE < max(pieces)


def test_a_piece_whose_price_exceeds_the_bound_takes_at_least_as_long_for_its_tokens() -> None:
    """On a GPU an iteration with a piece runs without a graph, however short the piece is."""
    cost = CostModel(((1, 5.0), (1001, 105.0)), per_slot=0.0, per_pair=0.0, per_piece=7.0)
    settings = SchedulerSettings(
        max_model_len=600, max_batch_size=SEATS, max_batch_tokens=512, max_prefill_slowdown=2.0
    )
    scheduler = IterationScheduler(
        settings, KVLedger(KVShape(10_000, 1)), FirstComeFirstServed(), cost=LiveCost(cost)
    )
    scheduler.add(a_spec(1, 500), 0.0)
    decode = planned(scheduler)
    returned(scheduler, decode, cost.step(decode.step))
    scheduler.add(a_spec(500, 2), 0.0)
    added = cost.step(planned(scheduler).step) - 5.0
    share = MIN_SHARE * 2.0 * 5.0
    assert 0.9 * (PIECE_TIMES * 7.0 + share) < added <= PIECE_TIMES * 7.0 + share


def test_a_piece_fills_the_graph_that_its_iteration_is_padded_to() -> None:
    cost = CostModel(((1, 5.0), (1001, 105.0)), per_slot=0.0, per_pair=0.0, graphs=(64, 128))
    settings = SchedulerSettings(
        max_model_len=600, max_batch_size=SEATS, max_batch_tokens=512, max_prefill_slowdown=2.0
    )
    scheduler = IterationScheduler(
        settings, KVLedger(KVShape(10_000, 1)), FirstComeFirstServed(), cost=LiveCost(cost)
    )
    scheduler.add(a_spec(1, 500), 0.0)
    decode = planned(scheduler)
    returned(scheduler, decode, cost.step(decode.step))
    scheduler.add(a_spec(500, 2), 0.0)
    assert sizes(planned(scheduler)) == [1, 63], "the bound is exceeded by any piece"


def test_the_factor_is_relative_to_iterations_of_decodes_that_were_measured() -> None:
    """They took twice as long as calibrated; since then the model ascribes more to decodes."""
    scheduler = make(inf, max_batch_size=200, max_prefill_slowdown=4.0)
    now = decoding(scheduler, 20)
    for _ in range(40):
        iteration = planned(scheduler, now)
        returned(scheduler, iteration, 2 * HAND_COST.step(iteration.step))
    model = scheduler.cost.model
    curve = tuple((size, 1.5 * seconds) for size, seconds in model.curve)
    scheduler.cost.model = replace(model, curve=curve)
    scheduler.add(a_spec(490, 2), now)
    iteration = planned(scheduler, now)
    assert sizes(iteration)[-1] > MIN_PIECE
    decodes = 2 * HAND_COST.decodes(20, 0)
    assert scheduler.cost.model.step(iteration.step) == pytest.approx(4 * decodes, rel=0.03)


def test_prompts_that_slow_decodes_down_share_the_time_and_keep_no_request_waiting() -> None:
    scheduler = make(inf, max_prefill_slowdown=4.0)
    now = decoding(scheduler, 20)
    for _ in range(3):
        scheduler.add(a_spec(40, 2), now)
    assert sizes(planned(scheduler, now)) == [1] * 20 + [40, 23]

    alone = make(inf, max_prefill_slowdown=4.0)
    alone.add(a_spec(490, 2), 0.0)
    assert sizes(planned(alone, 0.0)) == [490], "no decode has to wait for it"
