import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.errors import ContextTooLong
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy import build
from engine.policy.fcfs import FirstComeFirstServed
from engine.research.hardware.catalogue import DEVICES, SHAPES, Deployment
from engine.research.leaping.run import capacity, highest_load
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.figures import SLO
from engine.simulated.play import play, play_all
from engine.simulated.run import Setup, simulate
from engine.simulated.trace import Arrival, orca_lengths, poisson, read_trace, sped_up, steady

AZURE = Path(__file__).parents[2] / "data" / "azure_2023_conv_first_1000.csv.gz"


def setup(cost: CostModel, num_slots: int, stages: int = 1, size: int = 64) -> Setup:
    settings = SchedulerSettings(16384, size, 2048)
    return Setup("run", settings, lambda cost: FirstComeFirstServed(), cost, num_slots, 16, stages)


def test_two_simulations_of_a_real_trace_are_equal_bit_for_bit() -> None:
    deployed = Deployment(DEVICES["l4"], SHAPES["qwen2.5-0.5b"])
    arrivals = sped_up(read_trace(AZURE)[:80], 6.0)
    runs = [simulate(setup(deployed.cost(), 8_192), arrivals) for _ in range(2)]
    first, second = (json.dumps(figures.as_json()) for figures in runs)
    assert first == second
    assert runs[0].num_finished == 80
    assert runs[0].num_preempted > 0


def test_windows_and_states_are_simulated_with_their_own_sizes() -> None:
    deployed = Deployment(DEVICES["l4"], SHAPES["qwen2.5-0.5b"])
    arrivals = sped_up(read_trace(AZURE)[:30], 6.0)
    plain = setup(deployed.cost(), 8_192)
    windowed = replace(plain, windows=(128, 128), settings=SchedulerSettings(16384, 64, 256))
    hybrid = replace(plain, num_states=6)
    figures = [simulate(each, arrivals) for each in (plain, windowed, hybrid)]
    assert all(one.num_finished == 30 for one in figures)
    held = [max(moment.held_slots for moment in one.moments) for one in figures]
    assert held[1] < held[0]  # of two groups together
    admitted = [max(moment.admitted for moment in one.moments) for one in figures]
    assert admitted[2] <= 6 < admitted[0]


def test_swapping_takes_time_and_its_traffic_is_counted() -> None:
    deployed = Deployment(DEVICES["l4"], SHAPES["qwen2.5-0.5b"])
    arrivals = sped_up(read_trace(AZURE)[:40], 6.0)
    short = replace(
        setup(deployed.cost(), 8_192, size=8),
        policy=partial(build, "mlfq"),
        num_host_slots=100_000,
        slot_seconds=deployed.slot_seconds,
    )
    swapped = simulate(short, arrivals)
    assert swapped.num_finished == 40
    assert swapped.num_preempted == swapped.num_swapped > swapped.num_ahead > 0
    assert swapped.swapped_slots > 0
    assert max(moment.host_slots for moment in swapped.moments) > 0
    slow = simulate(replace(short, slot_seconds=1000 * deployed.slot_seconds), arrivals)
    assert slow.busy_seconds > swapped.busy_seconds


def test_two_stages_compute_two_batches_at_once() -> None:
    second = CostModel.linear(per_step=1.0, per_token=0.0, per_slot=0.0)
    arrivals = [Arrival(0.0, 1, 10), Arrival(0.1, 1, 10)]
    for stages, seconds in ((1, 11.0), (2, 10.5)):
        figures = simulate(setup(second, 1000, stages, size=1), arrivals)
        assert figures.busy_seconds == 20.0
        assert figures.seconds == pytest.approx(20.0 if stages == 1 else seconds)


def test_shared_blocks_are_found_in_the_prefix_cache() -> None:
    second = CostModel.linear(per_step=1.0, per_token=0.0, per_slot=0.0)
    arrivals = [Arrival(0.0, 1024, 1, (1, 2)), Arrival(5.0, 1024, 1, (1, 3))]
    assert simulate(setup(second, 4096), arrivals).cached_tokens == 512


def test_a_request_that_can_never_fit_is_lost_and_the_others_are_served() -> None:
    second = CostModel.linear(per_step=1.0, per_token=0.0, per_slot=0.0)

    def scheduler() -> IterationScheduler:
        return IterationScheduler(
            SchedulerSettings(64), KVLedger(KVShape(10, 16)), FirstComeFirstServed()
        )

    arrivals = [Arrival(0.0, 5, 2), Arrival(0.1, 60, 60), Arrival(0.2, 5, 2)]
    played = play_all(scheduler(), SimulatedExecutor(second), arrivals)
    assert [one.arrival for one in played.outcomes] == [arrivals[0], arrivals[2]]
    assert [one.arrival for one in played.lost] == [arrivals[1]]
    with pytest.raises(ContextTooLong):
        play(scheduler(), SimulatedExecutor(second), arrivals)


@pytest.mark.parametrize("limit", [0.013, 1.0, 3.7, 41.0])
def test_the_search_approaches_the_highest_load_from_below(limit: float) -> None:
    found = highest_load(lambda load: load <= limit, start=1.0, tolerance=0.01)
    assert limit / 1.01 <= found <= limit


def test_the_search_ends_if_no_load_or_every_load_is_within_the_slo() -> None:
    assert highest_load(lambda load: False, start=1.0) == 0.0
    assert highest_load(lambda load: True, start=1.0) == 2.0**20


def test_the_capacity_of_a_queue_is_its_service_rate() -> None:
    """One request at a time, 0.5 s each, evenly spaced: no request waits up to 2 requests/s."""
    half = CostModel.linear(per_step=0.5, per_token=0.0, per_slot=0.0)
    arrivals = steady(1.0, 200, lambda random: (1, 1), Random(0))
    slo = SLO(ttft=0.501)
    served = Setup(
        "queue",
        SchedulerSettings(64, max_batch_size=1, admission=Admission.RESERVE),
        lambda cost: FirstComeFirstServed(),
        half,
        num_slots=160,
        slo=slo,
    )
    found = capacity(served, arrivals, lambda figures: figures.attainment == 1.0, start=0.3)
    assert found.rate == pytest.approx(2.0, rel=0.03)
    assert found.rate <= 2.001
    assert all(figures.offered == pytest.approx(rate) for rate, figures in found.runs.items())


def test_latency_rises_with_load() -> None:
    deployed = Deployment(DEVICES["a100-40gb"], SHAPES["gpt3-13b"])
    medians = []
    for rate in (1.0, 4.0, 16.0):
        arrivals = poisson(rate, 80, orca_lengths, Random(3))
        figures = simulate(setup(deployed.cost(), deployed.num_slots), arrivals)
        medians.append(figures.at("norm", "p50") or 0.0)
    assert medians == sorted(medians)
