"""Policies and admission modes in virtual time: minutes of load in seconds, without a model.

Scheduler and KV ledger are those of the server; the executor is simulated: each step takes as long
as a cost model predicts. Orca's workload: Poisson arrivals, 32..512 prompt tokens, 1..128 output
tokens.

    python examples/50_compare_policies.py [--rate 6] [--requests 1000] [--slots 4096]
"""

import argparse
from collections.abc import Sequence
from random import Random
from statistics import mean, quantiles

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy import POLICIES, PolicySettings, build
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.play import Outcome, play
from engine.simulated.trace import Arrival, orca_lengths, poisson

COST = CostModel.linear(per_step=0.020, per_token=0.0001, per_slot=1e-7)  # seconds
BLOCK_SIZE = 16


def run(
    policy: str, admission: Admission, num_slots: int, arrivals: Sequence[Arrival]
) -> list[Outcome]:
    """What became of the same arrivals under this policy and admission mode."""
    settings = SchedulerSettings(max_model_len=2048, max_batch_size=32, admission=admission)
    ledger = KVLedger(KVShape(num_slots // BLOCK_SIZE, BLOCK_SIZE))
    cost = LiveCost(COST)
    chosen = build(policy, cost, PolicySettings(seats=settings.max_batch_size))
    scheduler = IterationScheduler(settings, ledger, chosen, cost=cost)
    return play(scheduler, SimulatedExecutor(COST), arrivals)


def row(name: str, outcomes: Sequence[Outcome]) -> str:
    """TTFT in milliseconds, normalized latency in milliseconds per token, mean JCT in seconds."""
    ttft = quantiles((one.ttft * 1e3 for one in outcomes), n=100)
    norm = quantiles((one.normalized_latency * 1e3 for one in outcomes), n=100)
    jct = mean(one.jct for one in outcomes)
    cells = (ttft[49], ttft[98], norm[49], norm[98], jct)
    return f"{name:16}" + "".join(f"{cell:14,.1f}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=4096, help="size of the KV cache in tokens")
    parser.add_argument("--policy", choices=POLICIES, nargs="+", default=["fcfs", "mlfq"])
    args = parser.parse_args()
    arrivals = poisson(args.rate, args.requests, orca_lengths, Random(0))
    print(f"{args.requests} requests at {args.rate}/s, {args.slots:,} slots")
    heads = ("TTFT p50", "TTFT p99", "ms/token p50", "p99", "mean JCT s")
    print(f"{'':16}" + "".join(f"{head:>14}" for head in heads))
    for policy in args.policy:
        for admission in Admission:
            print(row(f"{policy} {admission.value}", run(policy, admission, args.slots, arrivals)))


if __name__ == "__main__":
    main()
