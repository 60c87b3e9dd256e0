"""Whether some kind of step is faster with fewer threads than the machine has cores.

    python -m examples.benchmarks.layers.thread_counts OUT [--models builtin Qwen2.5-0.5B]
        [--formats int8 float32] [--threads 1 2 4 8] [--seconds 2] [--realtime]

One worker for each number of threads holds the same weights in this process, and all run the same
step in turn: decodes of 1 and 4 rows, and a prompt's chunk of 512 tokens. Each step is known before
it begins, as in a server. `--threads` are 1, 2, 4, ... and all cores by default. With `--realtime`
the process has priority over all others while it measures, which needs root. The fastest step of
each counts. Writes thread_counts.json and README.md to OUT; what is not measured again is kept.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from engine.worker.process.worker import Worker
from engine.worker_settings import Kernels, KVSettings, WorkerSettings
from examples.benchmarks.layers.step_kernels import FORMATS, STEPS, KnownSteps
from examples.benchmarks.server.start_time import cpu_name
from examples.benchmarks.written import write_files
from gateway.commands.offline_bench.command import open_shape
from gateway.commands.offline_bench.roofline import WeightSizes, Work

BUILTIN = "builtin"
MIN_REPEATS = 3  # the first of them does not count
KINDS = {name: STEPS[name] for name in ("1 row", "4 rows", "prefill 512")}


def main() -> None:
    options = parse()
    file: Path = options.out / "thread_counts.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if file.exists() else []
    for model in options.models:
        for weights in options.formats:
            workers = {threads: known_steps(model, weights, threads) for threads in options.threads}
            for kind, work in KINDS.items():
                load = os.getloadavg()[0]
                with realtime(options.realtime):
                    found = measure(workers, work, options.seconds)
                rows.append({"model": model, "format": weights, "step": kind, "load": load} | found)
    figures = {"cpu": cpu_name(), "cores": os.cpu_count(), "rows": rows}
    write_files(options.out, {"thread_counts.json": figures, "README.md": page(figures)})
    print(page(figures))


def parse() -> argparse.Namespace:
    cores = os.cpu_count() or 1
    counts = sorted({cores, *(1 << power for power in range(cores.bit_length() - 1))})
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", default=[BUILTIN, "M110", "Qwen2.5-0.5B"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["int8", "float32"])
    parser.add_argument("--threads", type=int, nargs="+", default=counts)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each kind of step")
    parser.add_argument("--realtime", action="store_true", help="priority over other processes")
    return parser.parse_args()


def known_steps(model: str, weights: str, threads: int) -> KnownSteps:
    """The steps of a worker of so many threads."""
    if model == BUILTIN:
        directory = Path(str(files("adapters").joinpath("builtin")))
        config = json.loads((directory / "config.json").read_text())
    else:
        directory, config = open_shape(model)
    works = KINDS.values()
    settings = WorkerSettings(
        model=str(directory),
        max_batch_size=max(work.num_requests for work in works),
        max_batch_tokens=max(work.num_requests * work.num_tokens for work in works),
        kernels=Kernels(weights=weights, threads=threads),
        kv=KVSettings(kv_slots=2 * max(work.num_requests * work.context for work in works)),
    )
    worker = Worker.load(settings, lambda what, done, total: None)
    return KnownSteps(worker, WeightSizes.of(config))


def measure(workers: Mapping[int, KnownSteps], work: Work, seconds: float) -> dict[str, Any]:
    """Milliseconds of the fastest of such steps by number of threads, all in turn."""
    times: dict[int, list[float]] = {threads: [] for threads in workers}
    until = time.perf_counter() + seconds
    while min(map(len, times.values())) < MIN_REPEATS or time.perf_counter() < until:
        for threads, steps in workers.items():
            times[threads].append(steps.plain(work))
    fastest = {str(threads): round(1e3 * min(each[1:]), 3) for threads, each in times.items()}
    return {"repeats": len(times[min(times)]) - 1, "milliseconds": fastest}


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
    """A line for each kind of step, a column for each number of threads."""
    rows: Sequence[Mapping[str, Any]] = figures["rows"]
    counts = list(rows[0]["milliseconds"])
    titles = " | ".join(f"threads: {each}" for each in counts)
    slower = sum(
        list(row["milliseconds"].values())[-1] > min(row["milliseconds"].values()) for row in rows
    )
    loads = [row["load"] for row in rows]
    lines = [
        "# Threads by kind of step",
        "",
        "Written by `python -m examples.benchmarks.layers.thread_counts`: milliseconds of the "
        f"fastest step. {figures['cpu']}, {figures['cores']} cores, load average {min(loads):.1f} "
        f"to {max(loads):.1f}. In {slower} of {len(rows)} rows fewer threads are faster than all.",
        "",
        f"| model | format | step | {titles} | fastest |",
        "|" + "---|" * (len(counts) + 4),
    ]
    for row in rows:
        each = row["milliseconds"]
        cells = " | ".join(f"{value:,.2f}" for value in each.values())
        best = min(each, key=each.__getitem__)
        lines.append(f"| {row['model']} | {row['format']} | {row['step']} | {cells} | {best} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
