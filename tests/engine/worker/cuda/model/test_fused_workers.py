"""Whole workers with our interpreted kernels of norms, gates and products, in float16."""

from pathlib import Path

import pytest

from engine.worker.cuda.device import CudaDevice
from engine.worker.cuda.kernels import tiling
from engine.worker.cuda.kernels.library import TritonKernels
from engine.worker.process.worker import Worker
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.engine.worker.cuda.standing import StandingGpu, gpu_settings
from tests.engine.worker.process.driving import Driver, load_worker
from tests.models.checkpoints import make_checkpoint

# Norms of heads, of all heads together, times `1 + weight`, of latent vectors, of groups; experts
VARIANTS = ("qwen3", "olmo2", "gemma3", "deepseek_v3", "bamba", "qwen2_moe")


@pytest.mark.parametrize("variant", VARIANTS)
def test_families_have_the_logits_of_a_cpu(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tiling, "MIN_WIDE", 32
    )  # so that products and gates of small models are ours
    make_checkpoint(tmp_path, variant)
    settings = gpu_settings(tmp_path, dtype="float16")
    device = CudaDevice(settings, StandingGpu(total_bytes=1 << 31))
    # Reference attention would leave them out
    device._triton = TritonKernels(rows=interpreted("rows"), gemm=interpreted("gemm"))
    fused = Driver(Worker.load(settings, lambda *_: None, device), seed=1)
    on_cpu = Driver(load_worker(tmp_path), seed=1)
    for piece in [(0, range(1, 20)), (1, (5,)), (0, (7,))]:
        wanted, found = on_cpu.logits(piece), fused.logits(piece)
        assert float((found - wanted).abs().max()) < 0.03 * float(wanted.std())
