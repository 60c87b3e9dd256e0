"""Steps launched ahead on a real GPU give the results of single steps: streams, events, moves.

In float32 with plain attention, where batch mates do not change the likeliest token of these small
models; graphs need FlashInfer, and are held to transformers by `test_whole_worker`.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.step import Step
from engine.worker.launched import StepInFlight
from engine.worker.process.worker import Worker
from tests.engine.worker.cuda.step.test_generations import outcomes_of, setbacks
from tests.engine.worker.process.driving import settings_for
from tests.models.checkpoints import make_checkpoint
from tests.worker_settings import changed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@dataclass(frozen=True)
class OnGpu:
    """A worker on a real GPU."""

    worker: Worker

    def launch(self, step: Step) -> StepInFlight:
        return self.worker.launch(step)


@pytest.mark.parametrize("host_kv_bytes", [0, 1 << 16])
async def test_lookahead_leaving_and_preemption_change_no_text(
    tmp_path: Path, host_kv_bytes: int
) -> None:
    settings = changed(
        settings_for(make_checkpoint(tmp_path), "reference"),
        device="cuda",
        dtype="float32",
        host_kv_memory=host_kv_bytes,
        lookahead=1,
        max_batch_size=6,
        max_batch_tokens=13,
    )
    on_gpu = OnGpu(Worker.load(settings, lambda *_: None))
    calm = await outcomes_of(on_gpu, 0, 128, seed=1)
    pressed = await outcomes_of(on_gpu, 1, 20, seed=2)
    assert [type(said.error) for said in pressed] == [type(said.error) for said in calm]
    for number, (one, whole) in enumerate(zip(pressed, calm, strict=True)):
        shorter = min(len(one.tokens), len(whole.tokens))
        assert one.tokens[:shorter] == whole.tokens[:shorter]
        assert len(one.tokens) == len(whole.tokens) or number % 4 == 3
    assert setbacks(pressed, "num_swaps" if host_kv_bytes else "num_preemptions")
