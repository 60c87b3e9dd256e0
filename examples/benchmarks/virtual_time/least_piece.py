"""How long the least piece of a prompt should be where any piece has a price of its own.

On a GPU decodes run as a CUDA graph and an iteration with a piece of a prompt does not. The costs
here are those of Llama-3.1-8B in bfloat16 on an H200 (results/gpu): decodes and prefills as
measured, and 7 ms for leaving the graph, which is an estimate from iterations of 13 ms for 256
tokens. `--prefill-slowdown` is 2, as in `podway serve`. Writes least_piece.json and README.md.

    python -m examples.benchmarks.virtual_time.least_piece [--requests 1000] [--out DIR]
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from engine.control import step_time
from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.policy import build
from engine.simulated.run import Setup, simulate
from engine.simulated.trace import poisson
from examples.benchmarks.written import write_results

OUT = Path(__file__).parents[1] / "results" / "least_piece"
CURVE = ((1, 5.1e-3), (64, 5.1e-3), (128, 5.7e-3), (256, 7.7e-3), (512, 13e-3), (2048, 48e-3))
COST = CostModel(CURVE, per_slot=3.3e-8, per_pair=5e-10, per_draw=2e-6, per_piece=7e-3)
SETTINGS = SchedulerSettings(
    max_model_len=8192, max_batch_size=256, max_batch_tokens=2048, max_prefill_slowdown=2.0
)
TIMES = (0.0, 1.0, 1.5, 2.0, 3.0)
RATES = (2, 6, 12)
SEED = 1


def lengths(random: Random) -> tuple[int, int]:
    """Prompts of a conversation and answers, in tokens."""
    return random.randint(16, 2048), random.randint(16, 512)


def rows(count: int) -> Iterator[dict[str, Any]]:
    """One run for each rate and number of times."""
    for rate in RATES:
        arrivals = poisson(rate, count, lengths, Random(SEED))
        for times in TIMES:
            setup = Setup("", SETTINGS, lambda cost: build("fcfs", cost), COST, 400_000)
            with patch.object(step_time, "PIECE_TIMES", times):
                found = simulate(setup, arrivals)
            figures = {
                f"{name} {point}": found.at(name, point)
                for name, point in (
                    ("ttft", "mean"),
                    ("ttft", "p99"),
                    ("itl", "mean"),
                    ("itl", "p99"),
                )
            }
            yield {"rate": rate, "times": times, **figures}


def page(found: list[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        "# How long the least piece of a prompt should be",
        "",
        "`python -m examples.benchmarks.virtual_time.least_piece`: virtual time, costs of",
        "Llama-3.1-8B on an H200, where an iteration with any piece of a prompt takes 7 ms longer",
        "because it leaves the CUDA graph; prompts of 16 to 2,048 tokens, answers of 16 to 512,",
        "`--prefill-slowdown 2` ([JSON](least_piece.json)). The bound of twice a decode step is",
        "below the price of any piece. So the first piece of an iteration gets its least time: a",
        "tenth of the bound and so many times the price.",
        "",
        "| requests/s | times | TTFT ms, mean | p99 | ITL ms, mean | p99 |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        cells = [
            f"{row[name] * 1e3:.1f}" for name in ("ttft mean", "ttft p99", "itl mean", "itl p99")
        ]
        lines.append(f"| {row['rate']} | {row['times']} | {' | '.join(cells)} |")
    lines += [
        "",
        "Podway takes 2: at least half of what a piece adds is for its tokens. Above it p99 of the",
        "ITL grows while TTFT falls by little. Where pieces have no price of their own nothing",
        "changes. Not measured on a GPU.",
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
