"""How busy pipeline stages are: two stages on this machine, and 1 to 8 in virtual time.

On this machine a model with random weights runs in two stages of one thread each, with one batch
in flight per stage and with one batch in total. In virtual time Orca's pipelined iterations are
compared with FasterTransformer's microbatches. Writes README.md and pipeline.json; takes some
minutes.

    python -m examples.benchmarks.pipeline
        [--out examples/benchmarks/results/pipeline] [--requests 16] [--repeats 5]
"""

import argparse
import asyncio
import os
from dataclasses import asdict
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from engine.simulated.trace import at_rate, orca_lengths, poisson
from examples.benchmarks.pipeline.measured import (
    Bench,
    Run,
    Setup,
    cores_free,
    make_specs,
    write_checkpoint,
)
from examples.benchmarks.pipeline.simulated import SYSTEMS, Flow, flow
from examples.benchmarks.written import write_files

OUTPUT_LEN = 32
SETUPS = (
    Setup("one worker, one thread", stages=1, depth=1, batch=8),
    Setup("2 stages, one batch of 8 at a time", stages=2, depth=1, batch=8),
    Setup("2 stages, one batch of 16 at a time", stages=2, depth=1, batch=16),
    Setup("**2 stages, two batches of 8 in flight**", stages=2, depth=2, batch=8),
    Setup("one worker, two threads", stages=1, depth=1, batch=16, threads=2),
)
STAGES = (1, 2, 4, 8)
BATCH = 8  # requests in flight per stage, in virtual time


async def measure_all(requests: int, repeats: int) -> dict[str, Run]:
    """The median run of each setup; the setups alternate, so that all see the same load."""
    with TemporaryDirectory() as scratch:
        model = write_checkpoint(Path(scratch))
        benches = [
            Bench(setup, model, Path(scratch) / f"{at}.json") for at, setup in enumerate(SETUPS)
        ]
        for bench in benches:
            await bench.open()
        for _ in range(repeats):
            for bench in benches:
                rate = await bench.run(make_specs(requests, OUTPUT_LEN))
                print(f"{bench.setup.name}: {rate:.1f} tokens/s", flush=True)
        runs = {bench.setup.name: await bench.close() for bench in benches}
    return {
        name: sorted(each, key=lambda run: run.rate)[len(each) // 2] for name, each in runs.items()
    }


def simulate_all(queue: int) -> dict[str, list[Flow]]:
    """Every system on every number of stages, with so many requests that all are long busy."""
    flows: dict[str, list[Flow]] = {system.name: [] for system in SYSTEMS}
    for stages in STAGES:
        count = queue * BATCH * stages
        arrivals = at_rate(poisson(1.0, count, orca_lengths, Random(0)), 1e6)
        for system in SYSTEMS:
            flows[system.name].append(flow(system, stages, BATCH, arrivals))
    return flows


def measured_table(runs: dict[str, Run]) -> str:
    base = runs[SETUPS[1].name].rate
    lines = [
        "| | output tokens/s | against one batch of 8 | bubbles per stage |",
        "|---|---|---|---|",
    ]
    for name, run in runs.items():
        bubbles = ", ".join(f"{share:.0%}" for share in run.bubbles)
        lines.append(f"| {name} | {run.rate:.1f} | {run.rate / base:.2f} × | {bubbles} |")
    return "\n".join(lines)


def simulated_table(flows: dict[str, list[Flow]]) -> str:
    heads = " | ".join(f"{stages} stage{'s' * (stages > 1)}" for stages in STAGES)
    lines = [f"| output tokens/s (bubbles) | {heads} |", "|---" * (1 + len(STAGES)) + "|"]
    for name, each in flows.items():
        cells = " | ".join(f"{one.rate:,.0f} ({one.bubbles:.0%})" for one in each)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def report(
    runs: dict[str, Run], flows: dict[str, list[Flow]], args: argparse.Namespace, free: float
) -> str:
    return f"""# How busy pipeline stages are

Regenerate with `python -m examples.benchmarks.pipeline`; the numbers are in `pipeline.json`.

## On this machine

57 million random parameters, float32, 16 layers; {args.requests} requests at once, 32 prompt
tokens, {OUTPUT_LEN} output tokens, greedy; each stage is a process with one thread. The median of
{args.repeats} runs per setup, alternating. A bubble is time between the first and the last step in
which a stage computes nothing.

{os.cpu_count()} cores, of which this had **{free:.2f}**: the work of two processes just before,
divided by that of one. With less than 2, concurrent stages share a core: fewer bubbles then do not
give more tokens, and computing includes waiting for a core.

{measured_table(runs)}

With one batch in flight the stages wait for each other: their bubbles add up to one whole stage or
more. With one batch in flight per stage they overlap.

## In virtual time

Orca's pipelined iterations against FasterTransformer's microbatches: GPT-3 101B on 8 A100-40GB a
stage, Orca's lengths (32..512 prompt tokens, 1..128 output tokens), a full queue from the start,
{BATCH} requests in flight per stage, the cost model of [Orca's headline](../orca/README.md).

{simulated_table(flows)}

- Microbatches fill the pipeline again in every iteration: (stages - 1) / (2 stages - 1) of the
  time is bubbles even if all parts are equal, and prefills beside decodes make them unequal.
- Without microbatches the weights are read once for all requests, but only one stage works at a
  time.
- Request-level scheduling is slower again, because no request joins before the longest one has
  ended.
- Pipelined iterations have bubbles because steps differ in length: while a step with a prompt
  passes through the stages, the steps before and after it wait. All numbers include the end of the
  queue, where seats are empty; with more stages that takes longer.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("examples/benchmarks/results/pipeline"))
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--queue", type=int, default=15, help="simulated requests per seat")
    args = parser.parse_args()
    free = cores_free()
    runs, flows = asyncio.run(measure_all(args.requests, args.repeats)), simulate_all(args.queue)
    results = {
        "cores_free": free,
        "measured": {name: asdict(run) for name, run in runs.items()},
        "simulated": {name: [asdict(one) for one in each] for name, each in flows.items()},
    }
    write_files(args.out, {"pipeline.json": results, "README.md": report(runs, flows, args, free)})
    print(f"\n{measured_table(runs)}\n\n{simulated_table(flows)}")


if __name__ == "__main__":
    main()
