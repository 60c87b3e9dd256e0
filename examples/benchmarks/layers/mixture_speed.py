"""Decode steps of a whole mixture of experts: their share of one thread's read rate.

One request decodes one token with random weights. The bytes of a step are those of
`podway bench --offline`: the matrices that one token uses, and its KV. CPU time of one thread,
which other processes on the machine disturb less than elapsed time.

    python -m examples.benchmarks.layers.mixture_speed [SHAPE] [--weights int8] [--steps 40]
        [--json FILE]
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

from adapters.models.named_shapes import SHAPES
from engine.worker.cpu.limits import measure_read
from engine.worker_settings import WEIGHT_BYTES
from examples.benchmarks.layers.lora import CONTEXT, Steps, load
from gateway.commands.offline_bench.roofline import WeightSizes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", default="OLMoE-1B-7B")
    parser.add_argument("--weights", default="int8", choices=WEIGHT_BYTES)
    parser.add_argument("--steps", type=int, default=40, help="of which the median counts")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(shape: str, weights: str, count: int) -> dict[str, Any]:
    rates = [measure_read(1).rate]
    worker = load(shape, weights, 1)
    rates.append(measure_read(1).rate)
    steps, report = Steps(worker), worker.report
    seconds = [steps.decode([0]) for _ in range(count + 2)][2:]  # the first ones warm up
    rates.append(measure_read(1).rate)
    sizes = WeightSizes.of(SHAPES[shape])
    active = int(sizes.read_elements * WEIGHT_BYTES[weights])
    kv = CONTEXT * report.bytes_per_block // report.block_size
    bound = (active + kv) / max(rates)
    return {
        "shape": shape,
        "weights": report.weights,
        "parameters": report.num_parameters,
        "read_bytes_per_second": max(rates),
        "step_bytes": active + kv,
        "all_bytes": int(sizes.elements * WEIGHT_BYTES[weights]),
        "milliseconds": round(1e3 * median(seconds), 2),
        "share_of_read_rate": round(bound / median(seconds), 3),
    }


def main() -> None:
    options = parse()
    before = os.getloadavg()[0]
    found = measure(options.shape, options.weights, options.steps)
    found["load"] = [round(before, 1), round(os.getloadavg()[0], 1)]
    print(json.dumps(found, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
