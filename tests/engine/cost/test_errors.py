import pytest

from engine.cost.live import MAX_MARGIN, RECENT, ErrorSummary, PredictionErrors


def test_without_steps_there_is_no_summary_and_no_margin() -> None:
    errors = PredictionErrors()
    assert errors.summary() is None
    assert errors.margin == 1.0


def test_the_summary_has_median_and_p90_of_the_recent_steps() -> None:
    errors = PredictionErrors()
    for _ in range(RECENT):
        errors.observe(3.0)
    for number in range(RECENT):
        errors.observe(1.0 + (-0.1 if number % 2 else 0.1) * number / RECENT)
    summary = errors.summary()
    assert summary is not None
    assert summary.num_steps == RECENT
    assert (summary.median, summary.p90) == pytest.approx((0.05, 0.09), abs=1e-3)
    assert str(summary) == f"median 5.0%, p90 9.0% of {RECENT} iterations"
    assert ErrorSummary.of([]) is None


def test_nine_of_ten_steps_stay_below_the_margin_which_is_bounded() -> None:
    errors = PredictionErrors()
    for number in range(RECENT):
        errors.observe(1.2 if number % 5 == 0 else 0.9)
    assert errors.margin == 1.2
    for _ in range(RECENT):
        errors.observe(9.0)
    assert errors.margin == MAX_MARGIN


def test_a_machine_that_is_faster_than_predicted_leaves_the_goal_as_it_is() -> None:
    errors = PredictionErrors()
    for _ in range(RECENT):
        errors.observe(0.5)
    assert errors.margin == 1.0
