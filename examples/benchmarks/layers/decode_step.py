"""Where the time of a decode step goes, beside a plain read of the same weights.

    python -m examples.benchmarks.layers.decode_step OUT [--shape Qwen2.5-0.5B]
        [--formats int8 bfloat16] [--rows 1 8] [--repeats 25] [--realtime]

A worker holds random weights in this process. The kernels that its decode step recorded are
replayed whole and in part, in turn with whole steps and with plain reads of the same bytes. Medians
go to OUT/decode_step.json, and the table to OUT/decode_step.md. With --realtime the process has
priority over all others while it measures, for some seconds at a time, which needs root.
"""

# mypy: disable-error-code="no-untyped-call"
import argparse
import ctypes
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numba import cfunc
from numpy.typing import NDArray
from torch import Tensor

from engine.step import (
    NO_STATE,
    RequestId,
    SampleSpec,
    SamplingParams,
    StateSlots,
    Step,
    StepEntry,
    StepId,
)
from engine.worker.cpu.build import KERNEL
from engine.worker.cpu.kernels.limits import ReadOperands, make_read_kernel
from engine.worker.process.worker import Worker
from engine.worker_settings import Kernels, KVSettings, WorkerSettings
from examples.benchmarks.server.start_time import cpu_name
from examples.benchmarks.written import write_files
from gateway.commands.offline_bench.roofline import Work

FORMATS = ("float32", "bfloat16", "int8", "int4")
CONTEXT = 160  # tokens of each request
GREEDY = SampleSpec(SamplingParams(temperature=0.0))
READ_PATTERN = 2, 512  # streams and bytes of prefetch of each thread's plain read
READ_CHUNK = 64 << 10
# What is measured, and how the page names it. The last two are differences.
PARTS = {
    "step": "whole step",
    "layers": "kernels of the layers",
    "linears": "of these the linears alone",
    "read_layers": "a plain read of their weights",
    "head": "head",
    "read_head": "a plain read of its weights",
    "empty": "empty kernels in place of the layers'",
    "other": "layers without the linears",
    "python": "Python and sampling",
}


def main() -> None:
    options = parse()
    rows = []
    for name in options.formats:
        for count in options.rows:
            before = os.getloadavg()[0]
            found = measure(options, name, count)
            rows.append({"format": name, "rows": count, "load": before, **found})
    figures = {"cpu": cpu_name(), "cores": os.cpu_count(), "shape": options.shape, "rows": rows}
    write_files(options.out, {"decode_step.json": figures, "decode_step.md": page(figures)})
    print(page(figures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="Qwen2.5-0.5B")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=25, help="of each part; the median counts")
    parser.add_argument("--realtime", action="store_true", help="priority over other processes")
    return parser.parse_args()


def measure(options: argparse.Namespace, name: str, rows: int) -> dict[str, float]:
    """Median milliseconds of each part, and the bytes of the weights."""
    replays = StepReplays(load(f"random:{options.shape}", name, rows), rows)
    parts: dict[str, Callable[[], float]] = {
        "step": replays.step,
        "layers": replays.of(replays.table),
        "linears": replays.of(replays.table[replays.is_linear]),
        "read_layers": replays.of(replays.reads(replays.weights)),
        "head": replays.head,
        "read_head": replays.of(replays.reads([replays.head_weights])),
        "empty": replays.of(replays.emptied()),
    }
    seconds: dict[str, list[float]] = {part: [] for part in parts}
    with realtime(options.realtime):
        for _ in range(options.repeats):
            for part, run in parts.items():
                seconds[part].append(run())
    found = {part: round(1e3 * median(each), 3) for part, each in seconds.items()}
    found["other"] = round(found["layers"] - found["linears"], 3)
    found["python"] = round(found["step"] - found["layers"] - found["head"], 3)
    weights = [*replays.weights, replays.head_weights]
    return {**found, "weight_bytes": sum(each.nbytes for each in weights)}


def load(model: str, weights: str, rows: int) -> Worker:
    settings = WorkerSettings(
        model=model,
        max_batch_size=rows,
        max_batch_tokens=max(rows, 64),
        kernels=Kernels(weights=weights),
        kv=KVSettings(kv_slots=2 * rows * CONTEXT),
    )
    return Worker.load(settings, lambda what, done, total: None)


def learned(worker: Worker, number: int, work: Work) -> Step:
    """A step that the worker prepares now and runs later, as in a server with lookahead."""
    each = -(-work.context // worker.report.block_size)
    start = work.context - work.num_tokens
    entries = tuple(
        StepEntry(
            RequestId(at),
            start,
            tuple(range(7, 7 + work.num_tokens)),
            array("i", range(at * each, (at + 1) * each)).tobytes(),
            GREEDY,
            state=StateSlots(at, at if start else NO_STATE) if worker.report.num_states else None,
        )
        for at in range(work.num_requests)
    )
    step = Step(StepId(number), entries)
    worker.learn(step)
    return step


class StepReplays:
    """Runs parts of one worker's decode step; each method returns elapsed seconds."""

    def __init__(self, worker: Worker, rows: int) -> None:
        self._worker, self._rows = worker, rows
        self._next = self._learn(0)
        self._kept: list[ReadOperands] = []  # tables hold addresses
        self._total = torch.zeros(1, dtype=torch.int64)
        for _ in range(3):  # the first one is recorded
            self.step()
        model: Any = worker.parts.stage.model
        self._recorded = model.base  # without LoRA
        self._pool = self._recorded._pool
        graph = self._recorded._for_all[True].graph
        head = self._recorded._decoder.head
        self.head_weights: Tensor = head._weights.packed
        weights = [call.weights for call in graph._calls]
        if self.head_weights is weights[-2]:  # then come the most likely tokens
            weights = weights[:-3]  # without the last norm
        self.table: NDArray[np.int64] = graph.table()[: len(weights)]
        self.is_linear = np.array([each is not None for each in weights])
        self.weights: list[Tensor] = [each for each in weights if each is not None]
        width = self._recorded._decoder.norm._dim
        self._hidden = torch.randn(rows, width)
        self._read = cfunc(KERNEL, nogil=True)(make_read_kernel(*READ_PATTERN))
        self._empty = cfunc(KERNEL, nogil=True)(nothing)

    def step(self) -> float:
        """A step of `rows` requests that decode one token each, behind another such step: it is
        already known when that one ends."""
        self._run_next()
        return self._run_next()

    def _run_next(self) -> float:
        """Run the known step once the step behind it is known, too."""
        step, self._next = self._next, self._learn(self._next.step_id + 1)
        began = time.perf_counter()
        result = self._worker.run(step)
        seconds = time.perf_counter() - began
        assert not result.faults
        return seconds

    def _learn(self, number: int) -> Step:
        return learned(self._worker, number, Work(self._rows, 1, CONTEXT))

    def head(self) -> float:
        """The final norm and the head, called one by one: few rows replay them with the layers."""
        with torch.inference_mode(), self._pool.awake():
            began = time.perf_counter()
            self._recorded.logits(self._hidden)
            return time.perf_counter() - began

    def of(self, table: NDArray[np.int64]) -> Callable[[], float]:
        """Replays the calls of a table, `KernelGraph.table` or rows of it."""
        kept = np.ascontiguousarray(table)

        def replay() -> float:
            with self._pool.awake():
                began = time.perf_counter()
                self._pool._replay(self._pool._control, int(kept.ctypes.data), len(kept))
                return time.perf_counter() - began

        return replay

    def reads(self, weights: Sequence[Tensor]) -> NDArray[np.int64]:
        """A table with a plain read in place of each linear."""
        rows = []
        for each in weights:
            operands = ReadOperands(
                address=each.data_ptr(), chunk_bytes=READ_CHUNK, total=self._total.data_ptr()
            )
            self._kept.append(operands)
            chunks = each.nbytes // READ_CHUNK
            rows.append((self._read.address, ctypes.addressof(operands), chunks, 0, 0))
        return np.array(rows, dtype=np.int64)

    def emptied(self) -> NDArray[np.int64]:
        """The same calls of a kernel that does nothing: what sharing out chunks costs."""
        table = self.table.copy()
        table[:, 0], table[:, 3:] = self._empty.address, 0
        return table


def nothing(operands: int, chunk: int, thread: int) -> None:
    """A kernel."""


@contextmanager
def realtime(is_on: bool) -> Iterator[None]:
    """All threads of this process run before those of other processes."""
    try:
        if is_on:
            _schedule(os.SCHED_RR, 1)
        yield
    finally:
        if is_on:
            _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, priority: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


def page(figures: Mapping[str, Any]) -> str:
    """The parts as a table, one column for each format and number of rows."""
    runs: Sequence[Mapping[str, Any]] = figures["rows"]
    loads = [each["load"] for each in runs]
    titles = [f"{each['format']}, {each['rows']}" for each in runs]
    lines = [
        "# Where the time of a decode step goes",
        "",
        "Written by `python -m examples.benchmarks.layers.decode_step`: milliseconds by format and "
        f"rows. {figures['shape']}, random weights, {CONTEXT} tokens of context. "
        f"{figures['cpu']}, {figures['cores']} cores, "
        f"load average {min(loads):.1f} to {max(loads):.1f}.",
        "",
        f"| | {' | '.join(titles)} |",
        "|---|" + "---|" * len(titles),
    ]
    for part, title in PARTS.items():
        lines.append(f"| {title} | {' | '.join(f'{each[part]:.2f}' for each in runs)} |")
    shares = [f"{100 * share(each):.0f} %" for each in runs]
    rates = [f"{read_rate(each) / 1e9:.1f}" for each in runs]
    lines.append(f"| plain reads / step | {' | '.join(shares)} |")
    lines.append(f"| GB/s of the plain reads | {' | '.join(rates)} |")
    return "\n".join([*lines, ""])


def share(row: Mapping[str, Any]) -> float:
    """The share of a step that a plain read of all its weights takes."""
    return float(row["read_layers"] + row["read_head"]) / float(row["step"])


def read_rate(row: Mapping[str, Any]) -> float:
    """Bytes per second of the plain reads."""
    return 1e3 * float(row["weight_bytes"]) / float(row["read_layers"] + row["read_head"])


if __name__ == "__main__":
    main()
