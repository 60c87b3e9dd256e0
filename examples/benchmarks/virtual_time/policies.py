"""Policies beside first come, first served in virtual time: traces, loads and seeds.

Every run has `--requests` requests of a production trace, from a place that the seed chooses, or of
a distribution. The length of an output is not known before it ends (except to the oracle). Runs
are added to DIR/policies.json, so that the cases can be run one after the other; README.md and
policies.png are written from all that are there (and from DIR/plan_cost.json). `--cases` without a
name only writes these. The production traces are in the folder TRACES (azure_2023_conv.csv.gz,
azure_2023_code.csv.gz, mooncake_conversation.jsonl.gz); without it only the distributions are run.

    python -m examples.benchmarks.virtual_time.policies [--traces TRACES] [--seeds 5]
        [--cases conv code mooncake skewed alike swapping] [--requests 1000] [--out DIR]
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import TypedDict

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from engine.control.admission import Admission, SwapMode
from engine.control.settings import SchedulerSettings
from engine.events import NullObserver
from engine.iteration import Iteration
from engine.policy import ORACLES, Policy, PolicySettings, build
from engine.policy.background import BackgroundLast
from engine.policy.port import Preemption
from engine.ports import Cost
from engine.simulated.catalogue import DEVICES, SHAPES
from engine.simulated.figures import SLO
from engine.simulated.hardware import Deployment
from engine.simulated.replay import with_unknown_lengths
from engine.simulated.run import Setup, simulate
from engine.simulated.trace import Arrival, at_rate, poisson, read_trace, skewed_lengths
from examples.benchmarks.virtual_time.plan_cost import PlanCosts
from examples.benchmarks.virtual_time.plan_cost import table as plan_table

DEVICE = DEVICES["a100-40gb"]
HOST_BYTES = 128 * 2**30
UNBOUNDED = 10**9
MOONCAKE_SCALE = (
    8  # prompts of the Mooncake trace are cut to a part of their length, to fit into memory
)
GOAL = SLO(ttft=5.0, tpot=0.1)
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262, 20: 2.093}  # 95 %, by samples
MOST_LOST = 0.98  # of FCFS's latency over the policy's: the least that a default may have


class Run(TypedDict):
    """One run; latencies in seconds, rates in requests/s."""

    case: str
    load: float
    system: str
    seed: int
    requests: int
    mean: float
    p50: float
    p95: float
    p99: float
    ttft: float  # p99
    throughput: float
    goodput: float
    preempted: int
    swapped: int
    recomputed: int  # tokens
    cached: int  # tokens


@dataclass(frozen=True, slots=True)
class System:
    """A policy with its settings. `preempts`: also when KV has to be dropped for it."""

    name: str
    policy: str
    starvation: float | None = None
    admission: Admission = Admission.GROW
    swap: SwapMode = SwapMode.PROACTIVE
    preempts: bool = False

    def build(self, seats: int, cost: Cost) -> Policy:
        settings = PolicySettings(self.starvation, seats=seats)
        policy = build(self.policy, cost, settings, serves=False)
        if self.preempts:
            assert isinstance(policy, BackgroundLast), "every policy is wrapped"
            policy.inner.preemption = Preemption.ALWAYS  # type: ignore[misc]
        return policy


FCFS = System("fcfs", "fcfs")
MLFQ = System("mlfq", "mlfq", starvation=30.0)
SYSTEMS = (FCFS, MLFQ, System("gittins", "gittins"), System("srpt (oracle)", "srpt"))
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
    whole: bool = False  # every request of the trace, once, whatever the seeds


CASES = {
    "conv": Case("Azure conversations", (5, 6, 8), "azure_2023_conv.csv.gz"),
    "code": Case("Azure code", (6, 8, 12), "azure_2023_code.csv.gz"),
    "mooncake": Case("Mooncake ÷ 8", (4, 6), "mooncake_conversation.jsonl.gz"),
    "skewed": Case("skewed lengths", (8, 12, 20), model="gpt3-13b", seats=16),
    "alike": Case("outputs alike", (9, 11), model="gpt3-13b", seats=16),
    "hour": Case("Azure conversations, whole hour", (5.53,), "azure_2023_conv.csv.gz", whole=True),
    "swapping": Case("split, skewed", (12, 16), model="gpt3-13b", seats=16, systems=SPLIT),
    "swapping-conv": Case("split, conv", (6, 8), "azure_2023_conv.csv.gz", systems=SPLIT),
}


class _Computed(NullObserver):
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
    """The requests of one run, at `load` requests/s."""
    random = Random(seed)
    if not case.trace:
        lengths = (lambda _: (128, 64)) if "alike" in case.name else skewed_lengths()
        return at_rate(poisson(1.0, count, lengths, random), load)
    assert traces is not None, "the case needs --traces"
    whole = read(traces / case.trace)
    if case.whole:
        return at_rate(whole, load)
    start = random.randrange(max(1, len(whole) - count))
    return at_rate(whole[start : start + count], load)


def run(case: Case, load: float, system: System, seed: int, arrivals: Sequence[Arrival]) -> Run:
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
    is_oracle = system.policy in ORACLES
    if system.admission is Admission.GROW and not is_oracle:
        arrivals = with_unknown_lengths(arrivals, 4096)
    setup = Setup(
        label=system.name,
        settings=settings,
        policy=lambda cost: system.build(case.seats, cost),
        cost=hardware.cost(),
        num_slots=hardware.num_slots,
        num_host_slots=int(HOST_BYTES / hardware.shape.kv_bytes),
        slot_seconds=hardware.slot_seconds,
        slo=GOAL,
    )
    computed = _Computed()
    found = simulate(setup, arrivals, computed)
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


# Tables


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval over seeds."""
    if len(samples) < 2:
        return fmean(samples), 0.0
    factor = min(factor for count, factor in STUDENT.items() if count <= len(samples))
    return fmean(samples), factor * stdev(samples) / sqrt(len(samples))


def groups(runs: Sequence[Run]) -> Iterator[tuple[str, float, str, list[Run], list[Run]]]:
    """The runs of each case, load and system, with those of FCFS on the same arrivals."""
    keys = dict.fromkeys((one["case"], one["load"], one["system"]) for one in runs)
    for case, load, system in keys:
        same = [one for one in runs if (one["case"], one["load"]) == (case, load)]
        own = [one for one in same if one["system"] == system]
        base = {one["seed"]: one for one in same if one["system"] == FCFS.name}
        yield case, load, system, own, [base[one["seed"]] for one in own]


def ratios(own: Sequence[Run], base: Sequence[Run], name: str) -> list[float]:
    """FCFS's latency over the policy's, by seed: above 1 is better."""
    return [b[name] / o[name] for o, b in zip(own, base, strict=True)]  # type: ignore[literal-required]


def brief(number: float) -> str:
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


def spread(samples: Sequence[float], form: str = "") -> str:
    mean, half = interval(samples)
    shown = [f"{one:.2f}" if form == "ratio" else brief(one) for one in (mean, half)]
    return " ± ".join(shown) if len(samples) > 1 else shown[0]


def table(runs: Sequence[Run]) -> str:
    lines = [
        "| load | requests/s | policy | mean JCT s | p50 | p95 | p99 | mean against FCFS "
        "| p99 against FCFS | goodput | preempted | swapped | recomputed tokens |",
        "|---" * 13 + "|",
    ]
    for case, load, system, own, base in groups(runs):
        cells = [spread([one[name] for one in own]) for name in ("mean", "p50", "p95", "p99")]
        cells += [f"{spread(ratios(own, base, name), 'ratio')} ×" for name in ("mean", "p99")]
        cells += [brief(fmean(one["goodput"] for one in own))]
        cells += [
            brief(fmean(one[n] for one in own)) for n in ("preempted", "swapped", "recomputed")
        ]
        lines.append(f"| {case} | {load:g} | {system} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sizes(runs: Sequence[Run]) -> str:
    """Requests of a run and number of seeds, by case."""
    lines = []
    for case in dict.fromkeys(one["case"] for one in runs):
        own = [one for one in runs if one["case"] == case]
        seeds = sorted({one["seed"] for one in own})
        which = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else "a single run"
        lines.append(f"- {case}: {own[0]['requests']:,} requests, {which}")
    return "\n".join(lines)


def losses(runs: Sequence[Run], system: str) -> str:
    """The loads at which a policy's mean or p99 is more than 2 % above that of FCFS."""
    lines = [
        "| load | requests/s | mean against FCFS | least of a seed | p99 against FCFS "
        "| least of a seed |",
        "|---" * 6 + "|",
    ]
    for case, load, name, own, base in groups(runs):
        found = [ratios(own, base, latency) for latency in ("mean", "p99")]
        if name == system and min(map(fmean, found)) < MOST_LOST:
            cells = [f"{spread(each, 'ratio')} × | {min(each):.2f} ×" for each in found]
            lines.append(f"| {case} | {load:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Bars of mean and p99 against FCFS, a group for each case and load."""
    figure = Figure(figsize=(14, 8), layout="constrained")
    FigureCanvasAgg(figure)
    found = list(groups(runs))
    places = list(dict.fromkeys((case, load) for case, load, *_ in found))
    systems = [s for s in dict.fromkeys(system for _, _, system, *_ in found) if s != FCFS.name]
    titles = {"mean": "mean completion time", "p99": "p99 of completion time"}
    for axes, (name, title) in zip(figure.subplots(2, 1), titles.items(), strict=True):
        for number, system in enumerate(systems):
            bars = {
                (c, at): interval(ratios(o, b, name)) for c, at, s, o, b in found if s == system
            }
            shown = [places.index(place) for place in bars]
            axes.bar(
                [at + 0.27 * (number - 1) for at in shown],
                [mean for mean, _ in bars.values()],
                0.25,
                yerr=[half for _, half in bars.values()],
                label=system,
            )
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set(title=f"{title}: how many times shorter than under FCFS", yscale="log")
        axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1 = FCFS", "2", "5"])
        axes.yaxis.set_minor_formatter(NullFormatter())
        names = [f"{case}\n{load:g} requests/s" for case, load in places]
        axes.set_xticks(range(len(places)), names, fontsize=8)
        axes.grid(alpha=0.3, axis="y")
        axes.legend()
    figure.savefig(path, format="png", dpi=100)


def report(runs: Sequence[Run], plans: PlanCosts | None = None) -> str:
    main = [one for one in runs if not one["case"].startswith("split")]
    split = [one for one in runs if one["case"].startswith("split")]
    parts = [
        f"""# Policies beside first come, first served, in virtual time

Regenerate with `python -m examples.benchmarks.virtual_time.policies --traces DIR`. One A100-40GB
with 128 GiB of host KV: Llama 3.1 8B with 64 seats for traces, GPT-3 13B with 16 seats for
distributions; prompts of Mooncake are cut to an eighth. A seed chooses the part of the trace or
the samples of the distribution; every policy gets the same arrivals. Cells are means over seeds,
with 95 % intervals where there are several. FCFS allocates KV as it is needed. No policy knows the
length of an output before it ends, except the oracle, which has no bound on waits. Time is
virtual, so that the machine and its load change no figure. In columns "against FCFS" a number
above 1 is better than FCFS: its latency over the policy's.
Goodput: requests/s with a TTFT of at most {GOAL.ttft:g} s and a TPOT of at most {GOAL.tpot:g} s.

{sizes(runs)}

![completion times against FCFS](policies.png)

{table(main)}""",
        f"""## Why `gittins` is not the default

A default may not lose more than 2 % against FCFS, in mean or p99, at any load. `gittins` does at
these:

{losses(main, "gittins")}""",
    ]
    if split:
        parts.append(f"""## FastServe's gain, split

From top to bottom: KV allocated as it is needed instead of reserved (admission), the order of the
queues without preemption for waiting requests (order), and preemption by recomputing, by swapping
when blocks are short, and by swapping ahead of need (swapping).

{table(split)}""")
    if plans:
        parts.append(f"""## What a plan costs

Milliseconds of CPU that the scheduler takes to plan an iteration of 64 requests while others wait:
median (p99) of {plans["plans"]} plans, on one core of an {plans["cpu"]} at a load average of
{plans["load_average"]:.1f}. `python -m examples.benchmarks.virtual_time.plan_cost`

{plan_table(plans)}""")
    return "\n\n".join(parts) + "\n"


def report_on(folder: Path) -> str:
    """The page of the runs and plan costs that are in a folder."""
    costs = folder / "plan_cost.json"
    plans = json.loads(costs.read_text()) if costs.exists() else None
    return report(json.loads((folder / "policies.json").read_text()), plans)


def write(path: Path, runs: Sequence[Run]) -> None:
    """One run a line."""
    path.write_text("[\n" + ",\n".join(json.dumps(one) for one in runs) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, help="folder with the production traces")
    parser.add_argument("--cases", nargs="*", choices=CASES, metavar="CASE", default=list(CASES))
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
        runs = [one for one in runs if one["case"] != case.name]
        for seed in range(1, 2 if case.whole else args.seeds + 1):
            for load in case.loads:
                arrivals = arrivals_of(case, load, seed, args.requests, args.traces)
                runs += [run(case, load, system, seed, arrivals) for system in case.systems]
            write(path, runs)
    places = [case.name for case in CASES.values()]
    runs.sort(key=lambda one: (places.index(one["case"]), one["load"]))
    write(path, runs)
    draw(args.out / "policies.png", [one for one in runs if not one["case"].startswith("split")])
    page = report_on(args.out)
    (args.out / "README.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
