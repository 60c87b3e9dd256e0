"""`podway bench --offline SHAPE`: times decode steps and prefills, and compares them with the
machine's roofline.

The worker runs in a process of its own, as under a server; there is no server, tokenizer or
scheduler.
"""

import argparse
import asyncio
import importlib
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import uvloop
from platformdirs import user_cache_path
from rich.console import Console

from engine.errors import EngineError, StartupError
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings
from engine.worker_settings import Kernels, KVSettings, Tiers, WorkerReport, WorkerSettings
from gateway.commands.offline_bench.report import (
    BenchRow,
    OfflineReport,
    Ruler,
    best_of,
    measure_limits,
    read_limits,
    show,
)
from gateway.commands.offline_bench.roofline import (
    Limit,
    WeightSizes,
    Work,
    bytes_of,
    lower_bound_of,
    weights_of,
)
from gateway.commands.offline_bench.steps import Bench, Timing
from gateway.options import add_flags, options_of, with_flags
from gateway.serve.terminal import LoadingBars
from gateway.settings.flags import (
    Parser,
    ShowDefaults,
    above_zero,
    flag_type,
    output_file,
    positive,
)

KERNEL_OPTIONS = options_of("", Kernels(), "dtype", "weights", "device", "attention", "threads")
KV_OPTIONS = options_of("", KVSettings(), "kv_cache_dtype", "block_size")
CHECKPOINTS = "adapters.models.checkpoint"
STEP_SECONDS = 600.0  # a prefill may take long on a small machine


class PrefillCase(NamedTuple):
    """`num_requests` prompts of `length` tokens, computed in one step."""

    num_requests: int
    length: int

    @classmethod
    def parse(cls, text: str) -> "PrefillCase":
        """Parse `512` (one prompt) or `8x512`. Raises `ValueError`."""
        found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", text)
        if found is None:
            raise ValueError(f"{text!r} is no prefill")
        return cls(int(found[1] or 1), int(found[2]))


@dataclass(frozen=True, slots=True)
class OfflineLoad:
    """The steps to time: decodes of these batch sizes at `context` tokens, and prefills."""

    batch_sizes: Sequence[int]
    context: int
    prompts: Sequence[PrefillCase]

    @property
    def longest(self) -> int:
        return max([self.context, *(each.length for each in self.prompts)])

    def num_blocks(self, size: int) -> int:
        """KV blocks of `size` slots that the largest step needs."""
        decodes = max(self.batch_sizes) * -(-self.context // size)
        return max(
            [decodes, *(each.num_requests * -(-each.length // size) for each in self.prompts)]
        )


def parser() -> Parser:
    """The flags of `podway bench --offline`."""
    parser = Parser(
        "podway bench --offline",
        description="Time decode steps and prefills of a worker with random weights.",
        usage="podway bench --offline SHAPE [flags]",
        formatter_class=ShowDefaults,
    )
    add = parser.add_argument
    add("--offline", metavar="SHAPE", nargs="?", help="a named shape, or a model directory")
    add_flags(parser, KERNEL_OPTIONS)
    add_flags(parser, KV_OPTIONS)
    add("--batch-sizes", type=_numbers, default="1,8,32", metavar="N,N", help="of decode steps")
    add("--context", type=positive, default=512, metavar="N", help="cached tokens of a decode")
    add("--prompt-lengths", type=_prompts, default="128,512", metavar="N,BxN", help="of prefills")
    add("--in-flight", type=int, choices=(1, 2), help="steps in flight; by default 2 on a GPU")
    add("--seconds", type=above_zero, default=2.0, metavar="S", help="time for each kind of step")
    add("--limits", type=Path, metavar="JSON", help="machine limits from an earlier --json file")
    add("--json", type=output_file, metavar="FILE", help="write the results as JSON")
    return parser


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


_prefill = flag_type(PrefillCase.parse, "a length such as 512, or 8x512 for 8 prompts in a step")


def _prompts(text: str) -> list[PrefillCase]:
    return [_prefill(part) for part in text.split(",")]


def main(argv: list[str]) -> int:
    """Measure and print; 1 if a step fails. Raises `StartupError`."""
    flags = parser()
    args = flags.parse_args(argv)
    if args.offline is None:
        flags.error("--offline needs a SHAPE: a named shape such as gpt2, or a model directory")
    try:
        with LoadingBars(sys.stderr) as progress:
            report = uvloop.run(measure(args, progress))
    except StartupError:
        raise
    except EngineError as error:
        sys.stderr.write(f"podway bench: {error}\n")
        return 1
    show(report, Console())
    if args.json:
        report.write(args.json)
    return 0


async def measure(
    args: argparse.Namespace, progress: Callable[[str, int, int], None]
) -> OfflineReport:
    """One run. Raises `StartupError`, or `StepFailed` or `WorkerLost` if a step fails."""
    directory, config = open_shape(args.offline)
    load = OfflineLoad(args.batch_sizes, args.context, args.prompt_lengths)
    sizes = WeightSizes.of(config)
    if load.longest > sizes.max_positions:
        raise StartupError(
            f"--context and --prompt-lengths need {load.longest} positions, but {args.offline} "
            f"has {sizes.max_positions}"
        )
    started = os.getloadavg()[0]
    multiprocess = MultiprocessSettings(depth=2, step_seconds=STEP_SECONDS, max_restarts=0)
    executor = MultiprocessExecutor(worker_settings(args, directory, load, sizes), multiprocess)
    try:
        worker = await executor.start(progress)
        in_flight = args.in_flight or (2 if worker.device.startswith("cuda") else 1)
        known = None if args.limits is None else await asyncio.to_thread(read_limits, args.limits)
        async with Ruler(worker.device, worker.threads) as ruler:
            has_reads = worker.device == "cpu" and in_flight == 1
            measured = await ruler.limits() if has_reads or known is None else {}
            limits = known or measured
            check_limits(limits, worker)
            read = ruler.read if has_reads else None
            bench = Bench(executor, worker, in_flight, args.seconds, read)
            timed: list[tuple[str, Work, Timing]] = []

            def report() -> OfflineReport:
                rows = [_row(each, in_flight, sizes, worker, limits) for each in timed]
                loads = started, os.getloadavg()[0]
                return OfflineReport(args.offline, worker, in_flight, limits, rows, loads)

            async for each in run(bench, load, sizes, progress):
                timed.append(each)
                if args.json:  # a run that is ended early leaves what it has measured
                    report().write(args.json)
        if known is None:
            limits = best_of(limits, await measure_limits(worker.device, worker.threads))
    finally:
        await executor.close()
    return report()


def _row(
    timed: tuple[str, Work, Timing],
    in_flight: int,
    sizes: WeightSizes,
    worker: WorkerReport,
    limits: Mapping[str, Limit],
) -> BenchRow:
    kind, work, timing = timed
    seconds = timing.pace if in_flight > 1 else timing.worker
    bound = lower_bound_of(sizes, work, worker, limits, timing.read)
    return BenchRow(kind, work, seconds, timing, bytes_of(sizes, work, worker), bound)


async def run(
    bench: Bench,
    load: OfflineLoad,
    sizes: WeightSizes,
    progress: Callable[[str, int, int], None],
) -> AsyncIterator[tuple[str, Work, Timing]]:
    """Time the decodes, then the prefills, which overwrite the KV that the decodes read."""
    largest, context = max(load.batch_sizes), load.context
    filled = iter(range(1, largest + 1))
    await bench.fill(largest, context, lambda: progress("KV", next(filled), largest))
    for done, size in enumerate(load.batch_sizes, 1):
        work = Work(size, 1, context)
        yield "decode", work, await bench.decode(size, context, bytes_of(sizes, work, bench.report))
        progress("decode steps", done, len(load.batch_sizes))
    for done, (count, length) in enumerate(load.prompts, 1):
        work = Work(count, length, length)
        yield (
            "prefill",
            work,
            await bench.prefill(count, length, bytes_of(sizes, work, bench.report)),
        )
        progress("prefills", done, len(load.prompts))


def check_limits(limits: Mapping[str, Limit], report: WorkerReport) -> None:
    """Raise `StartupError` if the limits lack the worker's data types."""
    for name in ("read", weights_of(report), report.dtype):
        if name not in limits:
            raise StartupError(f"the limits of {report.device} have no entry for {name!r}")


def open_shape(name: str) -> tuple[Path, Mapping[str, object]]:
    """The directory of a shape's random weights, and its config. Raises `StartupError`."""
    module = importlib.import_module(CHECKPOINTS)
    directory = cast("Path", module.resolve_checkpoint(f"random:{name}"))
    return directory, cast("Mapping[str, object]", module.read_config(directory))


def worker_settings(
    args: argparse.Namespace, directory: Path, load: OfflineLoad, sizes: WeightSizes
) -> WorkerSettings:
    """A worker with the KV blocks that the load needs, and host KV for one request."""
    kv = with_flags(KVSettings(), args)
    size = kv.block_size
    host_blocks = -(-load.context // size)
    kernel_choices = str(user_cache_path("podway", appauthor=False) / "kernel_choices")
    return WorkerSettings(
        model=str(directory),
        kernels=replace(with_flags(Kernels(), args), kernel_choices=kernel_choices),
        kv=replace(kv, kv_slots=load.num_blocks(size) * size),
        tiers=Tiers(host_kv_memory=host_blocks * sizes.block_bytes(size)),
        max_model_len=load.longest,
        max_batch_tokens=max([512, *(each.num_requests * each.length for each in load.prompts)]),
        max_batch_size=max([*load.batch_sizes, *(each.num_requests for each in load.prompts)]),
        lookahead=1,
    )
