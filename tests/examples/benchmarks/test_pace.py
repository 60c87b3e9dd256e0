"""The pace of a machine: measured steps beside the predicted ones of their size."""

from itertools import cycle
from statistics import mean

import pytest

from engine.cost.fit import Sample
from engine.cost.model import CostModel
from examples.benchmarks.real_engine.running import CLASSES, spread_of

COST = CostModel.linear(per_step=0.001, per_token=0.0001, per_slot=0.0)
STALL = 0.002  # seconds, in every fourth step


def samples(count: int, *sizes: int) -> list[Sample]:
    """Steps of these sizes in turn; a fourth of each size has a stall."""
    stalls = cycle([STALL, 0.0, 0.0, 0.0])
    found = []
    for _ in range(count):
        stall = next(stalls)
        found += [Sample(size, size, 0.0, 0, COST.tokens(size) + stall) for size in sizes]
    return found


def test_a_stall_is_as_long_for_a_short_step_as_for_a_long_one() -> None:
    _, ratios = spread_of(samples(80, 1, 400), COST)
    assert len(ratios) == 2
    speed = mean([0.0011, 0.041]) + STALL / 4
    speed /= mean([0.0011, 0.041])
    for size, found in zip((1, 400), ratios, strict=True):
        seconds = COST.tokens(size)
        assert max(found) * speed * seconds == pytest.approx(seconds + STALL)
        assert min(found) * speed * seconds == pytest.approx(seconds)


def test_classes_have_equally_many_steps_and_keep_the_sum_of_all_seconds() -> None:
    steps = samples(40, *range(1, 3 * CLASSES + 1))
    bounds, ratios = spread_of(steps, COST)
    assert len(bounds) == CLASSES - 1
    assert {len(found) for found in ratios} == {len(steps) // CLASSES}
    total = sum(sum(found) for found in ratios)
    assert 0.9 * len(steps) < total < 1.3 * len(steps)


def test_steps_of_one_size_are_one_class() -> None:
    bounds, ratios = spread_of(samples(10, 1), COST)
    assert bounds == ()
    assert len(ratios[0]) == 10
