"""Which kernels take the time of a step, and what each loses against the machine's limits.

    python -m examples.benchmarks.layers.step_kernels OUT [--shape Qwen2.5-0.5B]
        [--formats int8 int4] [--seconds 1]

A worker holds random weights in this process. Steps run plainly, with each kernel timed, and with
each chunk of a kernel run twice, of which the second run is timed: its memory is in cache then as
far as it fits. A plain read of the step's bytes takes turns with them. Each step is behind another
one and known before it begins, as in a server. Writes step_kernels.json and step_kernels.md to OUT.
"""

import argparse
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
from engine.worker.cpu.limits import PlainReads, measure_peaks
from engine.worker.process.worker import Worker
from engine.worker_settings import WEIGHT_BYTES, Kernels, KVSettings, WorkerSettings
from examples.benchmarks.layers.kernel_times import Call, KernelTimer
from examples.benchmarks.server.start_time import cpu_name
from examples.benchmarks.written import write_files
from gateway.commands.offline_bench.command import open_shape
from gateway.commands.offline_bench.roofline import (
    WeightSizes,
    Work,
    attention_rate,
    bytes_of,
)

FORMATS = ("float32", "bfloat16", "int8", "int4")
CONTEXT = 160  # tokens of each request of a decode
GREEDY = SampleSpec(SamplingParams(temperature=0.0))
# Operations of a scan for each number of a state and token: its decay, the change, the output.
SCANS = {"delta rule": 7, "mamba scan": 5}
STEPS = {  # by name: requests, tokens of each, context of each
    **{
        f"{rows} {'row' if rows == 1 else 'rows'}": Work(rows, 1, CONTEXT)
        for rows in (1, 2, 4, 8, 32, 64)
    },
    **{f"prefill {tokens}": Work(1, tokens, tokens) for tokens in (128, 512)},
}
MIN_REPEATS = 3
PYTHON = "Python, interference"  # what the fastest of each call leave of the fastest step
LARGEST = 4  # losses that the page names


def main() -> None:
    options = parse()
    sizes = WeightSizes.of(open_shape(options.shape)[1])
    reads = PlainReads(options.threads)
    peaks = {name: peak.rate for name, peak in measure_peaks(options.threads).items()}
    found: list[dict[str, Any]] = []
    for name in options.formats:
        steps = KnownSteps(load(options, name), sizes)
        for title, work in STEPS.items():
            load_before = os.getloadavg()[0]
            measured = measure(steps, work, reads, options.seconds)
            found.append({"format": name, "step": title, "load": load_before, **measured})
        again = measure_peaks(options.threads)
        peaks = {name: max(rate, again[name].rate) for name, rate in peaks.items()}
        write(options, peaks, found)  # a run that is ended early leaves the formats before


def write(
    options: argparse.Namespace, peaks: Mapping[str, float], steps: Sequence[Mapping[str, Any]]
) -> None:
    """Write the figures and the page, and print it."""
    figures = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "shape": options.shape,
        "peaks": peaks,
        "steps": steps,
    }
    write_files(options.out, {"step_kernels.json": figures, "step_kernels.md": page(figures)})
    print(page(figures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="Qwen2.5-0.5B")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each kind of step")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def load(options: argparse.Namespace, weights: str) -> Worker:
    works = STEPS.values()
    settings = WorkerSettings(
        model=f"random:{options.shape}",
        max_batch_size=max(work.num_requests for work in works),
        max_batch_tokens=max(work.num_requests * work.num_tokens for work in works),
        kernels=Kernels(weights=weights, threads=options.threads),
        kv=KVSettings(kv_slots=2 * max(work.num_requests * work.context for work in works)),
    )
    return Worker.load(settings, lambda what, done, total: None)


class Turn(NamedTuple):
    """Elapsed seconds of a plain step, and the kernels of two others."""

    seconds: float
    calls: list[Call]
    cached: list[Call]


class KnownSteps:
    """Runs steps of a worker, each known while the one before it runs."""

    def __init__(self, worker: Worker, sizes: WeightSizes) -> None:
        model: Any = worker.parts.stage.model
        self.timer = KernelTimer(model.base._pool)  # without LoRA
        self.worker, self.sizes = worker, sizes
        self._number = 0

    def plain(self, work: Work) -> float:
        """Elapsed seconds of the second of two equal steps, known while the first one runs."""
        first, plain = self._learn(work), self._learn(work)
        self.worker.run(first)
        began = time.perf_counter()
        self.worker.run(plain)
        return time.perf_counter() - began

    def turn(self, work: Work) -> "Turn":
        """Four equal steps, each known while the one before runs: one that does not count, then
        plain, timed, and timed with memory in cache."""
        first, plain = self._learn(work), self._learn(work)
        self.worker.run(first)
        timed = self._learn(work)
        began = time.perf_counter()
        self.worker.run(plain)
        seconds = time.perf_counter() - began
        last = self._learn(work)
        with self.timer.timing() as calls:
            self.worker.run(timed)
        with self.timer.timing(in_cache=True) as cached:
            self.worker.run(last)
        return Turn(seconds, calls, cached)

    def _learn(self, work: Work) -> Step:
        """A step that the worker prepares now and runs later."""
        report, start = self.worker.report, work.context - work.num_tokens
        each = -(-work.context // report.block_size)
        entries = tuple(
            StepEntry(
                RequestId(at),
                start,
                tuple(range(7, 7 + work.num_tokens)),
                array("i", range(at * each, (at + 1) * each)).tobytes(),
                GREEDY,
                state=StateSlots(at, at if start else NO_STATE) if report.num_states else None,
            )
            for at in range(work.num_requests)
        )
        self._number += 1
        step = Step(StepId(self._number), entries)
        self.worker.learn(step)
        return step


def measure(steps: KnownSteps, work: Work, reads: PlainReads, seconds: float) -> dict[str, Any]:
    """One kind of step: the fastest, and the fastest of each call of a kernel."""
    num_bytes = bytes_of(steps.sizes, work, steps.worker.report)
    steps.turn(work)
    read, turns = list[float](), list[Turn]()
    until = time.perf_counter() + seconds
    while len(turns) < MIN_REPEATS or time.perf_counter() < until:
        read.append(reads.seconds(num_bytes))
        turns.append(steps.turn(work))
    token_bytes = steps.worker.report.bytes_per_block / steps.worker.report.block_size
    calls = [call.name for call in turns[0].calls]
    sizes = replace(steps.sizes, num_layers=calls.count("attention"))  # not of recurrent ones
    attended = {
        "bytes": int(work.num_requests * work.context * token_bytes),
        "operations": sizes.attention(work),
        "kv_dtype": steps.worker.report.kv_dtype,
    }
    return {
        "repeats": len(turns),
        "milliseconds": _milliseconds(min(turn.seconds for turn in turns)),
        "read_rate": num_bytes / min(read),
        "kernels": list(kernels(turns, work, attended)),
    }


def kernels(
    turns: Sequence[Turn], work: Work, attended: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Calls of the same name together: milliseconds, the sum of each call's fastest.

    `chunks` is the time in chunks, `cached_chunks` that with their memory in cache. A scan reads
    and writes each request's state once.
    """
    calls = turns[0].calls
    whole = _fastest([call.seconds for call in turn.calls] for turn in turns)
    busy = _fastest([call.busy for call in turn.calls] for turn in turns)
    cached = _fastest([call.busy for call in turn.cached] for turn in turns)
    for name in dict.fromkeys(call.name for call in calls):
        own = [number for number, call in enumerate(calls) if call.name == name]
        states = work.num_requests * sum(calls[number].states for number in own)
        scanned = {"bytes": 8 * states, "operations": SCANS.get(name, 0) * work.num_tokens * states}
        yield {
            "name": name,
            "calls": len(own),
            "milliseconds": _milliseconds(sum(whole[number] for number in own)),
            "chunks": _milliseconds(sum(busy[number] for number in own)),
            "cached_chunks": _milliseconds(sum(cached[number] for number in own)),
            "elements": sum(calls[number].elements for number in own),
            "operations": sum(2 * calls[number].elements * calls[number].rows for number in own),
            **({"attended": attended} if name == "attention" else {}),
            **({"attended": scanned} if name in SCANS else {}),
        }


def _fastest(turns: Iterable[Sequence[float]]) -> list[float]:
    """The least seconds of each call of a step."""
    return [min(each) for each in zip(*turns, strict=True)]


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 6)


def minimums(step: Mapping[str, Any], peaks: Mapping[str, float]) -> list[tuple[float, float]]:
    """For each kernel the least milliseconds in which its bytes are read, and its operations
    computed."""
    found = []
    for each in step["kernels"]:
        attended = each.get("attended", {"bytes": 0, "operations": 0})
        num_bytes = each["elements"] * WEIGHT_BYTES[step["format"]] + attended["bytes"]
        computing = each["operations"] / peaks[step["format"]]
        rate = attention_rate(peaks, "float32", attended.get("kv_dtype", "float16"))
        computing += attended["operations"] / rate
        found.append((1e3 * num_bytes / step["read_rate"], 1e3 * computing))
    return found


def bound_of(step: Mapping[str, Any], peaks: Mapping[str, float]) -> tuple[int, float]:
    """Which of the two minimums is the limit of a step, and the fraction of it that is reached."""
    reading, computing = (sum(each) for each in zip(*minimums(step, peaks), strict=True))
    return int(computing > reading), max(reading, computing) / step["milliseconds"]


def page(figures: Mapping[str, Any]) -> str:
    """A table for each format, and what each step loses."""
    peaks, steps = figures["peaks"], figures["steps"]
    loads = [step["load"] for step in steps]
    lines = [
        "# Which kernels take the time of a step",
        "",
        "Written by `python -m examples.benchmarks.layers.step_kernels`: "
        f"{figures['shape']}, random weights, decodes at {CONTEXT} tokens, each step known before "
        f"it begins. {figures['cpu']}, {figures['cores']} cores, load average {min(loads):.1f} to "
        f"{max(loads):.1f}. Cells are milliseconds of a kernel in a step, the sum of each "
        "call's fastest; "
        "in brackets the minimum: of its bytes at the rate of plain reads in turn with the steps, "
        "or of its operations at the rate of products of registers, whichever is longer.",
        "",
        "What is missing is split, in per cent of the step: *waiting*, a thread has no chunk of "
        "the kernel; *memory*, chunks take longer than the same chunks with their memory in cache; "
        "*instructions*, chunks in cache take longer than their products. Where reads are the "
        "limit only the whole is given. A negative part was measured faster than its minimum.",
        "",
    ]
    for name in dict.fromkeys(step["format"] for step in steps):
        lines += _of_format([step for step in steps if step["format"] == name], peaks)
    return "\n".join(lines)


def _of_format(steps: Sequence[Mapping[str, Any]], peaks: Mapping[str, float]) -> list[str]:
    rows: dict[str, dict[str, str]] = {}
    for step in steps:
        cells = {}
        for each, least in zip(step["kernels"], minimums(step, peaks), strict=True):
            bracket = f" ({max(least):.2f})" if max(least) else ""
            cells[each["name"]] = f"{each['milliseconds']:.2f}{bracket}"
        cells[PYTHON] = f"{python_of(step):.2f}"
        cells["**whole step**"] = f"{step['milliseconds']:.2f}"
        bound, reached = bound_of(step, peaks)
        cells["of the limit"] = f"{100 * reached:.0f} % {('read', 'compute')[bound]}"
        for name, cell in cells.items():
            rows.setdefault(name, {})[step["step"]] = cell
    last = (PYTHON, "**whole step**", "of the limit")
    names = [*(name for name in rows if name not in last), *last]
    titles = [step["step"] for step in steps]
    return [
        f"## {steps[0]['format']}",
        "",
        f"| | {' | '.join(titles)} |",
        "|---|" + "---|" * len(titles),
        *(f"| {n} | {' | '.join(rows[n].get(title, '') for title in titles)} |" for n in names),
        "",
        *(f"- {step['step']}: {missing(step, peaks)}" for step in steps),
        "",
    ]


def python_of(step: Mapping[str, Any]) -> float:
    """Milliseconds of a step that no kernel takes."""
    inside = sum(each["milliseconds"] for each in step["kernels"])
    return float(step["milliseconds"] - inside)


def missing(step: Mapping[str, Any], peaks: Mapping[str, float]) -> str:
    """The largest losses of a step, in per cent of it."""
    bound, reached = bound_of(step, peaks)
    whole = step["milliseconds"]
    losses = [(python_of(step), PYTHON, "")]
    for each, least in zip(step["kernels"], minimums(step, peaks), strict=True):
        own, chunks, cached = each["milliseconds"], each["chunks"], each["cached_chunks"]
        parts = {"waiting": own - chunks, "memory": chunks - cached}
        parts["instructions"] = cached - least[bound]
        said = ", ".join(f"{name} {100 * part / whole:.1f}" for name, part in parts.items())
        losses.append((own - least[bound], each["name"], f" ({said})" if bound else ""))
    losses.sort(reverse=True)
    largest = [f"{name} {100 * loss / whole:.1f}{said}" for loss, name, said in losses[:LARGEST]]
    rest = sum(loss for loss, *_ in losses[LARGEST:])
    return f"{100 * (1 - reached):.0f} % missing: " + "; ".join(
        [*largest, f"the rest {100 * rest / whole:.1f}"]
    )


if __name__ == "__main__":
    main()
