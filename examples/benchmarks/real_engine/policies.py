"""Policies and prefix reuse on the real engine, on this machine's CPU, under overload.

A small model with random weights in a worker process, and the engine of the server without HTTP.
Compares mlfq, fair (with one large tenant) and deadline with fcfs, and prefix reuse on sessions of
the Mooncake trace with none. Writes README.md, figures.json and plots; with --only, earlier results
of the other experiments are kept.

    python -m examples.benchmarks.real_engine.policies
        [--only mlfq] [--quick N] [--clock cpu] [--out DIR]
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import numpy
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from engine.simulated.figures import SLO
from engine.simulated.play import Outcome
from examples.benchmarks.real_engine import loads
from examples.benchmarks.real_engine.machine import (
    LARGE,
    TINY,
    Machine,
    circumstances,
    clock_of,
    machine,
    make_model,
)
from examples.benchmarks.real_engine.running import NO_SLO, Run, capacity, measure, measure_in_turns

OUT = Path(__file__).parents[1] / "results" / "real_engine"
Table = list[list[str]]
Results = dict[str, Any]


async def mlfq(
    on: Machine, count: int, calls_of: Callable[[int, float], list[loads.Call]]
) -> tuple[Table, Results]:
    """Mean and tail of JCT by load."""
    calls = calls_of(count, 1.0)
    most = await capacity(on, calls)
    pace = on.cost.compute(1, 64) * 1.5
    slo = SLO(norm=10 * pace)
    rows: Table = [_MLFQ]
    results: Results = {"capacity": most, "slo_seconds_per_token": slo.norm}
    for load in (0.7, 1.2, 1.8):
        for policy in ("fcfs", "mlfq"):
            moved = calls_of(count, most * load)
            run = await measure(on, on.header(policy), moved, slo)
            jct = [one.jct for one in run.played.outcomes]
            rows.append([f"{load:.0%}", policy, *_jct_cells(run, jct)])
            results[f"{policy} {load}"] = {"jct": sorted(jct)} | _summary(run)
    return rows, results


async def three(on: Machine, count: int) -> tuple[Table, Results]:
    """JCT of two policies on three traces, which do not say how long outputs are."""
    machines = [on, await on.twin() if on.is_counted else on]
    rows: Table = [["trace", "policy", *_MLFQ[2:]]]
    results: Results = {}
    for trace, calls_of in THREE.items():
        most = await capacity(on, calls_of(count, 1.0))
        arrivals = loads.with_unknown_lengths(calls_of(count, 1.3 * most))
        slo = SLO(norm=15 * on.cost.compute(1, 64))
        names = ("fcfs", "mlfq")
        runs = await _beside(machines, names, arrivals, slo)
        for policy, run in zip(names, runs, strict=True):
            jct = [one.jct for one in run.played.outcomes]
            rows.append([trace, policy, *_jct_cells(run, jct)])
            results[f"{trace} {policy}"] = {"jct": sorted(jct), "rate": 1.3 * most} | _summary(run)
    return rows, results


async def _beside(
    machines: Sequence[Machine],
    policies: Sequence[str],
    arrivals: Sequence[loads.Call],
    slo: SLO = NO_SLO,
) -> list[Run]:
    """The same arrivals under each policy: in turns with the CPU clock, else one after another."""
    headers = [on.header(name) for on, name in zip(machines, policies, strict=True)]
    if machines[0].is_counted:
        return await measure_in_turns(machines, headers, arrivals, slo)
    both = zip(machines, headers, strict=True)
    return [await measure(on, header, arrivals, slo) for on, header in both]


THREE = {"skewed": loads.skewed, "conversations": loads.azure, "mooncake": loads.mooncake}


def _jct_cells(run: Run, jct: Sequence[float]) -> list[str]:
    figures = run.figures
    cells = [mean(jct), *percentiles(jct, 50, 95, 99), figures.at("ttft", "mean") or 0.0]
    return [f"{cell:.2f}" for cell in (*cells, figures.goodput, figures.throughput)]


_MLFQ = ["load", "policy", "JCT mean s", "p50", "p95", "p99", "TTFT mean s", "good/s", "done/s"]


async def fair(on: Machine, count: int) -> tuple[Table, Results]:
    """TTFT and JCT of four small tenants and of a large one."""
    calls = loads.with_a_large_tenant(count, 1.0)
    rate = 1.6 * await capacity(on, calls)
    rows: Table = [["policy", "tenant", "requests", "TTFT mean s", "p95", "JCT mean s", "p95"]]
    results: Results = {"rate": rate}
    for policy in ("fcfs", "fair"):
        run = await measure(on, on.header(policy), loads.with_a_large_tenant(count, rate))
        for name, is_large in (("small, four", False), ("large, one", True)):
            chosen = [one for one in run.played.outcomes if _tenant(one) == is_large]
            ttft, jct = [one.ttft for one in chosen], [one.jct for one in chosen]
            cells = [mean(ttft), *percentiles(ttft, 95), mean(jct), *percentiles(jct, 95)]
            rows.append([policy, name, str(len(chosen)), *(f"{cell:.2f}" for cell in cells)])
            results[f"{policy} {name}"] = {"ttft": sorted(ttft), "jct": sorted(jct)}
    return rows, results


def _tenant(one: Outcome) -> bool:
    assert isinstance(one.arrival, loads.Call)
    return one.arrival.tenant == "large"


async def deadline(on: Machine, count: int) -> tuple[Table, Results]:
    """The share of requests whose first token meets its deadline."""
    calls = loads.two_kinds(count, 1.0)
    most = await capacity(on, calls)
    rows: Table = [["load", "policy", "all in time", "chats, 0.5 s", "reports, 10 s", "refused"]]
    results: Results = {"capacity": most}
    for load in (0.8, 1.1, 1.5):
        for policy in ("fcfs", "deadline"):
            arrivals = loads.two_kinds(count, most * load)
            run = await measure(on, on.header(policy), arrivals)
            shares = [_in_time(run, arrivals, limit) for limit in (None, 0.5, 10.0)]
            cells = [f"{share:.0%}" for share in shares]
            rows.append([f"{load:.0%}", policy, *cells, str(len(run.played.lost))])
            results[f"{policy} {load}"] = {"in_time": shares, "refused": len(run.played.lost)}
    return rows, results


def _in_time(run: Run, arrivals: Sequence[loads.Call], limit: float | None) -> float:
    """The share in time of all requests with this deadline (None: any); rejected ones are late."""
    wanted = [call for call in arrivals if limit in (None, call.ttft_deadline)]
    num_in_time = 0
    for one in run.played.outcomes:
        assert isinstance(one.arrival, loads.Call)
        deadline = one.arrival.ttft_deadline
        num_in_time += limit in (None, deadline) and one.ttft <= (deadline or 0.0)
    return num_in_time / max(1, len(wanted))


async def prefix(on: Machine, count: int) -> tuple[Table, Results]:
    """TTFT, and the share of prompt tokens found in the prefix cache."""
    calls = loads.mooncake(count, 1.0)
    plain = await capacity(on, calls)
    arrivals = loads.mooncake(count, 0.9 * plain)
    total = sum(call.prompt_len for call in arrivals)
    best = loads.best_hit_rate(arrivals)
    rows: Table = [["KV", "tokens found", "of the best", "TTFT mean s", "p50", "p95", "JCT mean s"]]
    results: Results = {"best_hit_rate": best, "rate": 0.9 * plain}
    whole = on.report.num_blocks
    for name, blocks in (
        ("no reuse", 0),
        ("32,768 slots", whole),
        ("8,192 slots", whole // 4),
    ):
        header = on.header("fcfs", reuses_prefixes=bool(blocks))
        kv = replace(header.kv, num_blocks=blocks or whole)
        run = await measure(on, replace(header, kv=kv), arrivals)
        ttft = [one.ttft for one in run.played.outcomes]
        hit = run.figures.cached_tokens / total
        cells = [mean(ttft), *percentiles(ttft, 50, 95), run.figures.at("jct", "mean") or 0.0]
        shown = [f"{hit:.1%}", f"{hit / best:.0%}", *(f"{cell:.2f}" for cell in cells)]
        rows.append([name, *shown])
        results[name] = {"hit_rate": hit, "ttft": sorted(ttft)}
    return rows, results


def percentiles(samples: Sequence[float], *points: int) -> list[float]:
    return [float(value) for value in numpy.percentile(samples, points)]


def _summary(run: Run) -> Results:
    names = ("goodput", "throughput", "output_rate", "num_preempted", "attainment")
    return {name: getattr(run.figures, name) for name in names}


Experiment = Callable[[Machine, int], Coroutine[Any, Any, tuple[Table, Results]]]
EXPERIMENTS: dict[str, tuple[str, str, Experiment, int]] = {
    "skewed": (
        "mlfq against fcfs, skewed lengths",
        "FastServe's synthetic workload: prompts and answers of 1..256 tokens by Zipf's law "
        "(exponent 1.2), Poisson arrivals, at shares of fcfs's "
        "capacity. Good: at most 15 times a single decode step per token.",
        partial(mlfq, calls_of=loads.skewed),
        200,
    ),
    "mlfq": (
        "mlfq against fcfs, lengths of a chat service",
        "The Azure conversation trace (its first requests; all lengths divided by 8), at shares of "
        "fcfs's capacity; good as above.",
        partial(mlfq, calls_of=loads.azure),
        200,
    ),
    "three": (
        "fcfs and mlfq on three traces",
        "Lengths by Zipf's law, the Azure conversation trace (divided by 8) and sessions of "
        "the Mooncake conversation trace (divided by 32), at 130 % of fcfs's capacity. No policy "
        "knows the length of an output before it ends. With the CPU clock they take turns, "
        "one step each. Good: at most 15 times a single decode step per token.",
        three,
        400,
    ),
    "fair": (
        "fair against fcfs, with one large tenant",
        "Five tenants at 160 % of the machine's capacity; one of them sends 3/4 of all requests.",
        fair,
        200,
    ),
    "deadline": (
        "deadline against fcfs",
        "Half are chats with a TTFT deadline of 0.5 s, half long reports with one of 10 s. "
        "Requests that are rejected at once count as late.",
        deadline,
        160,
    ),
    "prefix": (
        "Prefix reuse",
        "Whole sessions of the Mooncake conversation trace, one in 40, all lengths divided by 32, "
        "so that an id of the trace is one block; at 90 % of the machine's capacity without reuse. "
        "The best: an unbounded cache that holds every prompt from its arrival.",
        prefix,
        295,
    ),
}


def markdown(rows: Table) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def draw(results: Results, path: Path) -> None:
    """The distribution of JCT under both policies, at each load."""
    runs = {
        name: one["jct"] for name, one in results.items() if isinstance(one, dict) and "jct" in one
    }
    loads_seen = sorted({name.split()[1] for name in runs})
    figure = Figure(figsize=(4 * len(loads_seen), 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(loads_seen), squeeze=False)[0]
    for axes, load in zip(panels, loads_seen, strict=True):
        for name in (name for name in runs if name.endswith(load)):
            shares = [(index + 1) / len(runs[name]) for index in range(len(runs[name]))]
            axes.plot(runs[name], shares, label=name.split()[0])
        axes.set(title=f"load {float(load):.0%}", xlabel="JCT, s", xscale="log", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=100)


async def run_all(model: Path, args: argparse.Namespace) -> dict[str, Results]:
    """The results by experiment, each with its section of the page."""
    results = {}
    async with machine(model, args.threads, args.clock == "cpu") as on:
        alone, prompt = on.cost.compute(1, 64) * 1e3, on.cost.compute(256, 0) * 1e3
        where = (
            f"{on.report.num_parameters / 1e6:.0f} M parameters, {args.threads} compute thread(s); "
            f"a single decode step takes {alone:.1f} ms, a prompt of 256 tokens {prompt:.0f} ms. "
            f"{circumstances()}. {clock_of(on.is_counted)}"
        )
        for name in args.only:
            title, text, experiment, count = EXPERIMENTS[name]
            rows, found = await experiment(on, args.quick or count)
            page = f"## {title}\n\n{text}\n\n{markdown(rows)}\n\n{where}"
            results[name] = found | {"page": page}
            print(f"{title}\n{markdown(rows)}\n", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--quick", type=int, metavar="N", help="a tiny model and N requests a run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", TINY if args.quick else LARGE)
        measured = asyncio.run(run_all(model, args))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "figures.json"
    results = (json.loads(path.read_text()) if path.exists() else {}) | measured
    path.write_text(json.dumps(results))
    for name in filter(_is_drawn(results), results):
        draw(results[name], args.out / f"jct_{name}.png")
    (args.out / "README.md").write_text(page_of(results))


def _is_drawn(results: Results) -> Callable[[str], bool]:
    return lambda name: "capacity" in results[name] and name != "deadline"


def page_of(results: Results) -> str:
    """The page, from figures.json."""
    pages, is_drawn = [_HEAD], _is_drawn(results)
    for name in (name for name in EXPERIMENTS if name in results):
        pages.append(results[name]["page"])
        if is_drawn(name):
            pages.append(f"![distribution of JCT](jct_{name}.png)")
    return "\n\n".join(pages) + "\n"


_HEAD = """# Policies on the real engine

`python -m examples.benchmarks.real_engine.policies`: a Llama with random weights, the engine of
the server, requests from the same process without HTTP; batches of 8 requests or 256 tokens. Each
row is one run; the runs alternate."""


if __name__ == "__main__":
    main()
