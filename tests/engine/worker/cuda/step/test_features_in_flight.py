"""Features of a GPU's worker with two steps in flight: each step is launched before the last one is
collected, and the tokens are those of the CPU's worker."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import RequestSpec
from engine.speculation.drafter import Drafter
from tests.contracts.test_features import SPECS, texts
from tests.engine.worker.cuda.launching import LaunchingExecutor, OnStandIns, on_stand_ins
from tests.engine.worker.process.driving import load_worker
from tests.models.checkpoints import make_checkpoint
from tests.models.drafts import a_drafter, a_model_drafter
from tests.models.mtp import make_mtp_checkpoint


async def serve(on_gpu: OnStandIns, drafter: Drafter | None, num_blocks: int) -> list[list[int]]:
    """The tokens of all requests, served at once with lookahead and few blocks."""
    report = on_gpu.report
    ledger = KVLedger(
        KVShape(
            num_blocks,
            report.block_size,
            report.tiers.num_host_blocks,
            saves_on_host=True,
            windows=report.windows,
            chunk=2 * 32,
            num_states=report.num_states,
            num_host_states=report.tiers.num_host_states,
        )
    )
    bounds = SchedulerSettings(max_model_len=100, max_batch_size=3, max_batch_tokens=32)
    scheduler = IterationScheduler(bounds, ledger, FirstComeFirstServed(), drafter=drafter)
    executor = LaunchingExecutor(on_gpu, 2, Random(1))
    engine = Engine(scheduler, executor, asyncio.get_running_loop().time, lookahead=1)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        outputs = await asyncio.gather(*(read(engine, spec) for spec in SPECS))
        await engine.drain(30)
        running.cancel()
    ledger.check()
    return outputs


async def read(engine: Engine, spec: RequestSpec) -> list[int]:
    tokens: list[int] = []
    with engine.stream(spec) as stream:
        while len(tokens) < spec.max_tokens:
            chunk = await stream.next()
            tokens += chunk.tokens
            if chunk.finish is not None:
                break
    return tokens


@pytest.mark.parametrize(
    ("make", "has_mtp", "drafts"),
    [
        (make_checkpoint, False, "scripted"),
        (lambda folder: make_checkpoint(folder, "qwen3_5"), False, "scripted"),
        (lambda folder: make_checkpoint(folder, "granite_hybrid_groups"), False, "scripted"),
        (make_mtp_checkpoint, True, "mtp"),
    ],
)
async def test_two_steps_in_flight_change_no_token(
    tmp_path: Path, make: Callable[[Path], Path], has_mtp: bool, drafts: str
) -> None:
    model = make(tmp_path)
    expected = await asyncio.to_thread(texts, load_worker(model))
    on_gpu = on_stand_ins(
        model,
        lookahead=1,
        has_mtp=has_mtp,
        host_kv_memory=1 << 18,
        max_batch_size=4,
        max_batch_tokens=64,
    )
    drafter = {"scripted": a_drafter(expected), "mtp": a_model_drafter()}.get(drafts)
    assert await serve(on_gpu, drafter, num_blocks=24) == expected
