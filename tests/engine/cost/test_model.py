"""The cost model as a message and as a bound; a live one follows the machine."""

from dataclasses import asdict

import pytest

from engine.cost.model import CostModel, LiveCost

MODEL = CostModel(((1, 0.5), (11, 1.5)), per_slot=0.0, per_pair=0.0)


def test_a_model_survives_being_written_down() -> None:
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
def test_what_is_no_cost_model_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        CostModel.parse(values)


@pytest.mark.parametrize(
    ("seconds", "beside", "fits"), [(0.4, 0, 0), (0.5, 0, 1), (1.0, 0, 6), (1.0, 3, 3), (9.0, 0, 8)]
)
def test_as_many_tokens_fit_as_there_is_time_for(seconds: float, beside: int, fits: int) -> None:
    assert LiveCost(MODEL).tokens_within(seconds + 1e-9, 8, 0, beside) == fits


def test_the_worker_idles_for_each_step_and_for_each_request_in_it() -> None:
    model = CostModel(MODEL.curve, 0.0, 0.0, idle_step=0.5, idle_entry=0.25)
    assert model.idle(4) == 1.5
