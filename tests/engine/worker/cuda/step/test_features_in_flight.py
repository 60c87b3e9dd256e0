"""Features of a GPU's worker with two steps in flight: each step is launched before the last one is
collected, and the tokens are those of the CPU's worker."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.contracts.test_features import SPECS, texts
from tests.engine.worker.cuda.launching import LaunchingExecutor, on_stand_ins
from tests.engine.worker.process.driving import load_worker
from tests.inline import engine_over, read_all, serve
from tests.models.checkpoints import make_checkpoint
from tests.models.drafts import a_drafter, a_model_drafter
from tests.models.mtp import make_mtp_checkpoint


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
    engine = engine_over(
        on_gpu.report,
        LaunchingExecutor(on_gpu, 2, Random(1)),
        num_blocks=24,
        lookahead=1,
        drafter=drafter,
        saves_on_host=True,
        max_batch_size=3,
        max_batch_tokens=32,
    )
    assert [outcome.tokens for outcome in await serve(engine, SPECS, read_all)] == expected
