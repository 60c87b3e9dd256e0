"""How a server plans whose iterations were not measured (`--cost-model none`).

The cost model is learned while serving. Conversations in virtual time: those of `least_piece` on an
H200 whose steps with pieces of prompts run eagerly or in CUDA graphs, and short ones on a CPU. The
time of an iteration varies by 15 %, and one of a hundred takes four times as long. Compared are the
true model, what was learned before models were fitted to iterations, and what is learned now.
Writes learned_cost.json and README.md.

    python -m examples.benchmarks.virtual_time.learned_cost [--requests 300] [--out DIR]
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

from engine.cost import live
from engine.cost.live import LiveCost
from engine.cost.model import UNMEASURED, CostModel
from engine.policy import build
from engine.simulated.figures import Figures, summarise
from engine.simulated.play import play_all
from engine.simulated.run import NO_SLO, Setup, build_executor, build_scheduler, recorder_of
from engine.simulated.trace import Arrival, poisson
from engine.step import Step
from examples.benchmarks.virtual_time.least_piece import COST, SEED, SETTINGS, lengths
from examples.benchmarks.written import write_results

OUT = Path(__file__).parents[1] / "results" / "learned_cost"
SPREAD, STALLS, STALL = 0.15, 0.01, 4.0
GRAPHS = replace(COST, per_piece=0.0, graphs=tuple(range(64, 513, 64)))
CPU = CostModel(
    ((1, 0.03), (8, 0.035), (64, 0.15), (512, 1.1)), per_slot=1e-7, per_pair=2e-9, per_draw=1e-4
)
NEVER = 1 << 60


@dataclass(frozen=True)
class Noisy(CostModel):
    """Times that vary; the price of leaving a graph is paid once a step, however many pieces."""

    random: Random = field(default_factory=lambda: Random(SEED))

    @classmethod
    def like(cls, model: CostModel) -> "Noisy":
        return cls(**{each.name: getattr(model, each.name) for each in fields(CostModel)})

    def step(self, step: Step) -> float:
        pieces = sum(len(entry.tokens) > 1 for entry in step.entries)
        seconds = super().step(step) - self.per_piece * max(0, pieces - 1)
        stalls = STALL if self.random.random() < STALLS else 1.0
        return seconds * stalls * self.random.lognormvariate(0.0, SPREAD)


class Case(NamedTuple):
    """Hardware, and requests per second."""

    name: str
    cost: CostModel
    rate: float

    def arrivals(self, count: int) -> list[Arrival]:
        return poisson(self.rate, count, short if self.cost is CPU else lengths, Random(SEED))


CASES = (
    Case("H200, eager, 4/s", COST, 4),
    Case("H200, eager, 12/s", COST, 12),
    Case("H200, graphs, 12/s", GRAPHS, 12),
    Case("CPU, 0.3/s", CPU, 0.3),
)
WAYS = ("the true model", "learned without fits", "learned")


def short(random: Random) -> tuple[int, int]:
    return random.randint(16, 512), random.randint(16, 64)


def run(case: Case, way: str, count: int) -> Figures:
    """The figures of a server that begins with the true model, or with the one of no machine."""
    first = case.cost if way == WAYS[0] else replace(UNMEASURED, graphs=case.cost.graphs)
    fits_after = live.FIRST_FIT if way == WAYS[2] else NEVER
    arrivals = case.arrivals(count)
    true = Noisy.like(case.cost)
    setup = Setup(way, SETTINGS, lambda cost: build("fcfs", cost), true, 400_000)
    recorder = recorder_of(arrivals)
    with patch.object(live, "FIRST_FIT", fits_after):
        scheduler = build_scheduler(setup, LiveCost(first), recorder)
    recorder.watch(scheduler)
    return summarise(
        way, play_all(scheduler, build_executor(setup, None), arrivals), recorder, NO_SLO
    )


def rows(count: int) -> Iterator[dict[str, Any]]:
    for case in CASES:
        for way in WAYS:
            found = run(case, way, count)
            times = {
                f"{name} {point}": found.at(name, point)
                for name in ("ttft", "itl")
                for point in ("mean", "p99")
            }
            yield {"case": case.name, "way": way, "tokens/s": found.output_rate, **times}


def page(found: list[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        "# Serving without a measured cost model",
        "",
        "`python -m examples.benchmarks.virtual_time.learned_cost`: virtual time, `--cost-model",
        "none` ([JSON](learned_cost.json)). The first model says 1 ms for a token and nothing for",
        "a piece of a prompt. Eager steps of the H200 cost 7 ms more with any piece. Times vary by",
        "15 %, and one iteration of a hundred takes four times as long.",
        "",
        "| | cost model | tokens/s | TTFT ms, mean | p99 | ITL ms, mean | p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        names = ("ttft mean", "ttft p99", "itl mean", "itl p99")
        cells = [f"{row[name] * 1e3:,.1f}" for name in names]
        line = [row["case"], row["way"], f"{row['tokens/s']:,.0f}", *cells]
        lines.append(f"| {' | '.join(line)} |")
    lines += [
        "",
        "Without fits the price of a piece is ascribed to its tokens: pieces get short, which",
        "makes them dearer, and no longer one is tried. A model that is fitted to iterations tells",
        "the two apart. What is left is the time until the first fits, after 64 iterations and",
        "each quarter more.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found = [*rows(args.requests)]
    write_results(args.out, found, page)


if __name__ == "__main__":
    main()
