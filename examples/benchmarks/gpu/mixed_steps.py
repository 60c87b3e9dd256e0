"""Times steps of decodes and pieces of prompts in CUDA graphs, and the same steps run eagerly;
steps of decodes alone are greedy, and sampled with top-k and top-p.

A worker with random weights in this process, two steps in flight as under a server. A case is
DECODES+PIECE[+PIECE…], in tokens. Prints JSON in the last line.

    python -m examples.benchmarks.gpu.mixed_steps [--shape Llama-3.1-8B] [--device cuda]
        [--cases 1 64 256 255+2 255+64 255+64+64 192+64 64+64 0+64] [--context 128] [--seconds 1]
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from platformdirs import user_cache_path

from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId
from engine.worker.model.kv.recurrent_states import runs_of
from engine.worker.model.layout import build_layout
from engine.worker.model.stage import Stage
from engine.worker.process.pipeline import StepPipeline
from engine.worker.process.worker import Worker
from engine.worker_settings import Kernels, KVSettings, WorkerSettings

CASES = ("1", "64", "256", "255+2", "255+64", "255+64+64", "255+256", "192+64", "64+64", "0+64")
GREEDY = SampleSpec(SamplingParams(temperature=0.0))
SAMPLED = SampleSpec(SamplingParams(temperature=0.7, top_k=50, top_p=0.9, seed=1))
BLOCK = 16
MAX_TOKENS = 2048
MIN_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="Llama-3.1-8B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--context", type=int, default=128, help="tokens of a decode's request")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case, twice")
    args = parser.parse_args()
    cases = [[int(each) for each in case.split("+")] for case in args.cases]
    lengths = [[args.context] * decodes + pieces for decodes, *pieces in cases]
    worker = load(args, lengths)
    rows = [measure(worker, case, args.context, args.seconds) for case in cases]
    report = worker.report
    found = {"shape": args.shape, "device": report.device, "graphs": report.graphs, "mixed": rows}
    print(json.dumps(found))


def load(args: argparse.Namespace, cases: Sequence[Sequence[int]]) -> Worker:
    """A worker with room for the largest case, which are the tokens of its requests."""
    most = max(map(len, cases))
    slots = max(sum(-(-each // BLOCK) for each in case) for case in cases)
    kernel_choices = Path(user_cache_path("podway", appauthor=False)) / "kernel_choices"
    return Worker.load(
        WorkerSettings(
            model=f"random:{args.shape}",
            max_batch_size=max(most, 1),
            max_batch_tokens=MAX_TOKENS,
            kernels=Kernels(
                device=args.device, attention=args.attention, kernel_choices=str(kernel_choices)
            ),
            kv=KVSettings(kv_slots=BLOCK * slots, block_size=BLOCK),
        ),
        lambda what, done, total: None,
    )


def measure(worker: Worker, case: Sequence[int], context: int, seconds: float) -> dict[str, Any]:
    """Median seconds from step to step, as served and eagerly, and for decodes alone with filtered
    sampling; `graph` are the rows of the graph, 0 for none."""
    entries = entries_of(case, context, worker.parts.limits.block_size)
    stage = worker.parts.stage
    layout = build_layout(Step(StepId(0), entries), worker.parts.limits)
    runs = None if stage.states is None else runs_of(layout)
    wide = None if stage.graphs is None else stage.graphs.padded(layout, runs)
    served = pace(worker, stage, entries, seconds)
    eager = served if wide is None else pace(worker, replace(stage, graphs=None), entries, seconds)
    decodes, *pieces = case
    sampled = None
    if not pieces:
        entries = tuple(entry._replace(sample=SAMPLED) for entry in entries)
        sampled = pace(worker, stage, entries, seconds)
    return {
        "decodes": decodes,
        "pieces": pieces,
        "graph": 0 if wide is None else wide.num_tokens,
        "seconds": served,
        "eager_seconds": eager,
        "sampled_seconds": sampled,
    }


def entries_of(case: Sequence[int], context: int, size: int) -> tuple[StepEntry, ...]:
    """Decodes at the end of their context, then whole prompts."""
    decodes, *pieces = case
    return paged([(context - 1, 1)] * decodes + [(0, each) for each in pieces], size)


def paged(sizes: Sequence[tuple[int, int]], size: int) -> tuple[StepEntry, ...]:
    """Requests by their cached and new tokens, each in blocks of `size` tokens of its own."""
    entries, first = [], 0
    for number, (start, length) in enumerate(sizes):
        stop = first - (-(start + length) // size)
        blocks = np.arange(first, stop, dtype="<i4").tobytes()
        tokens = tuple(np.arange(length) % 100)
        entries.append(StepEntry(RequestId(number), start, tuple(map(int, tokens)), blocks, GREEDY))
        first = stop
    return tuple(entries)


def pace(worker: Worker, stage: Stage, entries: tuple[StepEntry, ...], seconds: float) -> float:
    """Median seconds from one collected step to the next, with another in flight."""
    pipeline = StepPipeline(replace(worker.parts, stage=stage))
    numbers = count(1)
    ended: list[float] = []

    def begin() -> Any:
        return pipeline.begin(Step(StepId(next(numbers)), entries))

    before = begin()
    while len(ended) <= MIN_STEPS or ended[-1] - ended[0] < seconds:
        ahead = begin()
        before.collect()
        before = ahead
        ended.append(time.perf_counter())
    before.collect()
    return median(np.diff(ended).tolist())


if __name__ == "__main__":
    main()
