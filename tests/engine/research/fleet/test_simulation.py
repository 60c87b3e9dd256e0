"""Whole fleets in virtual time: equal on any number of processes, and to a single simulation."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from engine.control.settings import SchedulerSettings
from engine.errors import InvalidRequest
from engine.policy import build
from engine.research.fleet.router import ROUTERS
from engine.research.fleet.simulation import (
    FleetSetup,
    OutagePlan,
    figures_of,
    run_fleet,
    simulate_fleet,
)
from engine.research.hardware.catalogue import DEVICES, SHAPES, Deployment
from engine.simulated.run import Setup, simulate
from engine.simulated.trace import Arrival, orca_lengths, poisson, read_trace, sped_up, superposed

AZURE = Path(__file__).parents[3] / "data" / "azure_2023_conv_first_1000.csv.gz"
L4 = Deployment(DEVICES["l4"], SHAPES["llama-3.1-8b"])


def setup(policy: str = "fcfs", num_slots: int = 40_000) -> Setup:
    settings = SchedulerSettings(16384, 64, 2048)
    return Setup(policy, settings, partial(build, policy, serves=False), L4.cost(), num_slots)


def chats(count: int, rate: float) -> list[Arrival]:
    """Chats of which each message repeats the messages before it."""
    random, found = Random(5), []
    for number in range(count):
        chat, message = random.randrange(12), random.randrange(1, 5)
        blocks = tuple(100 * chat + place for place in range(message))
        found.append(Arrival(number / rate, 512 * message + 40, random.randint(5, 60), blocks))
    return found


@pytest.mark.parametrize("router", ROUTERS)
def test_a_fleet_is_equal_bit_for_bit_on_any_number_of_processes(router: str) -> None:
    arrivals = chats(60, rate=12.0)
    fleet = FleetSetup(setup(), 5, router)
    runs = [simulate_fleet(replace(fleet, processes=count), arrivals) for count in (1, 3)]
    texts = {json.dumps(run.as_json()) for run in runs}
    assert len(texts) == 1
    assert runs[0].num_finished == 60


@pytest.mark.parametrize("policy", ["fcfs", "mlfq"])
def test_a_fleet_of_one_replica_equals_a_simulation(policy: str) -> None:
    arrivals = sped_up(read_trace(AZURE)[:80], 0.3)
    alone = simulate(setup(policy), arrivals)
    fleet = simulate_fleet(FleetSetup(setup(policy), 1), arrivals)
    assert fleet.num_iterations == alone.num_iterations
    assert fleet.num_preempted == alone.num_preempted
    for measure in ("ttft", "jct", "tpot", "norm"):
        for point in ("mean", "p50", "p99", "highest"):
            assert fleet.at(measure, point) == pytest.approx(alone.at(measure, point), rel=1e-9)
    assert fleet.at("itl", "p50") == pytest.approx(alone.at("itl", "p50"), rel=0.011)
    assert fleet.at("itl", "mean") == pytest.approx(alone.at("itl", "mean"), rel=0.006)


def test_affinity_finds_more_prefixes_than_round_robin() -> None:
    arrivals = chats(120, rate=4.0)
    shares = {
        router: simulate_fleet(FleetSetup(setup(), 4, router), arrivals).cached_share
        for router in ROUTERS
    }
    assert shares["prefix"] > shares["round-robin"] + 0.05
    assert shares["forecast"] > shares["round-robin"] + 0.05


def test_replicas_are_used_evenly_by_every_router_without_shared_prefixes() -> None:
    arrivals = poisson(8.0, 160, orca_lengths, Random(2))
    for router in ROUTERS:
        figures = simulate_fleet(FleetSetup(setup(), 4, router), arrivals)
        assert figures.busy_p5 > 0.8 * figures.busy_p95, router


def test_requests_that_no_replica_accepts_are_counted_as_not_finished() -> None:
    arrivals = [Arrival(0.0, 100, 5), Arrival(0.1, 20_000, 5), Arrival(0.2, 100, 5)]
    figures = simulate_fleet(FleetSetup(setup(), 2), arrivals)
    assert (figures.num_arrived, figures.num_finished) == (3, 2)


def test_copies_of_a_trace_share_no_blocks() -> None:
    arrivals = superposed(chats(10, rate=1.0), 3, Random(0), spread=10.0)
    assert len(arrivals) == 30
    assert [one.at for one in arrivals] == sorted(one.at for one in arrivals)
    assert len({one.blocks[0] for one in arrivals}) == 3 * len(
        {one.blocks[0] for one in chats(10, 1.0)}
    )


def test_what_a_fleet_cannot_simulate_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="router must be one of round-robin"):
        FleetSetup(setup(), 2, "random")
    with pytest.raises(InvalidRequest, match="replicas must be at least 1, not 0"):
        FleetSetup(setup(), 0)
    impatient = [Arrival(0.0, 100, 5, patience=1.0)]
    with pytest.raises(InvalidRequest, match="that no client ends"):
        simulate_fleet(FleetSetup(setup(), 2), impatient)
    with pytest.raises(InvalidRequest, match="without lookahead, KV windows and recurrent states"):
        simulate_fleet(FleetSetup(replace(setup(), num_states=4), 2), [Arrival(0.0, 100, 5)])
    with pytest.raises(InvalidRequest, match="one stage"):
        simulate_fleet(FleetSetup(replace(setup(), stages=2), 2), [Arrival(0.0, 100, 5)])


def test_no_request_is_lost_while_machines_die_and_an_upgrade_rolls_through() -> None:
    arrivals = poisson(8.0, 400, orca_lengths, Random(6))
    plan = OutagePlan(2, {5.0: 3, 12.0: 0}, upgrade_at=8.0, at_once=1, load_seconds=2.0)
    fleet = FleetSetup(setup(), 8, "forecast", outages=plan)
    runs = [run_fleet(replace(fleet, processes=count), arrivals) for count in (1, 3)]
    texts = {json.dumps(figures_of(fleet, arrivals, run).as_json()) for run in runs}
    assert len(texts) == 1
    (run, _), undisturbed = runs, simulate_fleet(replace(fleet, outages=None), arrivals)
    figures = figures_of(fleet, arrivals, run)
    assert figures.num_finished == 400
    assert figures.output_tokens == undisturbed.output_tokens
    assert run.outages is not None
    assert run.outages.num_moved > 0
    assert run.outages.upgraded_at < arrivals[-1].at
    assert 0 < sum(len(each.pauses) for each in run.results) <= run.outages.num_moved
    assert (figures.at("jct", "mean") or 0.0) > (undisturbed.at("jct", "mean") or 0.0)
    assert min(moment.active for moment in run.moments) in (4, 6)


def test_a_request_goes_on_with_the_tokens_that_it_had_when_its_machine_died() -> None:
    plan = OutagePlan(1, {5.0: 0})
    arrivals = [Arrival(0.0, 100, 200), Arrival(20.0, 100, 5)]
    run = run_fleet(FleetSetup(setup(), 2, "least-tokens", outages=plan), arrivals)
    ((pause,),) = [each.pauses for each in run.results]
    assert pause < 0.5
    assert figures_of(FleetSetup(setup(), 2), arrivals, run).num_finished == 2
