"""A real worker of a model with recurrent layers is killed; answers go on with the same bits."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import RequestSpec
from engine.step import SamplingParams, TokenLogprobs
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings
from tests.models.checkpoints import make_checkpoint
from tests.worker_settings import worker_settings

pytestmark = pytest.mark.process

SPECS = [
    RequestSpec(
        tuple(range(seed, 30)), 60, SamplingParams(temperature=seed % 2, seed=seed), logprobs=1
    )
    for seed in range(3)
]
Answer = list[tuple[int, TokenLogprobs]]


async def read(engine: Engine, executor: MultiprocessExecutor, at: int, kills: bool) -> Answer:
    """One answer; the worker is killed behind the first 20 tokens of the first one."""
    answer: Answer = []
    with engine.stream(SPECS[at]) as stream:
        finish = None
        while finish is None:
            chunk = await stream.next()
            answer += zip(chunk.tokens, chunk.logprobs, strict=True)
            finish = chunk.finish
            if kills and at == 0 and len(answer) >= 20:
                os.kill(executor.pids[0], signal.SIGKILL)
                kills = False
    return answer


async def answers(directory: Path, *, kills: bool) -> tuple[list[Answer], int]:
    """All answers, computed together, and how often the worker was started again."""
    settings = worker_settings(model=str(directory), block_size=4, kv_slots=512, threads=1)
    executor = MultiprocessExecutor(settings, MultiprocessSettings(restart_pause=0.0))
    report = await executor.start(lambda what, done, total: None)
    bounds = SchedulerSettings(max_model_len=100, max_batch_size=4, max_batch_tokens=24)
    ledger = KVLedger(
        KVShape(
            report.num_blocks,
            report.block_size,
            windows=report.windows,
            num_states=report.num_states,
        )
    )
    scheduler = IterationScheduler(bounds, ledger, FirstComeFirstServed())
    engine = Engine(scheduler, executor, asyncio.get_running_loop().time)
    running = asyncio.create_task(engine.run())
    try:
        found = await asyncio.gather(
            *(read(engine, executor, at, kills) for at in range(len(SPECS)))
        )
        return found, executor.num_restarts
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await executor.close()


async def test_answers_are_the_same_bits_after_their_worker_was_killed(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3_5")
    undisturbed, _ = await answers(directory, kills=False)
    found, num_restarts = await answers(directory, kills=True)
    assert num_restarts == 1
    assert found == undisturbed
