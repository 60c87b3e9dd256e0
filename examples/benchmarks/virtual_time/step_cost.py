"""CPU milliseconds that the scheduler takes to plan and to commit an iteration of 256 decodes.

Cases of requests, under each policy: greedy ones; ones with penalties or in JSON mode, whose
outputs are 4,000 tokens long; greedy ones that are planned ahead, while the iteration before is in
flight; and greedy ones while 16 requests wait which share a cached prefix of 100,000 tokens with a
running one, and need more KV blocks than are free. The cases of a policy take turns in one process,
one iteration each, and the policies five times. Writes step_cost.json and step_cost.md. CPU names
the processor.

    python -m examples.benchmarks.virtual_time.step_cost [--plans 300] [--output 4000]
        [--policies fcfs mlfq …] [--cpu CPU] [--out examples/benchmarks/results/policies]
"""

import argparse
import gc
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from time import thread_time
from typing import NamedTuple, TypedDict

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.iteration import Iteration
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy import POLICIES, PolicySettings, build
from engine.request import RequestSpec
from engine.research.hardware.catalogue import DEVICES, SHAPES, Deployment
from engine.simulated.trace import GREEDY
from engine.step import Grammar, GrammarKind, SamplingParams, StepResult
from examples.benchmarks.written import write_files

ROWS = 256
ROUNDS = 5  # of all policies, so that a slow phase of the machine is in one of them
GOAL = 1.0  # milliseconds of a plan and a commit
STEP_SECONDS = 0.02
BLOCK_SIZE = 16
PENALTIES = SamplingParams(frequency_penalty=0.5, presence_penalty=0.5)
JSON_MODE = Grammar(GrammarKind.JSON_OBJECT)
PREFIX = 100_000  # tokens
NUM_WAITING = 16
FEW_STEPS = 300  # until the prefixes of all waiting requests are found


class Case(NamedTuple):
    """What is the same for all running requests, and which others wait."""

    sampling: SamplingParams = GREEDY
    grammar: Grammar | None = None
    is_ahead: bool = False  # planned while the iteration before is in flight
    shares_prefix: bool = False  # requests wait which share a cached prefix


CASES = {
    "greedy": Case(),
    "penalties": Case(PENALTIES),
    "JSON mode": Case(grammar=JSON_MODE),
    "planned ahead": Case(is_ahead=True),
    "shared prefix waits": Case(shares_prefix=True),
}


class Costs(TypedDict):
    """`milliseconds` by policy, case, and which of "plan", "commit" and "both"."""

    cpu: str
    load_average: float  # of the last minute, when the measurement began
    plans: int
    output: int  # tokens that requests with penalties or a grammar had produced
    milliseconds: dict[str, dict[str, dict[str, float]]]


class Run:
    """256 requests of one case under one policy, which run until they are not needed any more."""

    def __init__(self, policy: str, case: Case, num_steps: int) -> None:
        self._now = 0.0
        self._flying: list[Iteration] = []
        self._is_ahead = case.is_ahead
        cost = LiveCost(Deployment(DEVICES["a100-40gb"], SHAPES["llama-3.1-8b"]).cost())
        seats = ROWS + (NUM_WAITING if case.shares_prefix else 0)
        settings = SchedulerSettings(
            max_model_len=1 << 20,
            max_batch_size=seats,
            max_batch_tokens=2048,
            max_queue_requests=10**9,
            max_queue_tokens=10**12,
        )
        growing = ROWS * (2 + num_steps // BLOCK_SIZE)  # blocks
        spare = 2 * ROWS if case.shares_prefix else growing
        blocks = growing + spare + (PREFIX // BLOCK_SIZE if case.shares_prefix else 0)
        self.scheduler = IterationScheduler(
            settings,
            KVLedger(KVShape(blocks, BLOCK_SIZE)),
            build(policy, cost, PolicySettings(seats=seats)),
            cost=cost,
        )
        prefix = tuple(range(PREFIX)) if case.shares_prefix else ()
        for number in range(ROWS):
            prompt = prefix if prefix and not number else (number,) * BLOCK_SIZE
            spec = RequestSpec(prompt, 2 * num_steps, case.sampling, grammar=case.grammar)
            self.scheduler.add(spec, self._now)
        while not all(request.output for request in self.scheduler.pool):
            self.step()
        if case.shares_prefix:
            own = (growing + spare) * BLOCK_SIZE  # of which the running requests have some
            for number in range(NUM_WAITING):
                spec = RequestSpec((*prefix, *[number + 1] * own), 1, GREEDY)
                self.scheduler.add(spec, self._now)

    def step(self) -> tuple[float, float]:
        """One iteration; CPU milliseconds of its plan and its commit."""
        oldest = self._flying[0] if self._flying else None
        began = thread_time()
        iteration = self.scheduler.plan(self._now, oldest)
        planned = thread_time() - began
        assert iteration is not None, "requests are running"
        self._flying.append(iteration)
        if self._is_ahead and len(self._flying) == 1:
            return 1e3 * planned, 0.0
        iteration = self._flying.pop(0)
        num_samples = sum(entry.sample is not None for entry in iteration.step.entries)
        result = StepResult(iteration.step.step_id, (0,) * num_samples, STEP_SECONDS)
        self._now += STEP_SECONDS
        began = thread_time()
        self.scheduler.commit(iteration, result, self._now)
        return 1e3 * planned, 1e3 * (thread_time() - began)


def measure(
    policies: Sequence[str], num_plans: int, output: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Medians of plan, commit and both, and the p99 of both, by policy and case."""
    runs = {policy: _runs(policy, num_plans, output) for policy in policies}
    taken: dict[str, dict[str, list[tuple[float, float]]]] = {
        policy: {case: [] for case in CASES} for policy in policies
    }
    gc.freeze()
    for _ in range(ROUNDS):
        for policy, cases in runs.items():
            for _ in range(num_plans // ROUNDS):
                for case, run in cases.items():
                    taken[policy][case].append(run.step())
    gc.unfreeze()
    return {
        policy: {case: _summary(found) for case, found in row.items()}
        for policy, row in taken.items()
    }


def _runs(policy: str, num_plans: int, output: int) -> dict[str, Run]:
    """One of each case, with outputs that are long enough."""
    runs = {}
    for name, case in CASES.items():
        first = output if case.sampling.reads_output or case.grammar is not None else FEW_STEPS
        run = runs[name] = Run(policy, case, first + num_plans + ROWS)
        for _ in range(first):
            run.step()
    return runs


def _summary(found: list[tuple[float, float]]) -> dict[str, float]:
    both = [plan + commit for plan, commit in found]
    return {
        "plan": median(plan for plan, _ in found),
        "commit": median(commit for _, commit in found),
        "both": median(both),
        "p99": quantiles(both, n=100)[98],
    }


def page(found: Costs) -> str:
    rows = found["milliseconds"]
    cells = [f"{name}, {case}" for name, row in rows.items() for case in above(row)]
    return f"""# What the plan and the commit of 256 decodes cost

CPU milliseconds that the scheduler takes to plan an iteration of {ROWS} decodes and to commit its
result: median (p99) of {found["plans"]} iterations, on one core of an {found["cpu"]}. The load
average was {found["load_average"]:.1f} on two cores.
Requests with penalties and in JSON mode had produced {found["output"]:,} tokens.
*Planned ahead*: while the iteration before is in flight. *Shared prefix waits*: {NUM_WAITING}
requests wait for KV blocks, and share a cached prefix of {PREFIX:,} tokens with a running one.
The cases of a policy take turns, so that each finds the caches of the CPU full of the others' data.
The machine shares its processor with others: in some runs all cases take up to a half longer.
Medians above the goal of {GOAL:g} ms: {_listed(cells)}.
`python -m examples.benchmarks.virtual_time.step_cost`

{table(found)}
"""


def _listed(names: list[str]) -> str:
    return "; ".join(names) or "none"


def above(row: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The cases whose median is above the goal."""
    return [case for case, costs in row.items() if costs["both"] > GOAL]


def table(found: Costs) -> str:
    lines = ["| policy | " + " | ".join(CASES) + " |", "|---" * (len(CASES) + 1) + "|"]
    for name, row in found["milliseconds"].items():
        cells = [f"{row[case]['both']:.2f} (p99 {row[case]['p99']:.2f})" for case in CASES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=300)
    parser.add_argument("--output", type=int, default=4000)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--cpu", default=platform.processor() or platform.machine())
    parser.add_argument("--out", type=Path, default=Path("examples/benchmarks/results/policies"))
    args = parser.parse_args()
    gc.set_threshold(50_000, 20, 10)  # as the server does
    found = Costs(
        cpu=args.cpu,
        load_average=os.getloadavg()[0],
        plans=args.plans,
        output=args.output,
        milliseconds=measure(args.policies, args.plans, args.output),
    )
    write_files(args.out, {"step_cost.json": found, "step_cost.md": page(found)})
    print(table(found))


if __name__ == "__main__":
    main()
