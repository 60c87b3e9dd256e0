from dataclasses import asdict, replace

import pytest

from engine.cost.live import LiveCost
from engine.cost.model import CostModel, StepCounts
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId

MODEL = CostModel(((1, 0.5), (11, 1.5)), per_slot=0.0, per_pair=0.0)


def test_a_model_is_parsed_back_from_json() -> None:
    model = CostModel(((1, 0.1), (9, 0.5)), 1e-7, 1e-9, 1e-4, 0.001, 1e-5, 1e-3, (64, 128))
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
        {"curve": [[0, 1], [5, 2]], "per_slot": 0, "per_pair": 0, "graphs": 64},
        {"curve": [[0, 1], [5, 2]], "per_slot": 0, "per_pair": 0, "graphs": [64, -1]},
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


def test_steps_with_pieces_of_prompts_take_as_long_as_the_graph_they_are_padded_to() -> None:
    model = replace(MODEL, graphs=(4, 8))
    spec = SampleSpec(SamplingParams(temperature=0.0))

    def seconds(*counts: int) -> float:
        entries = [StepEntry(RequestId(i), 0, (1,) * n, b"", spec) for i, n in enumerate(counts)]
        step = Step(StepId(1), tuple(entries))
        assert sum(model.parts(StepCounts.of(step))) == pytest.approx(model.step(step))
        return model.step(step)

    assert seconds(1, 1, 1) == MODEL.tokens(3), "decodes only have graphs of other sizes"
    assert seconds(1, 2) == MODEL.tokens(4)
    assert seconds(1, 1, 3) == seconds(1, 7) == MODEL.tokens(8)
    assert seconds(1, 8) == MODEL.tokens(9), "more tokens than a graph has"
    assert model.compute(5, 0) == model.compute(8, 0)
    assert model.added(3, 0, 1) == pytest.approx(MODEL.tokens(4) - MODEL.tokens(1))


def test_a_piece_fills_the_graph_that_the_time_allows() -> None:
    model = replace(MODEL, graphs=(4, 8))
    assert model.tokens_within(MODEL.tokens(4) + 1e-9, 20, 0, beside=1) == 3
    assert model.tokens_within(MODEL.tokens(7), 20, 0, beside=1) == 3, "8 would take longer"
    assert model.tokens_within(MODEL.tokens(8) + 1e-9, 20, 0, beside=1) == 7
    assert model.tokens_within(MODEL.tokens(10) + 1e-9, 20, 0, beside=1) == 9


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
