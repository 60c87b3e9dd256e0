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
from engine.policy import build
from engine.research.hardware.catalogue import DEVICES, SHAPES, Deployment
from engine.research.leaping.run import simulate
from engine.simulated import run
from engine.simulated.run import Setup
from engine.simulated.trace import Arrival, orca_lengths, poisson, read_trace, sped_up, steady

AZURE = Path(__file__).parents[3] / "data" / "azure_2023_conv_first_1000.csv.gz"
L4 = Deployment(DEVICES["l4"], SHAPES["llama-3.1-8b"])


def setup(policy: str, num_slots: int, admission: str = "grow") -> Setup:
    settings = SchedulerSettings(16384, 24, 2048, admission=Admission(admission))
    return Setup(
        "run",
        settings,
        partial(build, policy, serves=False),
        L4.cost(),
        num_slots,
        is_oracle=policy == "srpt",
    )


def outcome(setup: Setup, arrivals: list[Arrival]) -> str:
    return json.dumps(simulate(setup, arrivals).as_json())


def outcome_of_single_steps(setup: Setup, arrivals: list[Arrival]) -> str:
    return json.dumps(run.simulate(setup, arrivals).as_json())


@pytest.mark.parametrize("policy", ["fcfs", "mlfq"])
@pytest.mark.parametrize("num_slots", [60_000, 9_000])
def test_leaps_change_no_figure(policy: str, num_slots: int) -> None:
    arrivals = sped_up(read_trace(AZURE)[:28], 0.4)
    leaping = setup(policy, num_slots)
    assert outcome(leaping, arrivals) == outcome_of_single_steps(leaping, arrivals)


@pytest.mark.parametrize("admission", ["reserve", "request"])
def test_leaps_change_no_figure_under_other_admission(admission: str) -> None:
    arrivals = poisson(6.0, 60, orca_lengths, Random(1))
    leaping = setup("fcfs", 4_000, admission)
    assert outcome(leaping, arrivals) == outcome_of_single_steps(leaping, arrivals)


@pytest.mark.parametrize("num_slots", [2_600, 5_000, 40_000])
def test_leaps_change_no_figure_with_shared_prefixes(num_slots: int) -> None:
    """The last block is named 0, so it equals an output of zeros after the blocks before it."""
    random = Random(3)
    chats = [(5,), (5, 0), (6,), (6, 7), (6, 7, 0)]
    arrivals = []
    for number in range(60):
        blocks = random.choice(chats)
        length = 512 * len(blocks) - random.choice((0, 0, 100))
        arrivals.append(Arrival(number / 4, length, random.randint(1, 150), blocks))
    leaping = setup("fcfs", num_slots)
    assert outcome(leaping, arrivals) == outcome_of_single_steps(leaping, arrivals)


def test_a_waiting_request_starts_as_soon_as_it_can_share_a_new_block() -> None:
    """Its prompt continues the first one's prompt with tokens that the first one outputs."""
    arrivals = [Arrival(0.0, 512, 300, (5,)), Arrival(0.5, 600, 4, (5, 0))]
    for num_slots in range(816, 912, 16):
        leaping = setup("fcfs", num_slots, "reserve")
        assert outcome(leaping, arrivals) == outcome_of_single_steps(leaping, arrivals)


def test_arrivals_at_the_very_end_of_a_step_are_added_before_its_commit() -> None:
    second = CostModel.linear(per_step=1.0, per_token=0.0, per_slot=0.0)
    arrivals = steady(0.5, 6, lambda _: (3, 5), Random(0))
    leaping = replace(setup("fcfs", 4_000), cost=second)
    assert outcome(leaping, arrivals) == outcome_of_single_steps(leaping, arrivals)


def test_steps_of_decodes_are_not_planned_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[float] = []
    plan = IterationScheduler.plan

    def counted(self: IterationScheduler, now: float) -> object:
        plans.append(now)
        return plan(self, now)

    monkeypatch.setattr(IterationScheduler, "plan", counted)
    arrivals = [Arrival(0.0, 100, 200), Arrival(1.0, 100, 200), Arrival(2.0, 100, 200)]
    figures = simulate(setup("fcfs", 60_000), arrivals)
    assert figures.num_iterations > 200
    assert len(plans) <= 2 + 2 * len(arrivals)  # those of prompts, and when nothing is left
