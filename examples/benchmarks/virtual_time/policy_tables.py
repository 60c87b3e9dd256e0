"""Tables, plot and page of the runs of `policies` and the plan costs of `plan_cost`."""

import json
from collections.abc import Iterator, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import TypedDict

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from engine.policy.mlfq import STARVATION_SECONDS
from engine.simulated.figures import SLO

BASE = "fcfs"  # the policy that the others are compared with
GOAL = SLO(ttft=5.0, tpot=0.1)
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262, 20: 2.093}  # 95 %, by samples
MAX_PLAN = 2.0  # milliseconds, the goal


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


class TenantRun(TypedDict):
    """One run with a large tenant and four small ones: means and p95 of TTFT and JCT in seconds."""

    load: float
    system: str
    seed: int
    requests: int
    large: dict[str, float]
    small: dict[str, float]


class PlanCosts(TypedDict):
    """Of all policies; `milliseconds` by policy and number of waiting requests."""

    cpu: str
    load_average: float  # of the last minute, when the measurement began
    plans: int
    milliseconds: dict[str, dict[str, dict[str, float]]]


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
        base = {one["seed"]: one for one in same if one["system"] == BASE}
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


def in_common(runs: Sequence[Run]) -> list[Run]:
    """The runs with seeds that all policies of their case have."""
    seeds: dict[str, dict[str, set[int]]] = {}
    for one in runs:
        seeds.setdefault(one["case"], {}).setdefault(one["system"], set()).add(one["seed"])
    common = {case: set.intersection(*found.values()) for case, found in seeds.items()}
    return [one for one in runs if one["seed"] in common[one["case"]]]


def sizes(runs: Sequence[Run]) -> str:
    """Requests of a run and number of seeds, by case."""
    lines = []
    for case in dict.fromkeys(one["case"] for one in runs):
        own = [one for one in runs if one["case"] == case]
        seeds = sorted({one["seed"] for one in own})
        which = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else "a single run"
        lines.append(f"- {case}: {own[0]['requests']:,} requests, {which}")
    return "\n".join(lines)


def overall(runs: Sequence[Run], system: str) -> float:
    """The geometric mean over all loads of a policy's "mean against FCFS"."""
    found = [
        fmean(ratios(own, base, "mean")) for *_, name, own, base in groups(runs) if name == system
    ]
    return geometric_mean(found)


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Bars of mean and p99 against FCFS, a group for each case and load."""
    figure = Figure(figsize=(14, 8), layout="constrained")
    FigureCanvasAgg(figure)
    found = list(groups(runs))
    places = list(dict.fromkeys((case, load) for case, load, *_ in found))
    systems = [s for s in dict.fromkeys(system for _, _, system, *_ in found) if s != BASE]
    titles = {"mean": "mean completion time", "p99": "p99 of completion time"}
    for axes, (name, title) in zip(figure.subplots(2, 1), titles.items(), strict=True):
        for number, system in enumerate(systems):
            bars = {
                (c, at): interval(ratios(o, b, name)) for c, at, s, o, b in found if s == system
            }
            shown = [places.index(place) for place in bars]
            axes.bar(
                [at + 0.8 / len(systems) * (number - (len(systems) - 1) / 2) for at in shown],
                [mean for mean, _ in bars.values()],
                0.75 / len(systems),
                yerr=[half for _, half in bars.values()],
                label=system,
            )
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set(title=f"{title}: how many times shorter than under FCFS", yscale="log")
        axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1 = FCFS", "2", "5"])
        axes.yaxis.set_minor_formatter(NullFormatter())
        names = [
            case.replace(", ", "\n").replace(" ", "\n", 1) + f"\n{load:g} requests/s"
            for case, load in places
        ]
        axes.set_xticks(range(len(places)), names, fontsize=8)
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.grid(alpha=0.3, axis="y")
        axes.legend()
    figure.savefig(path, format="png", dpi=100)


def main_runs(runs: Sequence[Run]) -> list[Run]:
    """Without those of a split gain or of a TTFT goal."""
    return [one for one in runs if not one["case"].startswith(("split", "goal"))]


def report(
    runs: Sequence[Run],
    plans: PlanCosts | None = None,
    tenants: Sequence[TenantRun] = (),
) -> str:
    main = main_runs(runs)
    goal = [one for one in runs if one["case"].startswith("goal")]
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

`mlfq` is what a server does by default: a request that has waited for
{STARVATION_SECONDS:g} s between two iterations runs first. `mlfq, 3 s` has the limit of FastServe's
released code (`--starvation-seconds 3`). It loses less at most loads of Azure code and on outputs
alike; but under overload nearly all requests starve, take turns, and are swapped in and out: on
Azure conversations at 8/s and Mooncake at 6/s the mean is ten times FCFS's. Over all loads of this
table the geometric mean of "mean against FCFS" is {overall(main, "mlfq"):.2f} × with
{STARVATION_SECONDS:g} s and {overall(main, "mlfq, 3 s"):.2f} × with 3 s.

Loads of "of capacity" are shares of the rate at which FCFS finishes the same requests if all are
there at the start. Bursts of the trace fill the queue below that rate already.

Goodput: requests/s with a TTFT of at most {GOAL.ttft:g} s and a TPOT of at most {GOAL.tpot:g} s.

{sizes(in_common(runs))}

![completion times against FCFS](policies.png)

{table(in_common(main))}""",
    ]
    if goal:
        parts.append(f"""## With a TTFT goal

`--ttft-goal {GOAL.ttft:g}` over a policy: requests that can still have their first token in time
run before those that cannot. Under overload goodput is higher, and late requests pay for it.

{table(goal)}""")
    if tenants:
        parts.append(f"""## With fair shares

Skewed lengths; of {tenants[0]["requests"]:,} requests a large tenant sends three quarters, and each
of four small ones a sixteenth. Seconds. Each is a client, so that
fcfs by itself shares seats and the tokens of prompts between them. With `--fair-keys` each tenant
gets an equal share of all tokens, and the policy orders the requests of each.
`python -m examples.benchmarks.virtual_time.tenants`

{tenant_table(tenants)}""")
    if split:
        parts.append(f"""## FastServe's gain, split

From top to bottom: KV allocated as it is needed instead of reserved (admission), the order of the
queues without preemption for waiting requests (order), and preemption by recomputing, by swapping
when blocks are short, and by swapping ahead of need (swapping). The seats are full before the
KV is, so that admission gains nothing here: all that MLFQ gains or loses is order and preemption.

{table(split)}""")
    if plans:
        parts.append(f"""## What a plan costs

CPU milliseconds that the scheduler takes to plan an iteration of 64 requests while others wait:
median (p99) of {plans["plans"]} plans, on one core of an {plans["cpu"]}. The load average was
{plans["load_average"]:.1f} on two cores. {slow_plans(plans)}
`python -m examples.benchmarks.virtual_time.plan_cost`
Plan and commit of 256 decodes, by kind of request: [step_cost.md](step_cost.md).

{plan_table(plans)}""")
    return "\n\n".join(parts) + "\n"


def report_on(folder: Path) -> str:
    """The page of the runs and plan costs that are in a folder."""
    costs = folder / "plan_cost.json"
    plans = json.loads(costs.read_text()) if costs.exists() else None
    path = folder / "tenants.json"
    tenants = json.loads(path.read_text()) if path.exists() else ()
    return report(json.loads((folder / "policies.json").read_text()), plans, tenants)


def tenant_table(runs: Sequence[TenantRun]) -> str:
    lines = [
        "| requests/s | policy | small: TTFT mean | p95 | JCT mean | p95 "
        "| large: TTFT mean | p95 | JCT mean | p95 |",
        "|---" * 10 + "|",
    ]
    for load, system in dict.fromkeys((one["load"], one["system"]) for one in runs):
        own = [one for one in runs if (one["load"], one["system"]) == (load, system)]
        small, large = [one["small"] for one in own], [one["large"] for one in own]
        cells = [spread([one[name] for one in each]) for each in (small, large) for name in each[0]]
        lines.append(f"| {load:g} | {system} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plan_table(costs: PlanCosts) -> str:
    found = costs["milliseconds"]
    counts = [int(count) for count in next(iter(found.values()))]
    lines = [
        "| waiting requests | " + " | ".join(f"{count:,}" for count in counts) + " |",
        "|---" * (len(counts) + 1) + "|",
    ]
    for name, row in found.items():
        cells = [f"{one['median']:.2f} (p99 {one['p99']:.2f})" for one in row.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def slow_plans(costs: PlanCosts) -> str:
    """Which medians and p99 are above the goal of `MAX_PLAN` milliseconds."""
    found = {
        latency: [
            f"`{name}` with {int(count):,} waiting"
            for name, row in costs["milliseconds"].items()
            for count, one in row.items()
            if one[latency] > MAX_PLAN
        ]
        for latency in ("median", "p99")
    }
    above = {latency: ", ".join(names) or "none" for latency, names in found.items()}
    return f"Above {MAX_PLAN:g} ms: medians: {above['median']}; p99: {above['p99']}."
