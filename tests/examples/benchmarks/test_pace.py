import json
from itertools import cycle
from pathlib import Path
from statistics import mean

import pytest

from engine.control.event_recorder import RecordingHeader
from engine.control.settings import SchedulerSettings
from engine.cost.fit import Sample
from engine.cost.model import CostModel
from engine.kv_shape import KVShape
from engine.policy import PolicySettings
from engine.simulated.replay import Recording, decode_row
from examples.benchmarks.real_engine.running import CLASSES, pace_of, spread_of

COST = CostModel.linear(per_step=0.001, per_token=0.0001, per_slot=0.0)
SETTINGS = SchedulerSettings(max_model_len=4096)
HEADER = RecordingHeader("fcfs", PolicySettings(seats=8), SETTINGS, KVShape(100, 16), 1, COST)
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
    _, extras = spread_of(samples(80, 1, 400), COST)
    assert len(extras) == 2
    speed = 1.0 + STALL / 4 / mean([0.0011, 0.041])
    for size, found in zip((1, 400), extras, strict=True):
        seconds = COST.tokens(size)
        assert (max(found) + seconds) * speed == pytest.approx(seconds + STALL)
        assert (min(found) + seconds) * speed == pytest.approx(seconds)


def test_classes_have_equally_many_steps_and_keep_the_sum_of_all_seconds() -> None:
    steps = samples(40, *range(1, 3 * CLASSES + 1))
    bounds, extras = spread_of(steps, COST)
    assert len(bounds) == CLASSES - 1
    assert {len(found) for found in extras} == {len(steps) // CLASSES}
    assert sum(map(sum, extras)) == pytest.approx(0.0, abs=1e-9)


def test_steps_of_one_size_are_one_class() -> None:
    bounds, extras = spread_of(samples(10, 1), COST)
    assert bounds == ()
    assert len(extras[0]) == 10


def a_run(slower: float) -> Recording:
    """Steps of a prompt of 8 tokens and of a decode in turn; from 5 s on decodes are slower."""
    rows: list[dict[str, object]] = []
    for number in range(20):
        at, is_late = 0.5 * number, number >= 10
        rows.append({"at": at, "arrived": number, "prompt": 8, "max_tokens": 2})
        for step, (start, count) in enumerate(((0, 8), (8, 1)), 2 * number):
            seconds = COST.tokens(count) * (slower if is_late and count == 1 else 1.0)
            rows.append({"at": at, "planned": step, "entries": [[number, start, count]]})
            rows.append({"at": at, "committed": step, "seconds": seconds})
    rows.append({"at": 10.0, "arrived": 20, "prompt": 8, "max_tokens": 2})
    return Recording(Path("run"), HEADER, tuple(decode_row(json.dumps(row)) for row in rows))


def test_the_speeds_of_a_part_are_those_of_the_part_before() -> None:
    run = a_run(slower=3.0)
    pace = pace_of(run, run, COST, periods=4)
    assert pace.period == 2.5
    assert [speeds.prompts for speeds in pace.speeds] == pytest.approx([1.0] * len(pace.speeds))
    assert [speeds.decodes for speeds in pace.speeds[:4]] == pytest.approx([1.0, 1.0, 1.0, 3.0])


def test_the_speeds_that_are_known_afterwards_are_those_of_the_part_itself() -> None:
    run = a_run(slower=3.0)
    pace = pace_of(run, run, COST, periods=4, is_late=False)
    assert [speeds.decodes for speeds in pace.speeds] == pytest.approx([1.0, 1.0, 3.0, 3.0])
