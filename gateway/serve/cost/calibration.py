"""Calibration: the cost model of iterations on this machine, saved or measured at the start: by
single steps, and by a trial run of requests through scheduler and event loop.

A cost file belongs to one model, machine and configuration (`gateway.serve.saved`).

The profiler's steps follow each other at once, with one context for all rows. While serving, every
request has KV blocks of its own, and between two steps the worker waits until the event loop has
committed one step and planned the next. So the cost model at the start is fitted to the profiler's
samples and to the steps of a trial run together, and the time between steps is that of the trial
run. Its requests write to KV blocks before any other request owns them.

A request that comes meanwhile does not wait for the end. It is served with what single steps have
shown or, before these are over, with a default that is fitted while serving (results/learned_cost).
The next start measures again. A model that is loaded for a request is not measured.
"""

import asyncio
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import NamedTuple

from engine.control.event_recorder import EventRecorder, RecordingHeader, Row, render
from engine.control.settings import SchedulerSettings
from engine.cost.fit import fit
from engine.cost.live import LiveCost
from engine.cost.model import UNMEASURED, CostModel
from engine.cost.profiler import Awaited, ProbeLimits, Profile, measure, nobody_waits
from engine.errors import EngineError
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy import PolicySettings
from engine.ports import Clock, StepExecutor
from engine.request import RequestSpec
from engine.simulated.replay import Recording, decode_row
from engine.step import SamplingParams
from engine.worker_settings import WorkerReport
from gateway.serve.saved import SavedFile, model_facts
from gateway.version import podway_version

logger = logging.getLogger(__name__)
PROFILE_SECONDS = 2.0  # maximum, but at least two steps are measured
TRIAL_SECONDS = 1.0
LONGEST_PROMPT, LONGEST_OUTPUT = 512, 32  # tokens
MAX_REQUESTS = 1000
_GREEDY = SamplingParams(temperature=0.0)
Lengths = tuple[int, int]  # tokens of a prompt, and of its output


async def refined(
    executor: StepExecutor,
    limits: ProbeLimits,
    profile: Profile,
    clock: Clock,
    seconds: float,
    is_awaited: Callable[[], bool] = nobody_waits,
) -> CostModel:
    """The cost model of `profile` and of a trial run of about `seconds`; of `profile` alone if the
    model pools, or if a trial run would take longer. Raises the error of a failed request, and
    `Awaited` between two waves."""
    rows: list[Row] = []
    header = _header(executor, limits, profile.model)
    scheduler = header.build(
        LiveCost(header.cost), EventRecorder(rows.append, header.kv.block_size)
    )
    planned = [] if limits.pools else list(waves(limits, header.cost, seconds))
    await _run(Engine(scheduler, executor, clock), planned, is_awaited)
    if not planned:
        return profile.model
    events = tuple(decode_row(render(row, str)) for row in rows)
    trial = Recording(Path("trial run"), header, events)
    return fit([*profile.samples, *trial.samples()], *trial.idle(), graphs=limits.graphs)


def waves(limits: ProbeLimits, cost: CostModel, seconds: float) -> Iterator[list[Lengths]]:
    """Requests that are sent at once, until the last of them has ended: 1, 2, 4 requests and so on
    up to a whole batch. Of `seconds` the nth of these numbers has n parts."""
    random = Random(0)
    counts = [1 << power for power in range(limits.max_batch_size.bit_length())]
    half = limits.longest // 2
    most = min(LONGEST_PROMPT, half), min(LONGEST_OUTPUT, half)
    num_left = MAX_REQUESTS if min(most) else 0
    for number, count in enumerate(counts, 1):
        left = seconds * number / sum(range(len(counts) + 1))
        while num_left >= count:
            wave = [_lengths(random, *most) for _ in range(count)]
            left -= _seconds(wave, cost)
            if left < 0.0:
                break
            num_left -= count
            yield wave


def _lengths(random: Random, most_prompt: int, most_output: int) -> Lengths:
    return round(most_prompt ** random.random()), random.randint(1, most_output)


def _seconds(wave: list[Lengths], cost: CostModel) -> float:
    """The seconds that the wave's prompts and decodes take."""
    longest = max(output for _, output in wave)
    decodes = longest * cost.decodes(len(wave), sum(map(sum, wave)))
    return sum(cost.compute(prompt, 0) for prompt, _ in wave) + decodes


async def _run(
    engine: Engine, planned: list[list[Lengths]], is_awaited: Callable[[], bool]
) -> None:
    random = Random(1)
    running = asyncio.create_task(engine.run())
    try:
        for wave in planned:
            if is_awaited():
                raise Awaited
            async with asyncio.TaskGroup() as group:
                for prompt_len, output_len in wave:
                    prompt = tuple(random.choices((0, 1), k=prompt_len))
                    group.create_task(_request(engine, prompt, output_len))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    finally:
        running.cancel()
        await asyncio.wait([running])


async def _request(engine: Engine, prompt: tuple[int, ...], output_len: int) -> None:
    spec = RequestSpec(prompt, output_len, _GREEDY)
    with engine.stream(spec) as stream:
        while (await stream.next()).finish is None:
            pass


def _header(executor: StepExecutor, limits: ProbeLimits, cost: CostModel) -> RecordingHeader:
    """First come, first served."""
    settings = SchedulerSettings(
        max_model_len=limits.max_model_len,
        max_batch_size=limits.max_batch_size,
        max_batch_tokens=limits.max_batch_tokens,
    )
    return RecordingHeader(
        policy="fcfs",
        policies=PolicySettings(seats=limits.max_batch_size),
        scheduler=settings,
        kv=KVShape(limits.num_blocks, limits.block_size),
        depth=executor.depth,
        cost=cost,
    )


@dataclass(frozen=True, slots=True)
class Calibration:
    """A cost model, the file it is saved in (None: not saved), and its origin in words."""

    model: CostModel
    file: SavedFile | None
    origin: str

    def update(self, cost: LiveCost) -> None:
        """Remove the file of a calibration that the iterations of a server refuted: the next start
        measures again. All else that it learned holds for the load of that day."""
        if self.file is not None and cost.is_refuted:
            with suppress(OSError):  # as a file that cannot be saved stops no server
                self.file.path.unlink(missing_ok=True)

    def __str__(self) -> str:
        alone, prompt = self.model.compute(1, 0), self.model.compute(256, 0)
        return (
            f"{alone * 1e3:.3g} ms per decode step, {prompt * 1e3:.3g} ms for 256 tokens; "
            f"{self.origin}"
        )


def cost_file(facts: Mapping[str, object], directory: Path | None = None) -> SavedFile:
    """The file of the cost model for these facts, in the user's cache or in `directory`."""
    return SavedFile.of(facts, "cost", directory)


def cost_facts(directory: Path, report: WorkerReport, stages: int, ranks: int) -> dict[str, object]:
    """Everything that the duration of a step depends on."""
    return model_facts(directory) | {
        "podway": podway_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "device": report.device,
        "dtype": report.dtype,
        "weight_format": report.weights,
        "kv_dtype": report.kv_dtype,
        "attention": report.attention,
        "threads": report.threads,
        "task": "generate" if report.pooling is None else report.pooling.task,
        "block_size": report.block_size,
        "stages": stages,
        "ranks": ranks,
        "graphs": list(report.graphs),
    }


def processor() -> str:
    """The CPU's model name, if the system knows it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


async def calibrate(
    source: str,
    file: SavedFile,
    executor: StepExecutor,
    bounds: ProbeLimits,
    is_awaited: Callable[[], bool] = nobody_waits,
) -> Calibration:
    """The cost model from `source`: "auto" (saved, else measured until a request waits), "measure"
    (always measured) or "none" (a default that is fitted while serving)."""
    default = replace(UNMEASURED, graphs=bounds.graphs)
    if source == "none":
        return Calibration(default, None, "a default, fitted while serving")
    if source == "auto" and (known := file.load(CostModel.parse)) is not None:
        return Calibration(known, file, f"from {file.path}")
    started = time.perf_counter()
    waits = is_awaited if source == "auto" else nobody_waits
    try:
        model, is_stable = await measured(executor, bounds, time.perf_counter, waits)
    except Awaited:
        why = "since a request came before it was measured"
        return Calibration(default, file, f"a default, fitted while serving, {why}")
    except (EngineError, ValueError) as error:
        logger.warning("cannot measure the cost of iterations: %s", error)
        return Calibration(default, file, "a default, because measuring failed")
    took = time.perf_counter() - started
    if not is_stable:
        busy = "beside other work or until a request came, so the next start measures again"
        return Calibration(model, file, f"measured in {took:.1f} s {busy}")
    file.save(asdict(model))
    return Calibration(model, file, f"measured in {took:.1f} s")


class Measured(NamedTuple):
    """A cost model, and whether it is whole and single steps took the same time again and again."""

    model: CostModel
    is_stable: bool


async def measured(
    executor: StepExecutor,
    bounds: ProbeLimits,
    clock: Clock,
    is_awaited: Callable[[], bool] = nobody_waits,
) -> Measured:
    """The cost model of single steps and of a trial run through scheduler and event loop; of single
    steps alone if a request of the trial run fails, or one of a client comes. Raises the error of a
    failed single step, ValueError if the fit is not determined, and `Awaited` before that."""
    profile = await measure(executor, bounds, clock, PROFILE_SECONDS, is_awaited)
    try:
        model = await refined(executor, bounds, profile, clock, TRIAL_SECONDS, is_awaited)
    except Awaited:
        return Measured(profile.model, is_stable=False)
    except EngineError as error:
        logger.warning("a request of the trial run failed; single steps are used: %s", error)
        model = profile.model
    return Measured(model, profile.is_stable)
