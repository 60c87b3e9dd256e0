"""The cost model as JSON and as a bound on chunks, and how a live one adapts."""

from dataclasses import asdict

import pytest

from engine.cost.live import LiveCost
from engine.cost.model import CostModel, StepCounts
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId

MODEL = CostModel(((1, 0.5), (11, 1.5)), per_slot=0.0, per_pair=0.0)


def test_a_model_is_parsed_back_from_json() -> None:
    model = CostModel(((1, 0.1), (9, 0.5)), 1e-7, 1e-9, 1e-4, 0.001, 1e-5)
    assert CostModel.parse(asdict(model)) == model
    assert CostModel.parse({"curve": [[0, 1], [5, 2]], "per_slot": 0, "per_pair": 0}).per_draw == 0


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"curve": [[0, 1]], "per_slot": 0, "per_pair": 0},
        {"curve": [[0, 2], [5, 1]], "per_slot": 0, "per_pair": 0},
        {"curve": "steep", "per_slot": 0, "per_pair": 0},
        {"curve": [[0, 1, 2], [5]], "per_slot": 0, "per_pair": 0},
        {"curve": [[0, 1], [5, 2]], "per_slot": -1, "per_pair": 0},
        {"curve": [[0, 1], [5, 2]], "per_slot": float("nan"), "per_pair": 0},
        {"curve": [[0, 1], [5, 2]], "per_slot": 0, "per_pair": 0, "per_moon": 1},
    ],
)
def test_invalid_cost_models_are_rejected(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        CostModel.parse(values)


@pytest.mark.parametrize(
    ("seconds", "beside", "fits"), [(0.4, 0, 0), (0.5, 0, 1), (1.0, 0, 6), (1.0, 3, 3), (9.0, 0, 8)]
)
def test_tokens_within_is_the_most_tokens_that_fit_into_the_time(
    seconds: float, beside: int, fits: int
) -> None:
    assert LiveCost(MODEL).tokens_within(seconds + 1e-9, 8, 0, beside) == fits


def test_the_worker_idles_for_each_step_and_for_each_request_in_it() -> None:
    model = CostModel(MODEL.curve, 0.0, 0.0, idle_step=0.5, idle_entry=0.25)
    assert model.idle(4) == 1.5


def test_the_parts_of_a_step_with_drafts_sum_to_its_seconds() -> None:
    model = CostModel(MODEL.curve, 1e-2, 1e-3, per_draw=0.1, per_piece=0.2)
    sizes = ((5, 1, 0), (9, 4, 3), (2, 6, 0))  # a decode, one with drafts, a piece of a prompt
    spec = SampleSpec(SamplingParams(temperature=0.0))
    step = Step(
        StepId(1),
        tuple(
            StepEntry(RequestId(start), start, (1,) * count, b"", spec, num_drafts=num_drafts)
            for start, count, num_drafts in sizes
        ),
    )
    assert sum(model.parts(StepCounts.of(step))) == pytest.approx(model.step(step))
