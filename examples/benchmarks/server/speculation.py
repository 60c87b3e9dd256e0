"""Speculation off and on: tokens/s by method, text and number of requests at once.

    python -m examples.benchmarks.server.speculation [--clients 1 8] [--rounds 3] [--weights int8]
                                    [--texts edit loops …] [--out FILE]

The engine and its worker run in this process; runs without and with each method alternate. Every
run must produce the same tokens as the run without speculation. The texts:

    edit      random weights, temperature 1; each request's `prediction` is its output with one
              token in twenty replaced, removed or inserted. (A model of random weights copies
              nothing from its prompt, so the known output stands for the text that is edited.)
    again     random weights; each request was answered before with the same seed, so that its
              output is among the recent outputs
    loops     the built-in model, greedy and without its chat template: the output soon repeats
              itself
    stories   the built-in model, temperature 1: ordinary text
    hostile   random weights, temperature 1: every token is a surprise
    layers    98 M random weights at temperature 1, with the model's first layer as the draft model
              (`examples.benchmarks.server.draft_checkpoints`)
    unlike    the same, with a draft model of other weights, which is never right

Figures are medians over the rounds, of output tokens/s without the prompts' iterations. Each round
runs without speculation before and after all methods, and a ratio is that of a run to the mean of
these two; `equal_work` is the range of their own ratio, which would be 1 without noise. With
`--clock cpu` and one thread, seconds are CPU seconds of this process, which has the engine and the
worker: so other load of the machine changes little.
"""

import argparse
import asyncio
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

import adapters
from adapters.models.random_checkpoint import random_checkpoint
from adapters.tokenizers import load_token_table
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.cost.profiler import ProbeLimits, measure
from engine.grammar import TokenTable
from engine.kv.ledger import KVLedger
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.ports import Clock
from engine.request import RequestSpec
from engine.speculation.drafter import DraftCounts, Drafter
from engine.speculation.settings import SpeculationSettings
from engine.step import SamplingParams, Step, StepResult
from engine.transport.inline import InlineExecutor
from engine.worker.process.worker import Worker
from engine.worker_settings import WorkerReport, WorkerSettings
from examples.benchmarks.server.draft_checkpoints import VOCAB, write_checkpoints

BUILTIN = str(Path(adapters.__file__).parent / "builtin")
TEXTS = {
    "edit": ("prediction",),
    "again": ("suffix",),
    "loops": ("ngram", "suffix"),
    "stories": ("ngram", "suffix"),
    "hostile": ("ngram", "prediction"),
    "layers": ("draft_model",),
    "unlike": ("draft_model",),
}
WITH_DRAFT_MODEL = ("layers", "unlike")
SERVED_BEFORE = ("again", *WITH_DRAFT_MODEL)  # the first requests find out what proposals cost
OF_BUILTIN = ("loops", "stories")
NAMES = ("Tom", "Lily", "Max", "Anna", "Ben", "Mia", "Sam", "Lucy")
PROMPT_LEN, OUTPUT_LEN = 16, 64
MIN_REQUESTS = 4
EDIT_EVERY = 20  # tokens
CALIBRATION_SECONDS = 3.0
MAX_CLIENTS = 64


class TimedWorker:
    """Runs steps on a worker, and measures them by a clock."""

    def __init__(self, worker: Worker, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock

    def run(self, step: Step) -> StepResult:
        began = self._clock()
        result = self._worker.run(step)
        return replace(result, seconds=self._clock() - began)


@dataclass(frozen=True)
class Machine:
    """A loaded worker, and what its steps cost by a clock."""

    worker: TimedWorker
    report: WorkerReport
    cost: CostModel
    clock: Clock
    draft_cost: CostModel | None = None  # with which drafts are chosen; None: `cost`, as it learns


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
        weights=weights if model != BUILTIN else "auto",
        kv_slots=MAX_CLIENTS * 2 * (PROMPT_LEN + OUTPUT_LEN),
        max_batch_tokens=512,
        max_batch_size=MAX_CLIENTS,
        threads=threads,
        draft_model=draft_model,
        has_mtp=has_mtp,
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
        return await measure(InlineExecutor(worker), limits, clock, CALIBRATION_SECONDS)

    return Machine(worker, report, asyncio.run(calibrate()), clock)


def specs_of(text: str, count: int) -> list[RequestSpec]:
    """`count` requests of a text, without predictions."""
    if text in OF_BUILTIN:
        table = load_token_table(Path(BUILTIN))
        prompts = [_builtin_prompt(table, text, number) for number in range(count)]
    else:
        random = Random(count)
        vocab_size = VOCAB if text in WITH_DRAFT_MODEL else 30_000
        prompts = [tuple(random.choices(range(vocab_size), k=PROMPT_LEN)) for _ in range(count)]
    temperature = 0.0 if text == "loops" else 1.0
    return [
        RequestSpec(prompt, OUTPUT_LEN, SamplingParams(temperature=temperature, seed=number))
        for number, prompt in enumerate(prompts)
    ]


def _builtin_prompt(table: TokenTable, text: str, number: int) -> tuple[int, ...]:
    """A prompt for the built-in model: a chat message for stories, else text that it continues."""
    if text == "loops":
        return tuple(table.encode(f"{NAMES[number % len(NAMES)]} said {number}"))
    begin, end = table.special["<|im_start|>"], table.special["<|im_end|>"]
    asked = f"user\nWrite a story about {NAMES[number % len(NAMES)]}, who is {number}."
    line = table.encode("\n")
    return (begin, *table.encode(asked), end, *line, begin, *table.encode("assistant\n"))


def edited(output: Sequence[int], random: Random) -> tuple[int, ...]:
    """The output with about one token in `EDIT_EVERY` replaced, removed or inserted."""
    found: list[int] = []
    for token in output:
        kind = random.randrange(3 * EDIT_EVERY)
        if kind != 0:
            found.append(token if kind != 1 else random.randrange(30_000))
        if kind == 2:
            found.append(random.randrange(30_000))
    return tuple(found)


async def serve(
    machine: Machine,
    specs: Sequence[RequestSpec],
    clients: int,
    config: Mapping[str, object] | None,
    *,
    is_again: bool,
) -> Run:
    """Serve the requests, `clients` at once; `config` as of `--speculative-config`, None for none.
    With `is_again` they were all served before, by the same engine."""
    report, cost = machine.report, LiveCost(machine.cost)
    settings = SchedulerSettings(
        max_model_len=report.max_model_len,
        max_batch_size=MAX_CLIENTS,
        max_batch_tokens=512,
        reuses_prefixes=False,
    )
    drafter = None
    if config is not None:
        size_ratio = report.num_draft_parameters / report.num_parameters
        draft_cost = cost if machine.draft_cost is None else LiveCost(machine.draft_cost)
        drafter = Drafter.build(SpeculationSettings.parse(config), draft_cost, size_ratio)
    ledger = KVLedger(report.num_blocks, report.block_size)
    scheduler = IterationScheduler(
        settings, ledger, FirstComeFirstServed(), cost=cost, drafter=drafter
    )
    engine = Engine(scheduler, InlineExecutor(machine.worker), machine.clock)
    running = asyncio.create_task(engine.run())
    if is_again:
        await _closed_loop(engine, specs, clients, machine.clock)
        if drafter is not None:
            drafter.counts = DraftCounts(by_position=[0] * len(drafter.counts.by_position))
    outputs, rate = await _closed_loop(engine, specs, clients, machine.clock)
    running.cancel()
    if drafter is None:
        return Run(outputs, rate)
    counts = drafter.counts
    accepted = tuple(counts.by_position)
    return Run(outputs, rate, counts.num_drafts, counts.num_accepted, accepted)


async def _closed_loop(
    engine: Engine, specs: Sequence[RequestSpec], clients: int, clock: Clock
) -> tuple[list[list[int]], float]:
    """The outputs, and the tokens/s until the first client finds no request any more."""
    outputs: list[list[int]] = [[] for _ in specs]
    left = iter(enumerate(specs))
    began, num_tokens, ended = clock(), 0, 0.0

    async def client() -> None:
        nonlocal num_tokens, ended
        for number, spec in left:
            with engine.stream(spec) as stream:
                is_running = True
                while is_running:
                    chunk = await stream.next()
                    outputs[number] += chunk.tokens
                    num_tokens += len(chunk.tokens) if not ended else 0
                    is_running = chunk.finish is None
        ended = ended or clock()

    await asyncio.gather(*(client() for _ in range(clients)))
    return outputs, num_tokens / (ended - began)


def compare(machine: Machine, text: str, clients: int, rounds: int) -> list[dict[str, Any]]:
    """The figures of each method on one text, with the runs of all methods interleaved."""
    plain_specs = specs_of(text, max(clients, MIN_REQUESTS))

    def run(specs: Sequence[RequestSpec], method: str | None) -> Run:
        config = None if method is None else {"method": method}
        if method == "draft_model":
            config = {"method": method, "model": "loaded"}
        return asyncio.run(serve(machine, specs, clients, config, is_again=text in SERVED_BEFORE))

    reference = run(plain_specs, None)
    random = Random(1)
    predicted = [
        replace(spec, prediction=edited(output, random))
        for spec, output in zip(plain_specs, reference.outputs, strict=True)
    ]
    if text == "hostile":  # a prediction that has nothing to do with the output
        predicted = [
            replace(spec, prediction=tuple(random.choices(range(30_000), k=OUTPUT_LEN)))
            for spec in plain_specs
        ]
    methods = TEXTS[text]
    run(plain_specs, None)  # in the first round, kernel calls of new shapes are recorded
    plain: list[tuple[Run, Run]] = []  # before and after the other runs of a round
    runs: dict[str, list[Run]] = {method: [] for method in methods}
    for number in range(rounds):
        before = run(plain_specs, None)
        for method in methods if number % 2 else reversed(methods):
            runs[method].append(run(predicted if method == "prediction" else plain_specs, method))
        plain.append((before, run(plain_specs, None)))
    off = [(one.tokens_per_second + other.tokens_per_second) / 2 for one, other in plain]
    equal = [other.tokens_per_second / one.tokens_per_second for one, other in plain]
    rows = []
    for method in methods:
        on = [one.tokens_per_second for one in runs[method]]
        ratios = [mine / other for mine, other in zip(on, off, strict=True)]
        rows.append(
            {
                "text": text,
                "method": method,
                "clients": clients,
                "off": round(median(off), 2),
                "on": round(median(on), 2),
                "ratio": round(median(ratios), 4),
                "worst_ratio": round(min(ratios), 4),
                "equal_work": [round(min(equal), 4), round(max(equal), 4)],
                "drafts": runs[method][0].num_drafts,
                "accepted": runs[method][0].num_accepted,
                "output_tokens": sum(len(output) for output in reference.outputs),
                "same_tokens": all(one.outputs == reference.outputs for one in runs[method]),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| text | method | requests at once | tokens/s, off | on | on / off | accepted of drafts |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['text']} | {row['method']} | {row['clients']} | {row['off']:.0f} | "
            f"{row['on']:.0f} | {row['ratio']:.2f} | {row['accepted']} of {row['drafts']} |"
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
    parser.add_argument("--rounds", type=int, default=3)
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
        for clients in arguments.clients:
            found = compare(machines[model], text, clients, arguments.rounds)
            print(table(found), f"load {os.getloadavg()[0]:.1f}", sep="\n", flush=True)
            for row in found:
                row |= {
                    "weights": machines[model].report.weights,
                    "clock": arguments.clock,
                    "threads": machines[model].report.threads,
                    "rounds": arguments.rounds,
                    "load": round(os.getloadavg()[0], 1),
                }
            if arguments.out is not None:
                save(found, arguments.out)
    folder.cleanup()


if __name__ == "__main__":
    main()
