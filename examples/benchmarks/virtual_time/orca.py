"""Orca's headline in virtual time: GPT-3 175B on 16 A100s, request level against iteration level.

Orca (OSDI 2022, section 6): prompts of 32..512 and answers of 1..128 tokens, both uniform,
Poisson arrivals; how many requests a second at a median of 190 ms per output token? Writes
README.md, orca.json and orca.png. About ten minutes.

    python -m examples.benchmarks.virtual_time.orca
        [--out examples/benchmarks/results/orca] [--requests 600]
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler, SchedulerSettings
from engine.kv.ledger import KVLedger
from engine.policy.fcfs import FirstComeFirstServed
from engine.simulated.capacity import highest_load
from engine.simulated.catalogue import DEVICES, SHAPES
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.figures import Figures, summarise
from engine.simulated.hardware import Deployment
from engine.simulated.play import Outcome, PlayResult, play_all
from engine.simulated.record import Recorder
from engine.simulated.run import NO_SLO
from engine.simulated.trace import Arrival, at_rate, orca_lengths, poisson

LIMIT = 0.190  # seconds a token, median
PAPER = {"request": 0.185, "iteration": 6.81}  # requests/s
PAPERS_HARDWARE = Deployment(DEVICES["a100-40gb"], SHAPES["gpt3-175b"], stages=2, ranks=8)
UNBOUNDED = 10**9


@dataclass(frozen=True, slots=True)
class System:
    """A way to batch. `together`: an answer is handed over when its whole batch is done."""

    name: str
    admission: Admission
    max_batch_size: int
    together: bool = False


SYSTEMS = (
    System("request level (1, 1)", Admission.REQUEST, 1, together=True),
    System("request level (8, 8)", Admission.REQUEST, 8, together=True),
    System("request level (32, 32)", Admission.REQUEST, 32, together=True),
    System("request level (8, 8), early answers", Admission.REQUEST, 8),
    System("iteration level, max_bs 8", Admission.RESERVE, 8),
    System("iteration level, max_bs 16", Admission.RESERVE, 16),
    System("iteration level, max_bs 32", Admission.RESERVE, 32),
    System("iteration level, max_bs 64", Admission.RESERVE, 64),
)


@dataclass(frozen=True, slots=True)
class Found:
    """The highest load of a system within the limit (0: none), and all runs of the search."""

    system: System
    rate: float
    runs: Sequence[Figures]


def run(system: System, hardware: Deployment, arrivals: Sequence[Arrival]) -> Figures:
    """One load on one system. No chunks of prompts, no reuse of prefixes, as in the paper."""
    settings = SchedulerSettings(
        max_model_len=2048,
        max_batch_size=system.max_batch_size,
        max_batch_tokens=UNBOUNDED,
        admission=system.admission,
        max_queue_requests=UNBOUNDED,
        max_queue_tokens=UNBOUNDED,
        reuses_prefixes=False,
    )
    recorder = Recorder(period=10.0)
    ledger = KVLedger(hardware.num_slots, block_size=1)
    scheduler = IterationScheduler(settings, ledger, FirstComeFirstServed(), recorder)
    recorder.watch(scheduler)
    played = play_all(scheduler, SimulatedExecutor(hardware.cost(), hardware.stages), arrivals)
    if system.together:
        played = PlayResult(handed_over_together(played.outcomes), played.lost)
    return summarise(system.name, played, recorder, NO_SLO)


def handed_over_together(fared: Sequence[Outcome]) -> list[Outcome]:
    """The same requests, each ending with the last request of its batch (those that started
    together)."""
    ends: dict[float, float] = {}
    for one in fared:
        end = one.arrival.at + one.jct
        ends[one.admitted_at] = max(end, ends.get(one.admitted_at, 0.0))
    return [replace(one, jct=ends[one.admitted_at] - one.arrival.at) for one in fared]


def search(system: System, hardware: Deployment, arrivals: Sequence[Arrival]) -> Found:
    """The highest rate at which the median stays within the limit."""
    runs: list[Figures] = []

    def holds(rate: float) -> bool:
        runs.append(run(system, hardware, at_rate(arrivals, rate)))
        return median(runs[-1]) <= LIMIT

    start = 0.25 if system.admission is Admission.REQUEST else 4.0
    return Found(system, highest_load(holds, start, tolerance=0.02), runs)


def median(figures: Figures) -> float:
    return figures.at("norm", "p50") or 0.0


def papers_slowdown(arrivals: Sequence[Arrival]) -> float:
    """How much slower than the roofline an engine is that gives the paper's baseline figure."""
    slow = at_rate(arrivals, PAPER["request"])

    def holds(slowdown: float) -> bool:
        hardware = replace(PAPERS_HARDWARE, slowdown=slowdown)
        return median(run(SYSTEMS[0], hardware, slow)) <= LIMIT

    return highest_load(holds, start=1.5, tolerance=0.01)


def best(found: Sequence[Found], is_baseline: bool) -> Found:
    """The highest rate among the request-level systems, or among the others."""
    kind = [one for one in found if (one.system.admission is Admission.REQUEST) == is_baseline]
    return max(kind, key=lambda one: one.rate)


def draw(title: str, axes: object, found: Sequence[Found]) -> None:
    """Median normalized latency against load; the dashed line is the limit."""
    for one in found:
        runs = sorted(one.runs, key=lambda figures: figures.offered)
        runs = [figures for figures in runs if median(figures) < 10 * LIMIT]
        style = "--" if one.system.admission is Admission.REQUEST else "-"
        axes.plot(  # type: ignore[attr-defined]
            [figures.offered for figures in runs],
            [median(figures) * 1e3 for figures in runs],
            style,
            marker=".",
            label=one.system.name,
        )
    axes.axhline(LIMIT * 1e3, color="black", linestyle=":")  # type: ignore[attr-defined]
    axes.set(  # type: ignore[attr-defined]
        title=title, xlabel="requests/s", ylabel="median ms a token", xscale="log", yscale="log"
    )
    axes.grid(alpha=0.3)  # type: ignore[attr-defined]


def table(found: Sequence[Found]) -> str:
    base = next(one.rate for one in found if one.system == SYSTEMS[0])
    lines = ["| system | requests/s at 190 ms | against (1, 1) |", "|---|---|---|"]
    for one in found:
        ratio = f"{one.rate / base:.1f} ×" if base else "-"
        lines.append(f"| {one.system.name} | {one.rate:.3g} | {ratio} |")
    return "\n".join(lines)


def report(roofline: Sequence[Found], fitted: Sequence[Found], slowdown: float) -> str:
    """The page beside the numbers. The prose says what the tables above it can be held to."""
    kept = PAPERS_HARDWARE.efficiency
    lone = PAPERS_HARDWARE.cost().compute(1, 272) * 1e3
    ours, base, rival = best(fitted, False), fitted[0], best(fitted, True)
    ideal = best(roofline, False)
    return f"""# Orca's headline in simulation

GPT-3 175B in fp16 on 16 A100-40GB (2 stages × 8 ranks); prompts uniform in 32..512 tokens,
answers uniform in 1..128 tokens, Poisson arrivals; requests a second at a median of 190 ms per
output token. The paper measured {PAPER["request"]} (request level, FasterTransformer behind Triton)
against {PAPER["iteration"]} (iteration level): 36.9 ×.

Regenerate with `python -m examples.benchmarks.virtual_time.orca`.
Scheduler, ledger and loop are the ones
that serve; only the executor answers after the seconds of a cost model. Every load is played to
the last token of its last request, and found to within 2 %.

## On the roofline of the hardware

{table(roofline)}

## With one constant fitted to the paper's baseline

Every second is stretched by {slowdown:.2f}, so that request level (1, 1) carries the paper's
{PAPER["request"]} requests/s. Nothing else is fitted.

{table(fitted)}

![median latency against load](orca.png)

Best iteration level: **{ours.rate:.3g} requests/s, {ours.rate / base.rate:.1f} × request level
(1, 1)** ({ours.system.name}); on the roofline {ideal.rate / roofline[0].rate:.1f} ×;
the paper 36.9 ×.
Against our best request-level row ({rival.system.name}) it is {ours.rate / rival.rate:.1f} ×.

## What the cost model assumes

- An iteration takes the longer of reading 350 GB of weights ({kept.memory:.0%} of 1,555 GB/s on
  each of 8 ranks, one stage after the other) and multiplying ({kept.compute:.0%} of 312 TFLOP/s).
- To that come two all-reduces a layer at {kept.link:.0%} of NVLink's 300 GB/s per direction, the
  hand-over at {kept.link:.0%} of 200 Gb/s per GPU, {kept.per_layer * 1e6:.0f} µs a layer,
  {kept.per_collective * 1e6:.0f} µs a collective, {kept.per_step * 1e3:.1f} ms a step.
- Attention reads 4.7 MB per slot in decodes, and multiplies at {kept.attention:.0%} in prefills.
- One token of a lone request takes {lone:.0f} ms. {PAPERS_HARDWARE.num_slots:,} slots fit beside
  the weights; a request reserves prompt + answer, as in the paper.
- The two stages take equal shares; there is no jitter, and planning takes no time.

## Why it differs from the paper

- *The engines of 2022 were further from the roofline.* With nothing fitted both figures are
  about twice the paper's; their ratio is what the scheduler answers for.
- *Larger batches at request level do better here than 0.185 leaves room for*; the paper's best
  settings were (1, 1) and (8, 8). Ours shares the reading of the weights ideally, forms batches
  without waiting and pads nothing. Answers are handed over when their batch is done, as
  FasterTransformer did; the row "early answers" shows what that alone costs.
- *The same kernels run on both sides.* The paper's engine also gained from its control plane
  (47 % over FasterTransformer's engine at this size), which one slowdown for both leaves out.
- *A larger `max_bs` stops helping*: prompts are computed whole, beside the decodes, and every
  stream of the iteration waits for them. From there on arithmetic is the limit, not batching.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("examples/benchmarks/results/orca"))
    parser.add_argument("--requests", type=int, default=600)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    arrivals = poisson(1.0, args.requests, orca_lengths, Random(0))
    slowdown = papers_slowdown(arrivals)
    figure = Figure(figsize=(14, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    results = []
    for factor, axes in zip((1.0, slowdown), panels, strict=True):
        hardware = replace(PAPERS_HARDWARE, slowdown=factor)
        found = [search(system, hardware, arrivals) for system in SYSTEMS]
        print(f"every second × {factor:.2f}\n{table(found)}\n")
        draw(f"every second × {factor:.2f}", axes, found)
        results.append(found)
    panels[0].legend()
    figure.savefig(args.out / "orca.png", format="png", dpi=110)
    (args.out / "orca.json").write_text(json.dumps(as_json(results, slowdown), indent=1))
    (args.out / "README.md").write_text(report(results[0], results[1], slowdown))


def as_json(results: Sequence[Sequence[Found]], slowdown: float) -> dict[str, object]:
    """Per factor and system: the rate found, and (requests/s, median seconds) of every run."""
    return {
        f"slowdown {factor:.3f}": {
            one.system.name: {
                "requests_per_second": one.rate,
                "curve": sorted((run.offered, median(run)) for run in one.runs),
            }
            for one in found
        }
        for factor, found in zip((1.0, slowdown), results, strict=True)
    }


if __name__ == "__main__":
    main()
