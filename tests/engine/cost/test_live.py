from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from engine.cost.live import RECENT, LiveCost
from engine.cost.model import UNMEASURED, CostModel
from engine.media import EncoderWork
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


WITH_PROMPTS = replace(MODEL, per_slot=1e-6, per_pair=1e-7, per_draw=5e-4, per_piece=2e-3)


def mixed_step(num_decodes: int, piece: int) -> Step:
    decodes = [
        StepEntry(RequestId(each), 100, (1,), b"", SampleSpec(SamplingParams(temperature=0.0)))
        for each in range(num_decodes)
    ]
    prompt = StepEntry(RequestId(99), 0, (1,) * piece, b"", None)
    return Step(StepId(1), (*decodes, prompt) if piece else tuple(decodes))


def scaled(model: CostModel, factor: float) -> CostModel:
    return replace(
        model,
        curve=tuple((size, seconds * factor) for size, seconds in model.curve),
        per_slot=model.per_slot * factor,
        per_pair=model.per_pair * factor,
        per_draw=model.per_draw * factor,
        per_piece=model.per_piece * factor,
    )


@pytest.mark.parametrize("factor", [1000.0, 10.0, 3.0, 0.3])
def test_after_a_wrong_calibration_sizes_that_are_not_used_are_right_too(factor: float) -> None:
    """A prompt that a deadline would refuse is never computed, and so never measured."""
    cost, random = LiveCost(scaled(WITH_PROMPTS, factor)), Random(4)
    for _ in range(500):
        each = mixed_step(random.randint(1, 32), 0)
        cost.observe(each, random.uniform(0.95, 1.1) * WITH_PROMPTS.step(each))
    for num_tokens in (1, 64, 512, 2048):
        expected = WITH_PROMPTS.compute(num_tokens, 0)
        assert cost.compute(num_tokens, 0) == pytest.approx(expected, rel=0.3)


def test_on_a_machine_that_was_not_measured_a_model_is_fitted_to_its_iterations() -> None:
    """Most pieces have one length, so that only the others tell their price from their tokens."""
    true = replace(MODEL, curve=((1, 0.005), (1025, 0.025)), per_piece=0.007, per_slot=1e-8)
    random = Random(5)
    steps = [mixed_step(random.randint(1, 64), 0) for _ in range(300)]
    steps += [mixed_step(random.randint(1, 64), random.choice([8, 8, 8, 64])) for _ in range(300)]
    random.shuffle(steps)
    cost, calibrated = LiveCost(UNMEASURED), LiveCost(replace(UNMEASURED, per_slot=1e-8))
    for each in steps:
        for model in (cost, calibrated):
            model.observe(each, true.step(each))
    assert cost.model.per_piece == pytest.approx(0.007, rel=0.2)
    assert calibrated.model.per_piece == 0.0, "a measured model keeps its shape"
    for each in (mixed_step(32, 0), mixed_step(32, 8), mixed_step(8, 500)):
        assert cost.step(each) == pytest.approx(true.step(each), rel=0.1)


def test_a_step_that_is_padded_tells_of_the_size_that_is_computed() -> None:
    curve = ((1, 0.01), (4, 0.01), (16, 0.02), (64, 0.05))
    true = CostModel(curve, per_slot=0.0, per_pair=0.0, graphs=(64,))
    cost = LiveCost(scaled(true, 0.5))
    for _ in range(500):
        for each in (mixed_step(3, 0), mixed_step(1, 2)):
            cost.observe(each, true.step(each))
    assert cost.model.tokens(3) == pytest.approx(0.01, rel=0.05)
    assert cost.model.tokens(64) == pytest.approx(0.05, rel=0.05)


def test_what_a_size_told_counts_as_long_as_it_is_used_now_and_then() -> None:
    """Beside decodes that take 1.5 times as long as calibrated, prompts take as long as that."""
    cost = LiveCost(MODEL)
    for _ in range(40):
        for size in [8] * (RECENT // 2) + [1500] * 2:
            slowdown = 1.5 if size == 8 else 1.0
            cost.observe(step(size), slowdown * MODEL.step(step(size)))
    assert cost.step(step(8)) == pytest.approx(1.5 * MODEL.step(step(8)), rel=0.05)
    assert cost.step(step(1500)) == pytest.approx(MODEL.step(step(1500)), rel=0.05)


@pytest.mark.parametrize(
    ("slowdown", "is_refuted"), [(1.0, False), (1.4, False), (2.0, True), (0.7, False), (0.5, True)]
)
def test_a_calibration_is_refuted_by_many_iterations_that_took_another_time(
    slowdown: float, is_refuted: bool
) -> None:
    cost = LiveCost(MODEL)
    serve(cost, 63, slowdown, decodes=64)
    assert not cost.is_refuted
    serve(cost, 1000, slowdown)
    assert cost.is_refuted is is_refuted


def test_a_slow_period_refutes_no_calibration() -> None:
    cost = LiveCost(MODEL)
    serve(cost, 2000, slowdown=5.0)
    serve(cost, 2000)
    for _ in range(10):
        cost.observe(step(500), 60.0)
    assert not cost.is_refuted


def test_decodes_beside_slices_of_an_image_encoder_raise_no_expectation_of_decodes() -> None:
    """Or iterations would become longer and longer: slices fill what they may take beside them."""
    cost = LiveCost(MODEL)
    alone = MODEL.decodes(1, 1)
    beside = replace(step(1), encodes=(EncoderWork(1, 0, 1),))
    for _ in range(RECENT):
        cost.observe(beside, 1.5 * alone)
    assert cost.decodes(1, 1) == alone
    for _ in range(RECENT):
        cost.observe(step(1), 1.5 * alone)
    assert cost.decodes(1, 1) == pytest.approx(1.5 * alone)
    for _ in range(RECENT):
        cost.observe(beside, alone)
    assert cost.decodes(1, 1) == pytest.approx(alone)
