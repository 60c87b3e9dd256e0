import asyncio
from pathlib import Path
from random import Random

import pytest

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy.fcfs import FirstComeFirstServed
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.play import Outcome, play
from engine.simulated.trace import Arrival, orca_lengths, poisson, read_csv
from engine.simulated.virtual_loop import Deadlock, run_virtual

COST = CostModel.linear(per_step=0.02, per_token=0.0001, per_slot=1e-7)


def run(admission: Admission, arrivals: list[Arrival], num_blocks: int = 600) -> list[Outcome]:
    settings = SchedulerSettings(2048, 16, 512, admission)
    scheduler = IterationScheduler(
        settings, KVLedger(KVShape(num_blocks, 16)), FirstComeFirstServed()
    )
    return play(scheduler, SimulatedExecutor(COST), arrivals)


def test_sleeping_takes_no_real_time() -> None:
    async def main() -> float:
        await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 1e6


def test_waiting_without_a_timer_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtual(main())


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    (outcome,) = run(Admission.GROW, [Arrival(1.0, 100, 3)])
    assert outcome.ttft == pytest.approx(0.02 + 100 * 0.0001 + 100e-7)
    assert outcome.jct == pytest.approx(outcome.ttft + 2 * 0.0201 + (101 + 102) * 1e-7)


@pytest.mark.parametrize("admission", Admission)
def test_the_same_inputs_give_the_same_schedule_bit_for_bit(admission: Admission) -> None:
    arrivals = poisson(5, 60, orca_lengths, Random(1))
    first, second = (run(admission, arrivals, num_blocks=120) for _ in range(2))
    assert first == second
    assert len(first) == 60


def test_iteration_level_scheduling_beats_request_level_under_load() -> None:
    arrivals = poisson(8, 150, orca_lengths, Random(2))
    medians = {}
    for admission in (Admission.GROW, Admission.REQUEST):
        latencies = sorted(outcome.normalized_latency for outcome in run(admission, arrivals))
        medians[admission] = latencies[len(latencies) // 2]
    assert medians[Admission.GROW] < medians[Admission.REQUEST] / 2


def test_a_trace_is_read_with_or_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0.5,10,3\n1.25,7,1\n")
    assert list(read_csv(path)) == [Arrival(0.5, 10, 3), Arrival(1.25, 7, 1)]
