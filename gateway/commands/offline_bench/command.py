"""`podway bench --offline SHAPE`: decode steps and prefills of a worker alone, beside their floors.

The worker runs as it does under a server, in a process of its own; no server, tokenizer or
scheduler takes part.
"""

import argparse
import asyncio
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import uvloop
from rich.console import Console

from engine.errors import EngineError, StartupError
from engine.step import WorkerReport, WorkerSettings
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings
from gateway.commands.flags import Parser, ShowDefaults, above_zero, positive
from gateway.commands.offline_bench.machine import best_of, measure_limits, read_limits
from gateway.commands.offline_bench.report import BenchRow, OfflineReport, show
from gateway.commands.offline_bench.roofline import (
    Limit,
    WeightSizes,
    Work,
    lower_bound_of,
    weights_of,
)
from gateway.commands.offline_bench.steps import Bench, Timing
from gateway.serve.terminal import LoadingBars

CHECKPOINTS = "adapters.models.checkpoint"
STEP_SECONDS = 600.0  # a prefill may take long on a small machine


class PrefillCase(NamedTuple):
    """So many prompts of so many tokens, computed in one step."""

    num_requests: int
    length: int

    @classmethod
    def parse(cls, text: str) -> "PrefillCase":
        """`512`, or `8x512`."""
        found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", text)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r} is neither a length nor such as 8x512")
        return cls(int(found[1] or 1), int(found[2]))


@dataclass(frozen=True, slots=True)
class OfflineLoad:
    """What is to be measured."""

    batch_sizes: Sequence[int]
    context: int
    prompts: Sequence[PrefillCase]

    @property
    def longest(self) -> int:
        return max([self.context, *(each.length for each in self.prompts)])

    def num_blocks(self, size: int) -> int:
        """Blocks that the largest step needs."""
        decodes = max(self.batch_sizes) * -(-self.context // size)
        return max(
            [decodes, *(each.num_requests * -(-each.length // size) for each in self.prompts)]
        )


def parser() -> Parser:
    """The flags of `podway bench --offline`."""
    parser = Parser(
        "podway bench --offline",
        description="Run a worker alone on random weights of a named shape.",
        usage="podway bench --offline SHAPE [flags]",
        formatter_class=ShowDefaults,
    )
    add = parser.add_argument
    add("--offline", metavar="SHAPE", required=True, help="a named shape, or a directory")
    add("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", metavar="NAME", help="of activations, as for podway serve")
    add("--weights", default="auto", metavar="NAME", help="format of the linear layers")
    add("--activation-bits", default="auto", metavar="N", help="of int8 linears: auto, 8 or 14")
    add("--kv-cache-dtype", default="auto", metavar="NAME", help="of keys and values")
    add("--attention", default="auto", metavar="NAME", help="attention backend")
    add("--threads", type=int, default=0, metavar="N", help="compute threads; 0: all cores")
    add("--batch-sizes", type=_numbers, default="1,8,32", metavar="N,N", help="of decode steps")
    add("--context", type=positive, default=512, metavar="N", help="tokens cached when decoding")
    add("--prompt-lengths", type=_prompts, default="128,512", metavar="N,BxN", help="of prefills")
    add("--block-size", type=positive, default=16, metavar="N", help="slots in a KV block")
    add("--in-flight", type=int, choices=(1, 2), help="steps; by default 2 on a GPU, else 1")
    add("--seconds", type=above_zero, default=2.0, metavar="S", help="to time steps alike")
    add("--limits", type=Path, metavar="JSON", help="of an earlier run here, not measured again")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    return parser


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _prompts(text: str) -> list[PrefillCase]:
    return [PrefillCase.parse(part) for part in text.split(",")]


def main(argv: list[str]) -> int:
    """Measure and show; 1 where that cannot be done."""
    args = parser().parse_args(argv)
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
    """One run. Raises `StartupError`, and `StepFailed` or `WorkerLost` where a step fails."""
    directory, config = open_shape(args.offline)
    load = OfflineLoad(args.batch_sizes, args.context, args.prompt_lengths)
    sizes = WeightSizes.of(config)
    if load.longest > sizes.max_positions:
        raise StartupError(
            f"{args.offline} has {sizes.max_positions} positions, {load.longest} were asked for"
        )
    started = os.getloadavg()[0]
    keeping = MultiprocessSettings(depth=2, step_seconds=STEP_SECONDS, max_restarts=0)
    executor = MultiprocessExecutor(worker_settings(args, directory, load, sizes), keeping)
    try:
        found = await executor.start(progress)
        in_flight = args.in_flight or (2 if found.device.startswith("cuda") else 1)
        known = None if args.limits is None else await asyncio.to_thread(read_limits, args.limits)
        limits = known or await measure_limits(found.device, found.threads)
        check_limits(limits, found)
        bench = Bench(executor, found, in_flight, args.seconds)
        timed = await run(bench, load, progress)
        if known is None:
            limits = best_of(limits, await measure_limits(found.device, found.threads))
    finally:
        await executor.close()
    rows = [
        BenchRow(
            kind,
            work,
            timing.pace if in_flight > 1 else timing.worker,
            *timing,
            lower_bound_of(sizes, work, found, limits),
        )
        for kind, work, timing in timed
    ]
    ended = os.getloadavg()[0]
    return OfflineReport(args.offline, found, in_flight, limits, rows, (started, ended))


async def run(
    bench: Bench, load: OfflineLoad, progress: Callable[[str, int, int], None]
) -> list[tuple[str, Work, Timing]]:
    """Decodes, then prefills, which write over what decodes read."""
    timed = []
    largest, context = max(load.batch_sizes), load.context
    filled = iter(range(1, largest + 1))
    await bench.fill(largest, context, lambda: progress("KV", next(filled), largest))
    for done, size in enumerate(load.batch_sizes, 1):
        work = Work(size, 1, context)
        timed.append(("decode", work, await bench.decode(size, context)))
        progress("decode steps", done, len(load.batch_sizes))
    for done, (count, length) in enumerate(load.prompts, 1):
        work = Work(count, length, length)
        timed.append(("prefill", work, await bench.prefill(count, length)))
        progress("prefills", done, len(load.prompts))
    return timed


def check_limits(limits: Mapping[str, Limit], found: WorkerReport) -> None:
    """Raises `StartupError` where nothing tells how fast the worker's numbers could be."""
    for name in ("read", weights_of(found), found.dtype):
        if name not in limits:
            raise StartupError(f"there is no limit of {name} on {found.device}")


def open_shape(name: str) -> tuple[Path, Mapping[str, object]]:
    """The directory of random weights of a shape, and its config; raises `StartupError`."""
    module = importlib.import_module(CHECKPOINTS)
    directory = cast("Path", module.resolve_checkpoint(f"random:{name}"))
    return directory, cast("Mapping[str, object]", module.read_config(directory))


def worker_settings(
    args: argparse.Namespace, directory: Path, load: OfflineLoad, sizes: WeightSizes
) -> WorkerSettings:
    """A worker with just the room that the load needs, and a host tier for one request."""
    size = args.block_size
    host_blocks = -(-load.context // size)
    return WorkerSettings(
        model=str(directory),
        dtype=args.dtype,
        weights=args.weights,
        activation_bits=args.activation_bits,
        kv_dtype=args.kv_cache_dtype,
        device=args.device,
        attention=args.attention,
        block_size=size,
        kv_slots=load.num_blocks(size) * size,
        host_kv_bytes=host_blocks * sizes.block_bytes(size),
        max_model_len=load.longest,
        max_batch_tokens=max([512, *(each.num_requests * each.length for each in load.prompts)]),
        max_batch_size=max([*load.batch_sizes, *(each.num_requests for each in load.prompts)]),
        threads=args.threads,
        lookahead=1,
    )
