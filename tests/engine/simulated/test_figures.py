"""The metrics of a run: small cases computed by hand, goodput, and the JSON form."""

import json

import pytest

from engine.control.admission import Admission
from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.errors import InvalidRequest
from engine.policy.fcfs import FirstComeFirstServed
from engine.simulated.figures import SLO, Distribution, Figures
from engine.simulated.run import Setup, simulate
from engine.simulated.trace import Arrival

SECOND = CostModel.linear(per_step=1.0, per_token=0.0, per_slot=0.0)


def run(arrivals: list[Arrival], slo: SLO, max_queue: int = 2048, size: int = 1) -> Figures:
    settings = SchedulerSettings(
        max_model_len=64,
        max_batch_size=size,
        admission=Admission.RESERVE,
        max_queue_requests=max_queue,
    )
    setup = Setup("hand", settings, lambda cost: FirstComeFirstServed(), SECOND, 640, slo=slo)
    return simulate(setup, arrivals)


def test_two_requests_one_after_the_other_by_hand() -> None:
    figures = run([Arrival(0.0, 5, 2), Arrival(0.5, 5, 4)], SLO(ttft=2.0))
    assert figures.at("ttft", "mean") == pytest.approx((1.0 + 2.5) / 2)
    assert figures.at("jct", "highest") == pytest.approx(5.5)
    assert figures.at("norm", "mean") == pytest.approx((2.0 / 2 + 5.5 / 4) / 2)
    assert figures.at("itl", "p50") == pytest.approx(1.0)
    assert figures.spreads["itl"] == Distribution(4, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert (figures.seconds, figures.num_iterations, figures.busy_seconds) == (6.0, 6, 6.0)
    assert figures.throughput == pytest.approx(2 / 6)
    assert figures.output_rate == pytest.approx(1.0)
    assert (figures.num_good, figures.attainment) == (1, 0.5)
    assert figures.goodput == pytest.approx(1 / 6)


def test_the_queue_length_is_sampled_over_time() -> None:
    figures = run([Arrival(0.0, 5, 3), Arrival(0.5, 5, 1), Arrival(0.6, 5, 1)], SLO())
    assert [moment.waiting for moment in figures.moments] == [2, 2, 2, 1, 0]
    assert figures.peak_waiting == 2
    assert max(moment.held_slots for moment in figures.moments) == 16


def test_a_rejected_request_only_lowers_the_attainment() -> None:
    arrivals = [Arrival(0.0, 5, 2), Arrival(0.1, 5, 2), Arrival(0.2, 5, 2), Arrival(0.3, 60, 60)]
    figures = run(arrivals, SLO(), max_queue=1)
    assert (figures.num_arrived, figures.num_finished) == (4, 2)
    assert figures.attainment == 0.5


def test_an_output_of_one_token_has_no_inter_token_latency() -> None:
    figures = run([Arrival(0.0, 5, 1)], SLO(tpot=1e-9))
    assert figures.at("itl", "p50") is None
    assert figures.at("tpot", "p50") is None
    assert figures.num_good == 1


def test_the_rates_of_a_run_without_requests_are_zero() -> None:
    figures = run([], SLO())
    rates = (figures.throughput, figures.goodput, figures.attainment, figures.output_rate)
    assert rates == (0.0, 0.0, 0.0, 0.0)


def test_the_json_form_includes_the_rates() -> None:
    figures = run([Arrival(0.0, 5, 2)], SLO())
    written = json.loads(json.dumps(figures.as_json()))
    assert written["throughput"] == 0.5
    assert written["spreads"]["ttft"]["p50"] == 1.0
    assert written["moments"][0]["admitted"] == 1


def test_an_slo_is_parsed_and_each_limit_is_applied() -> None:
    assert SLO.parse("ttft=1, tpot=0.1") == SLO(ttft=1.0, tpot=0.1)
    arrivals = [Arrival(0.0, 5, 2)]
    for text in ("ttft=0.9", "tpot=0.9", "norm=0.9", "jct=1.9"):
        assert run(arrivals, SLO.parse(text)).num_good == 0
    assert run(arrivals, SLO.parse("ttft=1,tpot=1,norm=1,jct=2")).num_good == 1


@pytest.mark.parametrize("text", ["", "ttft", "ttft=soon", "ttft=0", "speed=3", "ttft=nan"])
def test_an_invalid_slo_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest):
        SLO.parse(text)
