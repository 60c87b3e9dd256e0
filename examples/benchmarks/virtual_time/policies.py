"""Policies beside first come, first served in virtual time: traces, loads and seeds.

Every run has `--requests` requests of a production trace, from a place that the seed chooses, or of
a distribution. The length of an output is not known before it ends (except to the oracle). Runs
are added to DIR/policies.json, so that the cases can be run one after the other; README.md and
policies.png are written from all that are there (and from DIR/plan_cost.json). `--cases` without a
name only writes these. The production traces are in the folder TRACES (azure_2023_conv.csv.gz,
azure_2023_code.csv.gz, mooncake_conversation.jsonl.gz); without it only the distributions are run.

    python -m examples.benchmarks.virtual_time.policies [--traces TRACES] [--seeds 5]
        [--cases conv code mooncake skewed alike prefixes] [--systems mlfq] [--requests 1000]
        [--out DIR]
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

from engine.control.admission import Admission, SwapMode
from engine.control.settings import SchedulerSettings
from engine.iteration import Iteration, Observer
from engine.policy import Policy, PolicySettings, build
from engine.policy.base import BackgroundLast, Preemption
from engine.ports import Cost
from engine.request import RequestSpec
from engine.research.hardware.catalogue import DEVICES, SHAPES, Deployment
from engine.research.leaping.run import simulate
from engine.research.policies import ORACLES
from engine.simulated.replay import END, RecordedRequest
from engine.simulated.run import Setup
from engine.simulated.trace import (
    GREEDY,
    SHARED_BLOCK,
    Arrival,
    at_rate,
    poisson,
    read_trace,
    skewed_lengths,
)
from examples.benchmarks.virtual_time.policy_tables import (
    BASE,
    GOAL,
    Run,
    TenantRun,
    draw,
    main_runs,
    report_on,
)

DEVICE = DEVICES["a100-40gb"]
HOST_BYTES = 128 * 2**30
UNBOUNDED = 10**9
AT_ONCE = 1e6  # requests/s
MOONCAKE_SCALE = (
    8  # prompts of the Mooncake trace are cut to a part of their length, to fit into memory
)


@dataclass(frozen=True, slots=True)
class System:
    """A policy with its settings. `preempts`: also when KV has to be dropped for it."""

    name: str
    policy: str
    starvation: float | None = None
    admission: Admission = Admission.GROW
    swap: SwapMode = SwapMode.PROACTIVE
    preempts: bool = False
    ttft_goal: float = 0.0
    fair_keys: bool = False

    def build(self, seats: int, cost: Cost) -> Policy:
        settings = PolicySettings(
            self.starvation, seats=seats, ttft_goal=self.ttft_goal, fair_keys=self.fair_keys
        )
        policy = build(self.policy, cost, settings, serves=False)
        if self.preempts:
            assert isinstance(policy, BackgroundLast), "every policy is wrapped"
            policy.inner.preemption = Preemption.ALWAYS  # type: ignore[misc]
        return policy


FCFS = System(BASE, "fcfs")
MLFQ = System("mlfq", "mlfq", starvation=30.0)
MLFQ_3 = System("mlfq, 3 s", "mlfq", starvation=3.0)  # FastServe's released code
SYSTEMS = (FCFS, MLFQ, MLFQ_3, System("srpt (oracle)", "srpt"))
WITH_GOAL = (
    FCFS,
    replace(FCFS, name="fcfs, TTFT goal", ttft_goal=GOAL.ttft or 0.0),
)
SPLIT = (
    System("fcfs, KV reserved (Orca)", "fcfs", admission=Admission.RESERVE),
    FCFS,
    replace(MLFQ, name="mlfq, no preemption", swap=SwapMode.OFF),
    replace(MLFQ, name="mlfq, recompute", swap=SwapMode.OFF, preempts=True),
    replace(MLFQ, name="mlfq, reactive swap", swap=SwapMode.REACTIVE),
    MLFQ,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of load on one accelerator, with its maximum batch size (`seats`)."""

    name: str
    loads: tuple[float, ...]
    trace: str = ""  # of the folder of traces; "" for a distribution
    model: str = "llama-3.1-8b"
    seats: int = 64
    systems: tuple[System, ...] = SYSTEMS
    of_capacity: bool = False  # loads are shares of what FCFS finishes of the same requests if all
    # are there at the start


CASES = {
    "conv": Case("Azure conversations", (5, 6, 8), "azure_2023_conv.csv.gz"),
    "code": Case("Azure code", (6, 8, 12), "azure_2023_code.csv.gz"),
    "code-capacity": Case(
        "Azure code, of capacity",
        (0.7, 1.0, 1.3),
        "azure_2023_code.csv.gz",
        of_capacity=True,
    ),
    "mooncake": Case("Mooncake ÷ 8", (4, 6), "mooncake_conversation.jsonl.gz"),
    "skewed": Case("skewed lengths", (8, 12, 20), model="gpt3-13b", seats=16),
    "alike": Case("outputs alike", (9, 11), model="gpt3-13b", seats=16),
    "goal": Case("goal, skewed lengths", (12, 20), model="gpt3-13b", seats=16, systems=WITH_GOAL),
    "goal-conv": Case(
        "goal, Azure conversations", (6, 8), "azure_2023_conv.csv.gz", systems=WITH_GOAL
    ),
    "swapping": Case("split, skewed", (12, 16), model="gpt3-13b", seats=16, systems=SPLIT),
    "swapping-conv": Case("split, conv", (6, 8), "azure_2023_conv.csv.gz", systems=SPLIT),
}


class _Computed(Observer):
    """Counts the tokens that iterations computed."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def committed(self, iteration: Iteration, seconds: float, now: float) -> None:
        self.num_tokens += iteration.step.num_tokens


@cache
def read(path: Path) -> list[Arrival]:
    arrivals = read_trace(path)
    if "mooncake" not in path.name:
        return arrivals
    short = [replace(one, prompt_len=max(1, one.prompt_len // MOONCAKE_SCALE)) for one in arrivals]
    return [replace(one, blocks=one.blocks[: -(-one.prompt_len // 512)]) for one in short]


def arrivals_of(
    case: Case, load: float, seed: int, count: int, traces: Path | None
) -> list[Arrival]:
    """The requests of one run, at `load` requests/s, or that share of the capacity."""
    random = Random(seed)
    if not case.trace:
        lengths = (lambda _: (128, 64)) if "alike" in case.name else skewed_lengths()
        return at_rate(poisson(1.0, count, lengths, random), load)
    assert traces is not None, "the case needs --traces"
    whole = read(traces / case.trace)
    start = random.randrange(max(1, len(whole) - count))
    part = whole[start : start + count]
    if case.of_capacity:
        load *= run(case, load, FCFS, seed, at_rate(part, AT_ONCE))["throughput"]
    return at_rate(part, load)


def with_unknown_lengths(arrivals: Sequence[Arrival], max_model_len: int) -> list[RecordedRequest]:
    """The same requests with one `max_tokens` for all, as far as the context allows; the outputs
    end by themselves. A policy that uses `max_tokens` does not know their lengths then."""
    longest = max((arrival.output_len for arrival in arrivals), default=1)
    found = []
    for number, arrival in enumerate(arrivals):
        if isinstance(arrival, RecordedRequest):
            found.append(arrival)
            continue
        max_tokens = max(arrival.output_len, min(longest, max_model_len - arrival.prompt_len))
        found.append(
            RecordedRequest(
                at=arrival.at,
                prompt_len=arrival.prompt_len,
                output_len=arrival.output_len,
                patience=arrival.patience,
                params=RequestSpec((), max_tokens, GREEDY, end_ids=frozenset({END})),
                names=arrival.blocks,
                block_size=SHARED_BLOCK,
                number=number,
                ends_after=arrival.output_len,
            )
        )
    return found


def setup_of(case: Case, system: System) -> Setup:
    """The simulated accelerator of a case, under a policy."""
    hardware = Deployment(DEVICE, SHAPES[case.model])
    settings = SchedulerSettings(
        max_model_len=32_768,
        max_batch_size=case.seats,
        max_batch_tokens=2048,
        max_queue_requests=UNBOUNDED,
        max_queue_tokens=UNBOUNDED,
        admission=system.admission,
        swap=system.swap,
        reuses_prefixes="mooncake" in case.trace,
    )
    return Setup(
        label=system.name,
        settings=settings,
        policy=lambda cost: system.build(case.seats, cost),
        cost=hardware.cost(),
        num_slots=hardware.num_slots,
        num_host_slots=int(HOST_BYTES / hardware.shape.kv_bytes),
        slot_seconds=hardware.slot_seconds,
        slo=GOAL,
    )


def run(case: Case, load: float, system: System, seed: int, arrivals: Sequence[Arrival]) -> Run:
    is_oracle = system.policy in ORACLES
    if system.admission is Admission.GROW and not is_oracle:
        arrivals = with_unknown_lengths(arrivals, 4096)
    computed = _Computed()
    found = simulate(setup_of(case, system), arrivals, computed)
    assert found.num_finished == len(arrivals), "every request is served to its end"
    needed = sum(one.prompt_len + one.output_len - 1 for one in arrivals) - found.cached_tokens
    return Run(
        case=case.name,
        load=load,
        system=system.name,
        seed=seed,
        requests=len(arrivals),
        mean=found.at("jct", "mean") or 0.0,
        p50=found.at("jct", "p50") or 0.0,
        p95=found.at("jct", "p95") or 0.0,
        p99=found.at("jct", "p99") or 0.0,
        ttft=found.at("ttft", "p99") or 0.0,
        throughput=found.throughput,
        goodput=found.goodput,
        preempted=found.num_preempted,
        swapped=found.num_swapped,
        recomputed=max(0, computed.num_tokens - needed),
        cached=found.cached_tokens,
    )


def write(path: Path, runs: Sequence[Run] | Sequence[TenantRun]) -> None:
    """One run a line."""
    path.write_text("[\n" + ",\n".join(json.dumps(one) for one in runs) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, help="folder with the production traces")
    parser.add_argument("--cases", nargs="*", choices=CASES, metavar="CASE", default=list(CASES))
    parser.add_argument("--systems", nargs="*", metavar="SYSTEM", help="run only these again")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("examples/benchmarks/results/policies"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "policies.json"
    runs: list[Run] = json.loads(path.read_text()) if path.exists() else []
    for name in args.cases:
        case = CASES[name]
        if case.trace and args.traces is None:
            continue
        chosen = [one for one in case.systems if args.systems is None or one.name in args.systems]
        names = {one.name for one in chosen}
        runs = [one for one in runs if one["case"] != case.name or one["system"] not in names]
        for seed in range(1, args.seeds + 1):
            for load in case.loads:
                arrivals = arrivals_of(case, load, seed, args.requests, args.traces)
                runs += [run(case, load, system, seed, arrivals) for system in chosen]
            write(path, runs)
    places = [case.name for case in CASES.values()]
    order = [(case.name, one.name) for case in CASES.values() for one in case.systems]
    runs.sort(
        key=lambda one: (
            places.index(one["case"]),
            one["load"],
            one["seed"],
            order.index((one["case"], one["system"])),
        )
    )
    write(path, runs)
    draw(args.out / "policies.png", main_runs(runs))
    page = report_on(args.out)
    (args.out / "README.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
