"""The trial run: requests through scheduler and event loop before the server is ready.

The profiler's steps follow each other at once, with one context for all rows. While serving, every
request has KV blocks of its own, and between two steps the worker waits until the event loop has
committed one step and planned the next. So the cost model at the start is fitted to the profiler's
samples and to the steps of a trial run together, and the time between steps is that of the trial
run. Its requests write to KV blocks before any other request owns them.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from engine.control.event_recorder import EventRecorder, RecordingHeader, Row, render
from engine.control.settings import SchedulerSettings
from engine.cost.fit import fit
from engine.cost.live import LiveCost
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy import PolicySettings
from engine.request import RequestSpec
from engine.simulated.replay import Recording, decode_row
from engine.step import SamplingParams

if TYPE_CHECKING:
    from engine.cost.model import CostModel
    from engine.cost.profiler import ProbeLimits, Profile
    from engine.ports import Clock, StepExecutor

LONGEST_PROMPT, LONGEST_OUTPUT = 512, 32  # tokens
MAX_REQUESTS = 1000
_GREEDY = SamplingParams(temperature=0.0)
Lengths = tuple[int, int]  # tokens of a prompt, and of its output


async def refined(
    executor: "StepExecutor",
    limits: "ProbeLimits",
    profile: "Profile",
    clock: "Clock",
    seconds: float,
) -> "CostModel":
    """The cost model of `profile` and of a trial run of about `seconds`; of `profile` alone if the
    model pools, or if a trial run would take longer. Raises the error of a failed request."""
    rows: list[Row] = []
    header = _header(executor, limits, profile.model)
    scheduler = header.build(
        LiveCost(header.cost), EventRecorder(rows.append, header.kv.block_size)
    )
    planned = [] if limits.pools else list(waves(limits, header.cost, seconds))
    await _run(Engine(scheduler, executor, clock), planned)
    if not planned:
        return profile.model
    events = tuple(decode_row(render(row, str)) for row in rows)
    trial = Recording(Path("trial run"), header, events)
    return fit([*profile.samples, *trial.samples()], *trial.idle(), graphs=limits.graphs)


def waves(limits: "ProbeLimits", cost: "CostModel", seconds: float) -> Iterator[list[Lengths]]:
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


def _seconds(wave: list[Lengths], cost: "CostModel") -> float:
    """The seconds that the wave's prompts and decodes take."""
    longest = max(output for _, output in wave)
    decodes = longest * cost.decodes(len(wave), sum(map(sum, wave)))
    return sum(cost.compute(prompt, 0) for prompt, _ in wave) + decodes


async def _run(engine: Engine, planned: list[list[Lengths]]) -> None:
    random = Random(1)
    running = asyncio.create_task(engine.run())
    try:
        for wave in planned:
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


def _header(executor: "StepExecutor", limits: "ProbeLimits", cost: "CostModel") -> RecordingHeader:
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
