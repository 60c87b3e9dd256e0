"""Steps bounded by an ITL goal against fixed token budgets, on mixed traffic.

Chats with short prompts beside documents with long ones, at several rates. A fixed budget
(`--max-batch-tokens`) bounds a step in tokens, `--itl-goal` in predicted seconds. The page gives,
for each limit on the ITL p99, the best goodput (requests/s with a TTFT within the SLO) of any rate
at which the limit holds. In virtual time (an 8B model on an H100), or on the real CPU engine with
--real, whose limits are multiples of its decode step. Writes figures of one of them to
virtual.json or real.json, and README.md and itl_goal.png of both.

    python -m examples.benchmarks.server.itl_goal [--real] [--requests 400] [--out DIR]
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from engine.control.settings import SchedulerSettings
from engine.policy import build
from engine.research.hardware.catalogue import DEVICES, SHAPES, Deployment
from engine.research.leaping.run import simulate
from engine.simulated.figures import SLO, Figures
from engine.simulated.run import Setup
from engine.simulated.trace import at_rate
from examples.benchmarks.real_engine.loads import Call
from examples.benchmarks.real_engine.machine import (
    MEDIUM,
    TINY,
    Machine,
    circumstances,
    machine,
    make_model,
)
from examples.benchmarks.real_engine.running import measure

OUT = Path(__file__).parents[1] / "results" / "itl_goal"
UNBOUNDED = 10**9
Row = dict[str, float | str]


@dataclass(frozen=True, slots=True)
class Bound:
    """A setting: tokens of a step, and an ITL goal in seconds."""

    tokens: int
    goal: float = inf

    def __str__(self) -> str:
        if self.goal == inf:
            return f"budget {self.tokens}"
        return f"goal {1e3 * self.goal:.3g} ms"


def mixed(count: int, scale: int, seed: int = 5) -> list[Call]:
    """Four chats for each document, Poisson arrivals at one per second; `scale` multiplies lengths.

    Chats: 8 to 64 prompt tokens times `scale`, documents: 250 to 1000; outputs 8 to 32 and 2 to 8.
    """
    random, at, calls = Random(seed), 0.0, []
    for _ in range(count):
        at += random.expovariate(1.0)
        is_chat = random.random() < 0.8
        prompt, output = ((8, 64), (8, 32)) if is_chat else ((250, 1000), (2, 8))
        lengths = scale * random.randint(*prompt), scale * random.randint(*output)
        calls.append(Call(at, *lengths))
    return calls


def faster(calls: Sequence[Call], rate: float) -> list[Call]:
    return [replace(c, at=m.at) for c, m in zip(calls, at_rate(calls, rate), strict=True)]


def row_of(bound: Bound, rate: float, figures: Figures) -> Row:
    return {
        "bound": str(bound),
        "is_goal": str(bound.goal < inf),
        "rate": rate,
        "goodput": figures.goodput,
        "attainment": figures.attainment,
        "throughput": figures.throughput,
        "itl_p50_ms": 1e3 * (figures.at("itl", "p50") or 0.0),
        "itl_p99_ms": 1e3 * (figures.at("itl", "p99") or 0.0),
        "ttft_p50_ms": 1e3 * (figures.at("ttft", "p50") or 0.0),
        "ttft_p99_ms": 1e3 * (figures.at("ttft", "p99") or 0.0),
    }


def virtual(count: int) -> dict[str, object]:
    """An 8B model on an H100 in virtual time."""
    hardware = Deployment(DEVICES["h100"], SHAPES["llama-3.1-8b"])
    bounds = [Bound(tokens) for tokens in (128, 256, 512, 2048)]
    bounds += [Bound(2048, goal) for goal in (0.008, 0.01, 0.015, 0.02, 0.03)]
    slo, calls, rows = SLO(ttft=1.0), mixed(count, scale=8), []
    for bound in bounds:
        for rate in (12.0, 18.0, 22.0, 26.0, 30.0):
            setup = Setup(
                label=str(bound),
                settings=SchedulerSettings(
                    max_model_len=16_384,
                    max_batch_size=128,
                    max_batch_tokens=bound.tokens,
                    max_queue_requests=UNBOUNDED,
                    max_queue_tokens=UNBOUNDED,
                    reuses_prefixes=False,
                    itl_goal=bound.goal,
                ),
                policy=lambda cost: build("fcfs", cost),
                cost=hardware.cost(),
                num_slots=hardware.num_slots,
                slo=slo,
            )
            rows.append(row_of(bound, rate, simulate(setup, faster(calls, rate))))
    where = f"Llama-3.1-8B on an H100 in virtual time, {count} requests a run, TTFT within 1 s"
    return {"where": where, "limits_ms": [8, 10, 15, 20, 30], "rows": rows}


async def real(on: Machine, count: int) -> dict[str, object]:
    """The real engine. Rates are shares of what it computes, limits multiples of a decode step."""
    decode = on.cost.compute(1, 64)
    calls = mixed(count, scale=1)
    work = sum(on.cost.compute(c.prompt_len, 0) + c.output_len * decode / 4 for c in calls)
    most, ttft = count / work, 100 * decode
    bounds = [Bound(tokens) for tokens in (16, 32, 64, 256)]
    bounds += [Bound(256, multiple * decode) for multiple in (2, 3, 5)]
    rows: list[Row] = []
    for share in (0.5, 0.75, 1.0):
        for bound in bounds:
            header = on.header("fcfs", max_batch_tokens=bound.tokens, itl_goal=bound.goal)
            run = await measure(on, header, faster(calls, share * most), SLO(ttft=ttft))
            rows.append(row_of(bound, share * most, run.figures))
            print(rows[-1], flush=True)
    where = (
        f"the CPU engine, {on.report.num_parameters / 1e6:.1f} M parameters, a decode step takes "
        f"{1e3 * decode:.2f} ms, batches of 8, {count} requests a run, TTFT within "
        f"{1e3 * ttft:.0f} ms; {circumstances()}"
    )
    limits = [round(1e3 * multiple * decode, 2) for multiple in (2, 3, 4, 5, 8)]
    return {"where": where, "limits_ms": limits, "rows": rows}


def best(rows: Sequence[Row], limit_ms: float, *, is_goal: bool) -> Row | None:
    """The row with the highest goodput whose ITL p99 is within the limit."""
    allowed = [
        row
        for row in rows
        if row["is_goal"] == str(is_goal) and float(row["itl_p99_ms"]) <= limit_ms
    ]
    return max(allowed, key=lambda row: float(row["goodput"]), default=None)


def table(found: dict[str, object]) -> str:
    """For each limit on the ITL p99 the best fixed budget and the best goal."""
    rows, limits = found["rows"], found["limits_ms"]
    assert isinstance(rows, list)
    assert isinstance(limits, list)
    lines = [
        "| ITL p99 at most | best fixed budget | goodput /s | best goal | goodput /s |",
        "|" + "---|" * 5,
    ]
    for limit in limits:
        cells = [f"{limit:g} ms"]
        for is_goal in (False, True):
            row = best(rows, limit, is_goal=is_goal)
            cells += ["none", "0"] if row is None else [str(row["bound"]), f"{row['goodput']:.3g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: dict[str, dict[str, object]], path: Path) -> None:
    """Goodput over the ITL p99 of each setting, a point for each rate."""
    figure = Figure(figsize=(6 * len(results), 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (name, found) in zip(panels, results.items(), strict=True):
        rows = found["rows"]
        assert isinstance(rows, list)
        for bound in dict.fromkeys(row["bound"] for row in rows):
            points = [row for row in rows if row["bound"] == bound]
            axes.plot(
                [row["itl_p99_ms"] for row in points],
                [row["goodput"] for row in points],
                "o-" if points[0]["is_goal"] == "True" else "x:",
                label=bound,
            )
        axes.set(title=name, xlabel="ITL p99, ms", ylabel="goodput, requests/s", xscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=100)


def results_in(out: Path) -> dict[str, dict[str, object]]:
    """The JSON files that are there."""
    return {
        name: json.loads((out / f"{name}.json").read_text())
        for name in ("virtual", "real")
        if (out / f"{name}.json").exists()
    }


def page_of(results: dict[str, dict[str, object]]) -> str:
    pages = [HEAD]
    pages += [
        f"## {name}\n\n{found['where']}.\n\n{table(found)}" for name, found in results.items()
    ]
    return "\n\n".join([*pages, "![goodput over ITL p99](itl_goal.png)\n"])


def write(out: Path) -> None:
    """README.md and the plot, from the JSON files that are there."""
    results = results_in(out)
    draw(results, out / "itl_goal.png")
    (out / "README.md").write_text(page_of(results))


HEAD = """# Steps bounded by time

`python -m examples.benchmarks.server.itl_goal [--real]`: chats with short prompts and, every fifth
request, a document with a long one; fcfs. A fixed budget is `--max-batch-tokens`, a goal
`--itl-goal` with the largest budget. For each limit on the ITL p99 the best goodput at any rate
and setting that keeps it (JSON beside this page)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true", help="on the real engine")
    parser.add_argument("--tiny", action="store_true", help="with --real: a tiny model")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.real:
        with TemporaryDirectory() as scratch:
            model = make_model(Path(scratch) / "model", TINY if args.tiny else MEDIUM)
            found = asyncio.run(run_real(model, args.requests))
    else:
        found = virtual(args.requests)
    (args.out / f"{'real' if args.real else 'virtual'}.json").write_text(
        json.dumps(found, indent=1)
    )
    write(args.out)
    print(table(found))


async def run_real(model: Path, count: int) -> dict[str, object]:
    async with machine(model, threads=1, is_counted=False) as on:
        return await real(on, count)


if __name__ == "__main__":
    main()
