"""CPU milliseconds that the scheduler takes to plan an iteration, by policy and waiting requests.

A batch of 64 runs; whenever an output ends, a waiting request is admitted and a new one arrives, so
that the number of waiting requests stays the same. Prompts have 40 lengths; one output in 20 ends
per iteration, so that policies which learn from ends do so. Writes plan_cost.json, and a table to
the terminal. CPU names the processor in plan_cost.json.

    python -m examples.benchmarks.virtual_time.plan_cost [--waiting 1000 10000 100000]
        [--plans 300] [--cpu CPU] [--out examples/benchmarks/results/policies]
"""

import argparse
import json
import os
import platform
from pathlib import Path
from random import Random
from statistics import median, quantiles
from time import thread_time

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy import POLICIES, PolicySettings, build
from engine.request import RequestSpec
from engine.research.hardware.catalogue import DEVICES, SHAPES, Deployment
from engine.simulated.trace import GREEDY
from engine.step import StepResult
from examples.benchmarks.virtual_time.policy_tables import PlanCosts, plan_table

END = 7
SEATS = 64
LENGTHS = [max(1, round(1.2**power)) for power in range(40)]
ENDING = 0.05  # share of sampled tokens that end an output
WARM_UP = 100  # plans


def measure(policy: str, num_waiting: int, num_plans: int) -> dict[str, float]:
    """CPU milliseconds of `num_plans` plans: the median, the p99 and the longest."""
    random = Random(1)
    cost = LiveCost(Deployment(DEVICES["a100-40gb"], SHAPES["llama-3.1-8b"]).cost())
    settings = SchedulerSettings(
        max_model_len=8192,
        max_batch_size=SEATS,
        max_batch_tokens=2048,
        max_queue_requests=10**9,
        max_queue_tokens=10**12,
        reuses_prefixes=False,
    )
    chosen = build(policy, cost, PolicySettings(seats=SEATS))
    scheduler = IterationScheduler(settings, KVLedger(KVShape(1 << 15, 16)), chosen, cost=cost)
    prompts = [(1,) * length for length in LENGTHS]
    now, taken = 0.0, []

    def arrive(count: int) -> None:
        for _ in range(count):
            tenant, prompt = random.choice("abcdefgh"), random.choice(prompts)
            ends = frozenset({END})
            scheduler.add(RequestSpec(prompt, 2000, GREEDY, end_ids=ends, tenant=tenant), now)

    arrive(num_waiting + SEATS)
    for number in range(WARM_UP + num_plans):
        began = thread_time()
        iteration = scheduler.plan(now)
        seconds = thread_time() - began
        assert iteration is not None, "the queue is not empty"
        if number >= WARM_UP:
            taken.append(1e3 * seconds)
        samples = sum(entry.sample is not None for entry in iteration.step.entries)
        tokens = tuple(END if random.random() < ENDING else 0 for _ in range(samples))
        now += 0.02
        scheduler.commit(iteration, StepResult(iteration.step.step_id, tokens, 0.02), now)
        arrive(tokens.count(END))
    return {"median": median(taken), "p99": quantiles(taken, n=100)[98], "max": max(taken)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--plans", type=int, default=300)
    parser.add_argument("--cpu", default=platform.processor() or platform.machine())
    parser.add_argument("--out", type=Path, default=Path("examples/benchmarks/results/policies"))
    args = parser.parse_args()
    found = PlanCosts(
        cpu=args.cpu,
        load_average=os.getloadavg()[0],
        plans=args.plans,
        milliseconds={
            name: {str(count): measure(name, count, args.plans) for count in args.waiting}
            for name in POLICIES
        },
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "plan_cost.json").write_text(json.dumps(found, indent=1) + "\n")
    print(plan_table(found))


if __name__ == "__main__":
    main()
