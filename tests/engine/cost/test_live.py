"""How the live cost model adapts: to the machine, but not to single slow iterations."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from engine.cost.live import CONFIRMING, LiveCost
from engine.cost.model import CostModel
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId

MODEL = CostModel(((1, 0.01), (64, 0.02), (512, 0.1), (2048, 0.4)), per_slot=0.0, per_pair=0.0)
PROMPT, GOAL = 2048, 0.1  # tokens of a prompt, seconds of a step


def step(num_tokens: int) -> Step:
    entry = StepEntry(
        RequestId(1), 0, (1,) * num_tokens, b"", SampleSpec(SamplingParams(temperature=0.0))
    )
    return Step(StepId(1), (entry,))


def pieces(cost: LiveCost) -> list[int]:
    """The pieces of a prompt if a step may take `GOAL` seconds and has 8 other tokens."""
    sizes, start = [], 0
    while start < PROMPT:
        sizes.append(max(16, cost.tokens_within(GOAL, PROMPT - start, start, beside=8)))
        start += sizes[-1]
    return sizes


def serve(cost: LiveCost, count: int, slowdown: float = 1.0, *, decodes: int = 15) -> None:
    """Iterations on a machine that takes `slowdown` times as long as `MODEL` says: for each piece
    of a prompt some steps of decodes."""
    done = 0
    while done < count:
        sizes = [8] * decodes + [8 + pieces(cost)[0]]
        for size in sizes[: count - done]:
            cost.observe(step(size), slowdown * MODEL.step(step(size)))
        done += len(sizes)


@pytest.mark.parametrize("num_stalls", [1, 2])
@pytest.mark.parametrize("size", [8, 200, 500, 2048])
def test_after_one_or_two_stalls_prompts_are_split_as_before(size: int, num_stalls: int) -> None:
    cost = LiveCost(MODEL)
    before = pieces(cost)
    for _ in range(num_stalls):
        cost.observe(step(size), 60.0)
        assert pieces(cost) == before
    serve(cost, 100)
    assert pieces(cost) == before


def test_after_stalls_in_a_row_prompts_are_split_as_before_within_800_iterations() -> None:
    cost = LiveCost(MODEL)
    before = pieces(cost)
    for _ in range(10):
        cost.observe(step(500), 60.0)
    serve(cost, 800)
    assert len(pieces(cost)) == len(before)
    assert pieces(cost)[0] == pytest.approx(before[0], rel=0.05)


def test_after_a_slow_period_prompts_are_split_as_before_within_800_iterations() -> None:
    cost = LiveCost(MODEL)
    before = pieces(cost)
    serve(cost, 2000, slowdown=5.0)
    assert len(pieces(cost)) > 4 * len(before)
    serve(cost, 800)
    assert pieces(cost)[0] == pytest.approx(before[0], rel=0.1)


def test_sizes_that_are_not_used_any_more_return_to_the_calibration() -> None:
    cost = LiveCost(MODEL)
    for _ in range(100):
        cost.observe(step(2048), 60.0)
    assert cost.model.tokens(2048) > 2.0
    for _ in range(800):
        cost.observe(step(8), MODEL.step(step(8)))
    assert cost.model.tokens(2048) == pytest.approx(MODEL.tokens(2048), rel=0.01)


@pytest.mark.parametrize("slowdown", [0.3, 1.7, 30.0])
def test_a_machine_that_is_faster_or_slower_at_all_sizes_is_learned(slowdown: float) -> None:
    cost = LiveCost(MODEL)
    for _ in range(400):
        for size in (8, 200, 1500):
            cost.observe(step(size), slowdown * MODEL.step(step(size)))
    for size in (8, 200, 1500):
        assert cost.step(step(size)) == pytest.approx(slowdown * MODEL.step(step(size)), rel=0.05)


def test_noise_does_not_move_the_model_far() -> None:
    cost, random = LiveCost(MODEL), Random(1)
    for _ in range(3000):
        size = random.choice([8, 16, 200, 600])
        noise = random.lognormvariate(0.0, 0.2) * (1000.0 if random.random() < 0.05 else 1.0)
        cost.observe(step(size), noise * MODEL.step(step(size)))
    for size in (8, 16, 200, 600):
        assert cost.step(step(size)) == pytest.approx(MODEL.step(step(size)), rel=0.2)


def test_the_curve_ascends_whatever_is_observed() -> None:
    cost, random = LiveCost(MODEL), Random(2)
    for _ in range(2000):
        cost.observe(step(random.choice([1, 30, 64, 500, 4000])), random.lognormvariate(-3.0, 3.0))
        assert all(a[1] <= b[1] for a, b in pairwise(cost.model.curve))
        confirmed = cost.confirmed() or MODEL
        assert all(a[1] <= b[1] for a, b in pairwise(confirmed.curve))


def test_stalls_and_slow_periods_are_not_saved() -> None:
    cost = LiveCost(MODEL)
    serve(cost, 2000, slowdown=5.0)
    for _ in range(10):
        cost.observe(step(500), 60.0)
    assert cost.confirmed() is None
    assert cost.model != MODEL


def test_a_point_is_saved_once_many_iterations_were_faster_than_calibrated() -> None:
    cost = LiveCost(MODEL)
    for _ in range(CONFIRMING - 1):
        cost.observe(step(8), 0.5 * MODEL.step(step(8)))
    assert cost.confirmed() is None
    for _ in range(8 * CONFIRMING):  # not all are looked at
        cost.observe(step(8), 0.5 * MODEL.step(step(8)))
    saved = cost.confirmed()
    assert saved is not None
    assert saved.tokens(8) == pytest.approx(0.5 * MODEL.tokens(8))
    assert saved.tokens(2048) == MODEL.tokens(2048)


WITH_PROMPTS = replace(MODEL, per_slot=1e-6, per_pair=1e-7, per_draw=5e-4, per_piece=2e-3)


def mixed_step(num_decodes: int, piece: int) -> Step:
    decodes = [
        StepEntry(RequestId(each), 100, (1,), b"", SampleSpec(SamplingParams(temperature=0.0)))
        for each in range(num_decodes)
    ]
    prompt = StepEntry(RequestId(99), 0, (1,) * piece, b"", None)
    return Step(StepId(1), (*decodes, prompt) if piece else tuple(decodes))


@pytest.mark.parametrize(
    "calibrated",
    [
        WITH_PROMPTS,
        replace(WITH_PROMPTS, per_piece=8e-3),
        replace(WITH_PROMPTS, per_pair=0.0, per_draw=0.0),
    ],
)
def test_no_start_in_a_row_begins_with_a_model_that_is_faster_than_the_machine(
    calibrated: CostModel,
) -> None:
    """A machine with other work from time to time, whose calibration may take one part of an
    iteration for another."""
    random, known = Random(3), calibrated
    loads = [mixed_step(8, 0), mixed_step(1, 0), mixed_step(4, 120), mixed_step(7, 500)]
    for _ in range(12):
        cost, slowdown = LiveCost(known), 1.0
        for number in range(1500):
            if number % 50 == 0:
                slowdown = random.choice([1.0, 1.0, 1.6])
            each = random.choice(loads)
            cost.observe(each, slowdown * WITH_PROMPTS.step(each))
        known = cost.confirmed() or known
    for each in loads:
        slowest = min(WITH_PROMPTS.step(each), calibrated.step(each))
        assert known.step(each) >= 0.9 * slowest
