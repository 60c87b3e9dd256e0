"""What CUDA graphs of steps with pieces of prompts gain, and how far apart their sizes should be.

The costs are those of Llama-3.1-8B on an H200 as in `least_piece`: without such graphs a step with
pieces takes 7 ms longer, which the planner's model has for each piece; with them as long as the
next larger graph, up to 512 tokens. The planner knows the sizes, so that pieces fill a graph;
"unknown" is a planner that does not. Loads: 512 requests at once of 64 tokens with answers of 96,
for 256 seats (`podway bench -c 256`), and the conversations of `least_piece`. Writes
mixed_graphs.json and README.md.

    python -m examples.benchmarks.virtual_time.mixed_graphs [--requests 1000] [--out DIR]
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from engine.cost.model import CostModel
from engine.policy import build
from engine.simulated.executor import KnownCost
from engine.simulated.figures import Figures, summarise
from engine.simulated.play import play_all
from engine.simulated.run import (
    NO_SLO,
    Setup,
    build_executor,
    build_scheduler,
    recorder_of,
)
from engine.simulated.trace import Arrival, poisson
from engine.step import Step
from examples.benchmarks.virtual_time.least_piece import COST, SEED, SETTINGS, lengths
from examples.benchmarks.written import write_results

OUT = Path(__file__).parents[1] / "results" / "mixed_graphs"
LARGEST = 512
STRIDES = (32, 64, 128, 256)
RATES = (6, 12)
PROMPT, ANSWER, BURST = 64, 96, 512


class Eager(CostModel):
    """The price of leaving the graph once a step, however many pieces it has."""

    def step(self, step: Step) -> float:
        once = COST.per_piece if any(len(entry.tokens) > 1 for entry in step.entries) else 0.0
        return replace(COST, per_piece=0.0).step(step) + once


class Way(NamedTuple):
    """How steps with pieces of prompts run: `stride` tokens between graphs, 0 without any."""

    stride: int
    is_known: bool = True  # to the planner

    @property
    def name(self) -> str:
        if not self.stride:
            return "eager"
        return f"graphs every {self.stride}" + ("" if self.is_known else ", unknown")

    def run(self, arrivals: Sequence[Arrival]) -> Figures:
        """The figures of a run; the executor takes what a padded step takes in any case."""
        true, known = Eager.parse(asdict(COST)), COST
        if self.stride:
            sizes = tuple(range(self.stride, LARGEST + 1, self.stride))
            true = replace(COST, per_piece=0.0, graphs=sizes)
            known = true if self.is_known else replace(true, graphs=())
        setup = Setup(self.name, SETTINGS, lambda cost: build("fcfs", cost), true, 400_000)
        recorder = recorder_of(arrivals)
        scheduler = build_scheduler(setup, KnownCost(known), recorder)
        recorder.watch(scheduler)
        played = play_all(scheduler, build_executor(setup, None), arrivals)
        return summarise(setup.label, played, recorder, NO_SLO)


WAYS = (Way(0), *[Way(stride) for stride in STRIDES], Way(64, is_known=False))


def loads(count: int) -> Iterator[tuple[str, list[Arrival]]]:
    """The burst, then conversations at each rate."""
    yield f"{BURST} at once", [Arrival(0.0, PROMPT, ANSWER) for _ in range(BURST)]
    for rate in RATES:
        yield f"{rate} requests/s", poisson(rate, count, lengths, Random(SEED))


def rows(count: int) -> Iterator[dict[str, Any]]:
    """One run for each load and way."""
    for load, arrivals in loads(count):
        for way in WAYS:
            found = way.run(arrivals)
            times = {
                f"{name} {point}": found.at(name, point)
                for name in ("ttft", "itl")
                for point in ("mean", "p99")
            }
            yield {"load": load, "way": way.name, "tokens/s": found.output_rate, **times}


def page(found: list[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        "# What CUDA graphs of steps with pieces of prompts gain",
        "",
        "`python -m examples.benchmarks.virtual_time.mixed_graphs`: virtual time, costs of",
        "Llama-3.1-8B on an H200 ([JSON](mixed_graphs.json)). Eager: a step with any piece of a",
        "prompt takes 7 ms longer, which the planner's model has for each piece. Graphs: it takes",
        "as long as the next larger graph, up to 512 tokens. The planner knows these sizes and",
        "lets a piece fill a graph; unknown: it does not.",
        f"{BURST} at once: prompts of {PROMPT} tokens, answers of {ANSWER}, 256 seats. Requests/s:",
        "conversations, prompts of 16 to 2,048 tokens, answers of 16 to 512.",
        "",
        "| load | steps with pieces | tokens/s | TTFT ms, mean | p99 | ITL ms, mean | p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        names = ("ttft mean", "ttft p99", "itl mean", "itl p99")
        cells = [f"{row[name] * 1e3:.1f}" for name in names]
        line = [row["load"], row["way"], f"{row['tokens/s']:,.0f}", *cells]
        lines.append(f"| {' | '.join(line)} |")
    lines += [
        "",
        "Podway captures every 64. The engine's own time between steps is not part of this. Not",
        "measured on a GPU: neither what such a graph takes, nor the host's share of an eager step",
        "beyond iterations of 256 tokens.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found = [*rows(args.requests)]
    write_results(args.out, found, page)


if __name__ == "__main__":
    main()
