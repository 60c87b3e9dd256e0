"""Speculation off and on: tokens/s by method, text and number of requests at once.

    python -m examples.benchmarks.speculation.engines [--clients 1 8] [--rounds 12] [--weights int8]
                                    [--texts edit loops …] [--out FILE]

An engine without speculation and one with each method run in this process. All use one worker,
because the place of its weights in memory changes a worker's speed by some per cent. In each round
they serve the same requests, in turns of a few milliseconds, so that other load of the machine
changes all alike. They must produce the same tokens. A ratio is that of a method's tokens/s to
those without speculation in the same round. `ratio` is the median over the rounds and `interval`
its 95 % confidence interval (of the order statistics). A second engine without speculation, `off`,
is compared in the same way: it shows the noise. One round is served before the first measured one,
so that rates and costs are known. Texts:

    edit      random weights, temperature 1; each request's `prediction` is its output with one
              token in twenty replaced, removed or inserted. (A model of random weights copies
              nothing from its prompt, so the known output stands for the text that is edited.)
    again     random weights; each request was answered before with the same seed, so that its
              output is among the recent outputs
    loops     the built-in model, greedy and without its chat template: the output soon repeats
              itself
    stories   the built-in model, temperature 1: ordinary text; predictions are unrelated to it
    hostile   random weights, temperature 1: every token is a surprise; predictions are unrelated
    layers    98 M random weights at temperature 1, with the model's first layer as the draft model
              (`examples.benchmarks.speculation.draft_checkpoints`)
    unlike    the same, with a draft model of other weights, which is never right

Each round has other requests, but for `again`. Seconds are those of the whole run with its prompts.
With `--clock cpu` and one thread, they are CPU seconds of this process, which has the engine and
the worker: so other load of the machine changes little.
"""

import argparse
import asyncio
import gc
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from adapters.models.random_checkpoint import random_checkpoint
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.cost.profiler import ProbeLimits, measure
from engine.kv.ledger import KVLedger
from engine.kv.page_pool import PagePool
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.ports import Clock
from engine.request import RequestSpec
from engine.speculation.acceptance import DraftCounts
from engine.speculation.drafter import Drafter
from engine.speculation.settings import SpeculationSettings
from engine.step import Step, StepResult
from engine.worker.process.worker import Worker
from engine.worker_settings import Kernels, KVSettings, WorkerReport, WorkerSettings
from examples.benchmarks.speculation.draft_checkpoints import write_checkpoints
from examples.benchmarks.speculation.pairs import median_interval
from examples.benchmarks.speculation.texts import (
    BUILTIN,
    OF_BUILTIN,
    OFF,
    OUTPUT_LEN,
    PROMPT_LEN,
    TEXTS,
    WITH_DRAFT_MODEL,
    predicted,
    specs_of,
)
from examples.benchmarks.speculation.time_slices import SlicedExecutor, TimeSlices
from tests.inline_executor import InlineExecutor, StepRunner

CALIBRATION_SECONDS = 3.0
MAX_CLIENTS = 64
MAX_ENGINES = 1 + max(map(len, TEXTS.values()))
MIN_REQUESTS = 4  # per run


class TimedWorker:
    """Runs steps on a worker, and measures them by a clock, in place of elapsed seconds."""

    def __init__(self, worker: StepRunner, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock

    def run(self, step: Step) -> StepResult:
        began = self._clock()
        result = self._worker.run(step)
        seconds = self._clock() - began
        proposing = result.proposal_seconds * seconds / result.seconds
        return replace(result, seconds=seconds, proposal_seconds=proposing)


@dataclass(frozen=True)
class Machine:
    """A loaded worker, and what its steps cost by a clock. Several engines may use it by turns."""

    worker: TimedWorker
    report: WorkerReport
    cost: CostModel
    clock: Clock
    blocks: PagePool  # from which every engine takes its KV blocks
    draft_cost: CostModel | None = None  # with which drafts are chosen; None: `cost`, as it learns

    def ledger(self) -> KVLedger:
        """A ledger for one engine, over the blocks of all."""
        ledger = KVLedger(KVShape(self.report.num_blocks, self.report.block_size))
        ledger.blocks.pool = ledger.pool = self.blocks
        ledger.blocks.index = ledger.prefixes = self.blocks.prefixes
        return ledger


@dataclass(frozen=True)
class Run:
    """One run: the outputs by request, its speed, and how many drafts were computed and right."""

    outputs: list[list[int]]
    tokens_per_second: float
    num_drafts: int = 0
    num_accepted: int = 0
    by_position: tuple[int, ...] = ()  # of the accepted ones, by the number of drafts before them


def load(
    model: str,
    draft_model: str,
    weights: str,
    threads: int,
    clock: Clock,
    *,
    has_mtp: bool = False,
) -> Machine:
    """Load a model and measure its steps, as the server does at its start."""
    settings = WorkerSettings(
        model,
        max_batch_tokens=512,
        max_batch_size=MAX_CLIENTS,
        draft_model=draft_model,
        has_mtp=has_mtp,
        kernels=Kernels(weights=weights if model != BUILTIN else "auto", threads=threads),
        kv=KVSettings(kv_slots=MAX_ENGINES * MAX_CLIENTS * 2 * (PROMPT_LEN + OUTPUT_LEN)),
    )
    loaded = Worker.load(settings, lambda *_: None)
    worker, report = TimedWorker(loaded, clock), loaded.report
    limits = ProbeLimits(
        max_batch_size=MAX_CLIENTS,
        max_batch_tokens=512,
        max_model_len=report.max_model_len,
        num_blocks=report.num_blocks,
        block_size=report.block_size,
    )

    async def calibrate() -> CostModel:
        profile = await measure(InlineExecutor(worker), limits, clock, CALIBRATION_SECONDS)
        return profile.model

    blocks = KVLedger(KVShape(report.num_blocks, report.block_size)).pool
    return Machine(worker, report, asyncio.run(calibrate()), clock, blocks)


class EngineUnderTest:
    """An engine over the machine's worker; `config` as of `--speculative-config`, None for none."""

    def __init__(
        self,
        machine: Machine,
        config: Mapping[str, object] | None,
        slices: TimeSlices | None = None,
    ) -> None:
        """Start it; a loop must be running. With `slices` it runs by turns with other engines."""
        report, cost = machine.report, LiveCost(machine.cost)
        settings = SchedulerSettings(
            max_model_len=report.max_model_len,
            max_batch_size=MAX_CLIENTS,
            max_batch_tokens=512,
            reuses_prefixes=False,
        )
        self._slices = slices or TimeSlices(machine.clock, Random(0))
        self._executor = SlicedExecutor(machine.worker, self._slices)
        self._drafter: Drafter | None = None
        if config is not None:
            size_ratio = report.num_draft_parameters / report.num_parameters
            draft_cost = cost if machine.draft_cost is None else LiveCost(machine.draft_cost)
            parsed = SpeculationSettings.parse(config)
            self._drafter = Drafter.build(parsed, draft_cost, size_ratio, self._executor.now)
        scheduler = IterationScheduler(
            settings, machine.ledger(), FirstComeFirstServed(), cost=cost, drafter=self._drafter
        )
        self._engine = Engine(scheduler, self._executor, self._executor.now)
        self._running = asyncio.create_task(self._engine.run())

    def close(self) -> None:
        self._running.cancel()

    async def serve(self, specs: Sequence[RequestSpec], clients: int) -> Run:
        """Serve the requests, `clients` at once."""
        drafter, outputs = self._drafter, [[0] * 0 for _ in specs]
        if drafter is not None:
            drafter.counts = DraftCounts(by_position=[0] * len(drafter.counts.by_position))
        left = iter(enumerate(specs))

        async def client() -> None:
            for number, spec in left:
                with self._engine.stream(spec) as stream:
                    is_running = True
                    while is_running:
                        chunk = await stream.next()
                        outputs[number] += chunk.tokens
                        is_running = chunk.finish is None

        await self._slices.begin(self._executor)
        began = self._executor.now()
        await asyncio.gather(*(client() for _ in range(clients)))
        rate = sum(map(len, outputs)) / (self._executor.now() - began)
        self._slices.end(self._executor)
        if drafter is None:
            return Run(outputs, rate)
        counts = drafter.counts
        accepted = tuple(counts.by_position)
        return Run(outputs, rate, counts.num_drafts, counts.num_accepted, accepted)


async def serve(
    machine: Machine,
    specs: Sequence[RequestSpec],
    clients: int,
    config: Mapping[str, object] | None,
    *,
    is_again: bool,
) -> Run:
    """Serve the requests with a new engine. With `is_again` it has served them before."""
    engine = EngineUnderTest(machine, config)
    if is_again:
        await engine.serve(specs, clients)
    run = await engine.serve(specs, clients)
    engine.close()
    return run


def config_of(method: str) -> dict[str, object] | None:
    """The `--speculative-config` of a method; None without speculation."""
    if method in ("plain", OFF):
        return None
    model: dict[str, object] = {"model": "loaded"} if method == "draft_model" else {}
    return {"method": method} | model


async def compare(machine: Machine, text: str, clients: int, rounds: int) -> list[dict[str, Any]]:
    """The figures of each method on one text, with the runs of all methods interleaved."""
    random = Random(rounds)
    slices = TimeSlices(machine.clock, random)
    engines = {
        name: EngineUnderTest(machine, config_of(name), slices) for name in ("plain", *TEXTS[text])
    }
    runs: list[dict[str, Run]] = []
    for number in range(rounds + 1):
        specs = specs_of(text, max(clients, MIN_REQUESTS), number)
        known = [[0] * 0 for _ in specs]
        if text == "edit":
            known = (await engines["plain"].serve(specs, clients)).outputs
        with_prediction = predicted(text, specs, known)
        gc.collect()
        order = list(engines)
        random.shuffle(order)  # the first turn of a round is slow
        serving = {
            name: asyncio.create_task(
                engines[name].serve(with_prediction if name == "prediction" else specs, clients)
            )
            for name in order
        }
        runs.append({name: await task for name, task in serving.items()})
    for engine in engines.values():
        engine.close()
    return [
        {"text": text, "method": name, "clients": clients}
        | figures([run["plain"] for run in runs], [run[name] for run in runs])
        for name in TEXTS[text]
    ]


def figures(off: Sequence[Run], on: Sequence[Run]) -> dict[str, Any]:
    """The figures of one method; the first round is not measured."""
    pairs = list(zip(off, on, strict=True))
    ratios = [mine.tokens_per_second / other.tokens_per_second for other, mine in pairs[1:]]
    low, high = median_interval(ratios)
    return {
        "off": round(median([run.tokens_per_second for run in off[1:]]), 2),
        "on": round(median([run.tokens_per_second for run in on[1:]]), 2),
        "ratio": round(median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
        "drafts": sum([run.num_drafts for run in on[1:]]),
        "accepted": sum([run.num_accepted for run in on[1:]]),
        "output_tokens": sum([len(output) for run in on[1:] for output in run.outputs]),
        "same_tokens": all(mine.outputs == other.outputs for other, mine in pairs),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| text | method | requests at once | tokens/s, off | on / off | 95 % interval | "
        "drafts per 100 tokens | accepted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["interval"]
        drafts = 100 * row["drafts"] / row["output_tokens"]
        share = f"{100 * row['accepted'] / row['drafts']:.0f} %" if row["drafts"] else ""
        lines.append(
            f"| {row['text']} | {row['method']} | {row['clients']} | {row['off']:.0f} | "
            f"{row['ratio']:.3f} | {low:.3f} to {high:.3f} | {drafts:.1f} | {share} |"
        )
    return "\n".join(lines)


def save(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Add rows to a JSON file, in place of earlier rows of the same kind."""
    keys = ("text", "method", "clients", "weights", "clock", "threads")
    known = json.loads(file.read_text()) if file.exists() else []
    new = {tuple(row[key] for key in keys) for row in rows}
    known = [row for row in known if tuple(row[key] for key in keys) not in new]
    file.write_text(json.dumps([*known, *rows], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=list(TEXTS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--weights", default="int8", help="of the model of random weights")
    parser.add_argument("--shape", default="M110", help="of the model of random weights")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out", type=Path, help="JSON file; rows of earlier runs are kept")
    arguments = parser.parse_args()
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    machines: dict[tuple[str, str], Machine] = {}
    folder = TemporaryDirectory()
    checkpoints: tuple[Path, ...] = ()
    if not set(WITH_DRAFT_MODEL).isdisjoint(arguments.texts):
        checkpoints = write_checkpoints(Path(folder.name))
    for text in arguments.texts:
        model = (BUILTIN if text in OF_BUILTIN else str(random_checkpoint(arguments.shape)), "")
        if text in WITH_DRAFT_MODEL:
            model = (str(checkpoints[0]), str(checkpoints[1 + (text == "unlike")]))
        if model not in machines:
            machines[model] = load(*model, arguments.weights, arguments.threads, clock)
        report = machines[model].report
        for clients in arguments.clients:
            found = asyncio.run(compare(machines[model], text, clients, arguments.rounds))
            print(table(found), f"load {os.getloadavg()[0]:.1f}", sep="\n", flush=True)
            for row in found:
                row |= {
                    "weights": report.weights,
                    "clock": arguments.clock,
                    "threads": report.threads,
                    "rounds": arguments.rounds,
                    "load": round(os.getloadavg()[0], 1),
                }
            if arguments.out is not None:
                save(found, arguments.out)
    folder.cleanup()


if __name__ == "__main__":
    main()
