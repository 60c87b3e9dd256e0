"""A worker as it stands on a GPU, with tensors on the CPU, or nowhere, in place of the GPU's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.errors import RefusedToStart
from engine.step import WorkerSettings
from engine.worker.cuda.device import CudaDevice
from engine.worker.cuda.memory import GRAPHS_BYTES, measure
from engine.worker.ports import ModelShape
from engine.worker.worker import Worker
from tests.checkpoints import make_checkpoint
from tests.worker.cuda.standing import StandingGpu
from tests.worker.driving import Driver, load_worker, settings_for

MIB = 1 << 20
SHAPE = ModelShape(3, 4, 2, 8, 32, 48, 1, 97, 256)
FAMILIES = ("llama", "qwen3", "gpt2", "mistral_window")
DTYPES = {"bfloat16": 0.15, "float16": 0.02, "float32": 1e-4}


def nothing(*_: object) -> None:
    """Hears progress."""


def on_gpu(settings: WorkerSettings, gpu: StandingGpu) -> Worker:
    return Worker.load(settings, nothing, CudaDevice(settings, gpu))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_worker_computes_in_the_dtype_of_the_device(
    tmp_path: Path, family: str, dtype: str
) -> None:
    make_checkpoint(tmp_path, family)
    worker = on_gpu(replace(settings_for(tmp_path), dtype=dtype), StandingGpu(total_bytes=1 << 31))
    report = worker.report
    assert (report.dtype, report.weights, report.attention) == (dtype, dtype, "reference")
    pieces = [(0, range(1, 20)), (1, (5,)), (0, (7,))]
    exact, rounded = (Driver(each, seed=1) for each in (load_worker(tmp_path), worker))
    for piece in pieces:
        logits, found = exact.logits(piece), rounded.logits(piece)
        assert found.dtype is torch.float32
        allowed = DTYPES[dtype] * float(logits.std())
        torch.testing.assert_close(found, logits, rtol=0, atol=allowed)


def test_kv_takes_what_the_utilization_leaves() -> None:
    gpu = StandingGpu(total_bytes=10_000 * MIB, used=3_000 * MIB)
    with_step = gpu.step(500 * MIB)

    def rehearse() -> None:
        with with_step:
            pass

    budget = measure(gpu, 0.9, rehearse)
    assert budget.step == 500 * MIB
    assert budget.left == 5_500 * MIB - GRAPHS_BYTES


def test_a_model_that_leaves_no_room_for_kv_is_refused_with_the_numbers() -> None:
    gpu = StandingGpu(total_bytes=1_000 * MIB, used=850 * MIB)
    with pytest.raises(RefusedToStart) as refused:
        measure(gpu, 0.9, nothing)
    line = str(refused.value)
    for part in (
        "no memory is left for KV on cpu (Standing GPU)",
        "0.9 of 1,000 MiB",
        "weights and context 850 MiB",
        "graphs 512 MiB",
        "--gpu-memory-utilization",
    ):
        assert part in line


def test_the_cache_has_a_block_more_than_it_says_and_the_host_is_pinned(tmp_path: Path) -> None:
    gpu = StandingGpu()
    device = CudaDevice(settings_for(tmp_path), gpu)
    cache = device.allocate(SHAPE, 5)
    assert (cache.num_blocks, cache.num_spare) == (5, 1)
    for tensor in (*cache.keys, *cache.values):
        assert (tensor.shape, tensor.dtype) == ((6, 4, 2, 8), torch.bfloat16)
        assert tensor.is_contiguous()
    host = device.allocate_host(SHAPE, 3)
    assert (host.num_blocks, host.num_spare) == (3, 0)
    assert gpu.pinned_bytes == 3 * device.block_bytes(SHAPE) == 3 * 2 * 3 * 4 * 2 * 8 * 2
    assert device.allocate_host(SHAPE, 0).num_blocks == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "int4"}, "dtype 'int4' is not supported on cuda; known: bfloat16, float16, "),
        ({"dtype": "float32", "attention": "auto"}, "dtype 'float32' needs --attention reference"),
        ({"attention": "cpu"}, "attention 'cpu' does not run on cuda"),
        ({"weights": "int4"}, "weights 'int4' is not supported on cuda"),
    ],
)
def test_what_a_gpu_does_not_do_is_refused(
    settings: dict[str, str], says: str, tmp_path: Path
) -> None:
    asked = replace(settings_for(tmp_path), **settings)  # type: ignore[arg-type]
    with pytest.raises(RefusedToStart, match=says):
        CudaDevice(asked, StandingGpu())
