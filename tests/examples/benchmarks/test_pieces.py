from random import Random

import pytest

from engine.control.step_time import PIECE_TIMES
from engine.simulated.trace import poisson
from examples.benchmarks.virtual_time import learned_cost, least_piece
from examples.benchmarks.virtual_time.mixed_graphs import WAYS

ARRIVALS = poisson(20, 60, least_piece.lengths, Random(1))


def test_a_least_piece_of_its_price_lets_prompts_wait_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_piece, "RATES", (6,))
    found = {row["times"]: row for row in least_piece.rows(12)}
    assert found.keys() == set(least_piece.TIMES)
    assert found[PIECE_TIMES]["ttft mean"] < found[0.0]["ttft mean"]
    assert found[PIECE_TIMES]["itl p99"] > found[0.0]["itl p99"], "what the streams pay for it"


def test_what_a_piece_costs_is_learned_by_fits_to_iterations() -> None:
    eager = learned_cost.CASES[0]
    true, without, learned = (
        learned_cost.run(eager, way, 60).at("ttft", "mean") for way in learned_cost.WAYS
    )
    assert true is not None
    assert without is not None
    assert learned is not None
    assert true < learned < without


def test_graphs_take_the_price_away_and_a_planner_that_knows_them_fills_them() -> None:
    means = {way.name: way.run(ARRIVALS).at("ttft", "mean") for way in WAYS}
    eager, graphs, unknown = (
        means[name] for name in ("eager", "graphs every 64", "graphs every 64, unknown")
    )
    assert eager is not None
    assert graphs is not None
    assert unknown is not None
    assert graphs < unknown < eager
