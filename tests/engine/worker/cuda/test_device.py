"""A GPU's worker whose tensors are on the CPU or on the meta device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters.attention import BACKENDS
from adapters.attention.reference import ReferenceAttention
from engine.errors import StartupError
from engine.step import RequestId, SampleSpec, Step, StepEntry, StepId
from engine.worker.cuda.device import CudaDevice, warm_up
from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.library import TritonKernels
from engine.worker.cuda.memory import GRAPHS_BYTES, measure
from engine.worker.cuda.model.linears import FloatLinear
from engine.worker.cuda.model.weight_staging import OnDevice, Staging
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.model.stage import Stage, put_each
from engine.worker.ports import AttentionSpec, ModelShape, RaggedLayout, Shard, TensorSlice
from engine.worker.process.model_build import weight_bytes
from engine.worker.process.worker import Worker
from engine.worker.sampling.sampler import Sampler
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker.weights.packed_cache import PackedCache
from engine.worker_settings import WorkerSettings
from tests.engine.worker.cuda.standin import StandInStreams
from tests.engine.worker.cuda.standing import StandingGpu, gpu_settings
from tests.engine.worker.process.driving import GREEDY, Driver, load_worker
from tests.models.checkpoints import make_checkpoint
from tests.worker_settings import worker_settings

MIB = 1 << 20
SHAPE = ModelShape(3, 4, 2, 8, 32, 48, 1, 97, 256)
FAMILIES = ("llama", "qwen3", "gpt2", "mistral_window")
VARIANTS = (
    *("llama", "mistral", "qwen2", "qwen3", "gpt2", "opt", "smollm3", "granite", "phi3"),
    *("stablelm", "olmo2", "olmo3", "gemma2", "gemma3", "gemma4", "mixtral", "qwen2_moe"),
    *("qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    *("glm", "glm4", "cohere", "cohere2", "exaone4_window", "ernie4_5", "hunyuan", "seed_oss"),
    *("starcoder2", "ernie4_5_moe", "hunyuan_moe", "nemotron", "arcee", "minicpm3", "minicpm"),
    *("deepseek_v2_groups", "deepseek_v3_groups", "granite_hybrid", "granite_hybrid_moe"),
    *("bamba", "falcon_h1", "nemotron_h"),
)
DTYPES = {"bfloat16": 0.15, "float16": 0.02}


def nothing(*_: object) -> None:
    """Ignores progress."""


def on_gpu(settings: WorkerSettings, gpu: StandingGpu) -> Worker:
    return Worker.load(settings, nothing, CudaDevice(settings, gpu))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_has_the_logits_of_a_cpu(tmp_path: Path, variant: str) -> None:
    make_checkpoint(tmp_path, variant)
    settings = gpu_settings(tmp_path, dtype="float32")
    on_cpu = Driver(load_worker(tmp_path), seed=1)
    stand_in = Driver(on_gpu(settings, StandingGpu(total_bytes=1 << 31)), seed=1)
    for piece in [(0, range(1, 20)), (1, (5,)), (0, (7,))]:
        torch.testing.assert_close(stand_in.logits(piece), on_cpu.logits(piece), rtol=0, atol=1e-3)


def test_latent_vectors_are_cached_on_a_gpu_by_plain_torch_too(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v2")
    settings = gpu_settings(tmp_path, dtype="float32")
    report = on_gpu(settings, StandingGpu(total_bytes=1 << 31)).report
    assert report.bytes_per_block == 3 * report.block_size * 4 * (24 + 8)


def test_keys_and_values_of_each_head_are_cached_where_flashinfer_does_not_take_latent_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(BACKENDS, "flashinfer", "tests.attention_backends:WorkerOnStandIn")
    make_checkpoint(tmp_path, "deepseek_v2")
    settings = gpu_settings(tmp_path, dtype="float32", attention="auto")
    report = on_gpu(settings, StandingGpu(total_bytes=1 << 31)).report
    assert report.attention == "flashinfer"
    assert report.bytes_per_block == 3 * report.block_size * 4 * 2 * 4 * (16 + 8)
    assert "flashinfer: latent vectors of 24 + 8 are not supported, only those of" in caplog.text


@pytest.mark.parametrize("variant", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_flashinfer_has_the_logits_of_a_cpu_over_latent_vectors(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In DeepSeek's sizes, with numbers of heads that do and do not divide FlashInfer's tile;
    prompts and decodes, eagerly and in graphs."""
    monkeypatch.setitem(BACKENDS, "flashinfer", "tests.attention_backends:WorkerOnStandIn")
    heads = 5 if variant == "glm4_moe_lite" else 4
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": 40}
    make_checkpoint(tmp_path, variant, **sizes, kv_lora_rank=512, qk_rope_head_dim=64)
    settings = gpu_settings(tmp_path, dtype="float32", attention="flashinfer")
    worker = on_gpu(settings, StandingGpu(total_bytes=1 << 31))
    report = worker.report
    assert (report.attention, report.graphs) == ("flashinfer", (64,))
    assert report.bytes_per_block == 3 * report.block_size * 4 * (512 + 64)
    on_cpu, stand_in = Driver(load_worker(tmp_path), seed=1), Driver(worker, seed=1)
    pieces: list[Any] = [[(0, range(1, 20)), (1, (5,))], [(1, (9,)), (0, range(30))]]
    for step in [*pieces, [(1, (5,)), (0, (7,))], [(2, range(90))], [(2, (3,))]]:
        found, expected = stand_in.logits(*step), on_cpu.logits(*step)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "variant", ["phi3", "gemma2", "gemma3", "gemma4", "gpt_oss", "deepseek_v2", "qwen3"]
)
def test_families_have_the_logits_of_a_cpu_by_flashinfer_too(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows, soft caps, sinks, shared KV, heads of several sizes and of none of a kernel's,
    eagerly and in graphs."""
    monkeypatch.setitem(BACKENDS, "flashinfer", "tests.attention_backends:WorkerOnStandIn")
    make_checkpoint(tmp_path, variant)
    settings = gpu_settings(tmp_path, dtype="float32", attention="flashinfer")
    worker = on_gpu(settings, StandingGpu(total_bytes=1 << 31))
    assert worker.report.attention == "flashinfer"
    assert worker.report.graphs == (64,)
    on_cpu, stand_in = Driver(load_worker(tmp_path), seed=1), Driver(worker, seed=1)
    for piece in [(0, range(1, 20)), (1, (5,)), (0, (7,))]:
        torch.testing.assert_close(stand_in.logits(piece), on_cpu.logits(piece), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_worker_computes_in_the_dtype_of_the_device(
    tmp_path: Path, family: str, dtype: str
) -> None:
    make_checkpoint(tmp_path, family)
    worker = on_gpu(gpu_settings(tmp_path, dtype=dtype), StandingGpu(total_bytes=1 << 31))
    report = worker.report
    assert (report.dtype, report.weights, report.attention) == (dtype, dtype, "reference")
    assert report.device == "cpu (Standing GPU)"
    pieces = [(0, range(1, 20)), (1, (5,)), (0, (7,))]
    exact, rounded = (Driver(each, seed=1) for each in (load_worker(tmp_path), worker))
    for piece in pieces:
        logits, found = exact.logits(piece), rounded.logits(piece)
        assert found.dtype is torch.float32
        allowed = DTYPES[dtype] * float(logits.std())
        torch.testing.assert_close(found, logits, rtol=0, atol=allowed)


def test_a_checkpoint_larger_than_the_gpu_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    progress: list[str] = []
    gpu = StandingGpu(total_bytes=100 * MIB, used=90 * MIB - 1000)
    settings = gpu_settings(tmp_path)
    with pytest.raises(StartupError) as failed:
        Worker.load(settings, lambda label, *_: progress.append(label), CudaDevice(settings, gpu))
    assert "on cpu (Standing GPU) 1000 bytes are left of --gpu-memory-utilization 0.9" in str(
        failed.value
    )
    assert "weights" not in progress


def test_kv_takes_what_the_utilization_leaves() -> None:
    gpu = StandingGpu(total_bytes=10_000 * MIB, used=3_000 * MIB)
    with_step = gpu.step(500 * MIB)

    def rehearse() -> None:
        with with_step:
            pass

    budget = measure(gpu, 0.9, 0.25, rehearse)
    assert budget.step == 500 * MIB
    assert budget.left == 5_500 * MIB - GRAPHS_BYTES - 125 * MIB, "a graph of a quarter of the step"


def test_a_model_that_leaves_no_room_for_kv_is_refused_with_the_numbers() -> None:
    gpu = StandingGpu(total_bytes=1_000 * MIB, used=850 * MIB)
    with pytest.raises(StartupError) as refused:
        measure(gpu, 0.9, 0.0, nothing)
    line = str(refused.value)
    for part in (
        "no memory is left for the KV cache on cpu (Standing GPU)",
        "0.9 of 1,000 MiB",
        "weights and context 850 MiB",
        "graphs 512 MiB",
        "--gpu-memory-utilization",
    ):
        assert part in line


def test_the_cache_has_a_block_more_than_it_says_and_the_host_is_pinned(tmp_path: Path) -> None:
    gpu = StandingGpu()
    device = CudaDevice(gpu_settings(tmp_path), gpu)
    cache = device.memory.kv(SHAPE, 5)
    assert (cache.num_blocks, cache.num_spare) == (5, 1)
    for tensor in (*cache.keys, *cache.values):
        assert (tensor.shape, tensor.dtype) == ((6, 4, 2, 8), torch.bfloat16)
        assert tensor[0].is_contiguous()
        assert tensor.stride(0) == 4 * 2 * 8 + 56, "a kernel reads 64 numbers of the last head"
    device.memory.mover(cache, SHAPE, 3)
    assert gpu.of_it.pinned_bytes == 3 * 2 * 3 * 4 * 2 * 8 * 2
    device.memory.mover(cache, SHAPE, 0)
    assert gpu.of_it.pinned_bytes == 3 * 2 * 3 * 4 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "int4"}, "dtype 'int4' is not supported on cuda; known: bfloat16, float16, "),
        ({"attention": "cpu"}, "attention 'cpu' does not run on cuda"),
        ({"weights": "int3"}, "weights 'int3' is not supported on cuda"),
        (
            {"activation_bits": "14"},
            "activation_bits '14' is not supported on cuda; known: auto, 8",
        ),
    ],
)
def test_settings_that_no_gpu_serves_are_refused(
    settings: dict[str, str], says: str, tmp_path: Path
) -> None:
    asked = gpu_settings(tmp_path, **settings)
    with pytest.raises(StartupError, match=says):
        CudaDevice(asked, StandingGpu())


@pytest.mark.parametrize(
    ("capability", "dtype", "says"),
    [
        ((8, 9), "bfloat16", "weights 'fp8' needs a GPU of compute capability 9.0 .Hopper. or "),
        ((9, 0), "float16", "weights 'fp8' needs --dtype bfloat16, not float16"),
    ],
)
def test_8_bit_floats_are_refused_where_no_tensor_core_multiplies_them(
    capability: tuple[int, int], dtype: str, says: str
) -> None:
    settings = worker_settings(model="", dtype=dtype, weights="fp8")
    with pytest.raises(StartupError, match=says):
        CudaDevice(settings, StandingGpu(capability=capability))


@pytest.mark.parametrize(("weights", "allowed"), [("int8", 0.1), ("fp8", 0.3)])
def test_the_whole_worker_computes_with_8_bit_weights(
    tmp_path: Path, weights: str, allowed: float
) -> None:
    make_checkpoint(tmp_path, "llama")
    settings = gpu_settings(tmp_path, weights=weights)
    worker = on_gpu(settings, StandingGpu(total_bytes=1 << 31))
    assert (worker.report.dtype, worker.report.weights) == ("bfloat16", weights)
    exact, rounded = (Driver(each, seed=1) for each in (load_worker(tmp_path), worker))
    piece = (0, range(1, 30))
    logits, found = exact.logits(piece), rounded.logits(piece)
    assert not torch.equal(logits, found)
    assert float((found - logits).norm() / logits.norm()) < allowed


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 5e-3), ("bfloat16", 0.1)])
def test_int4_weights_are_rounded_as_on_a_cpu(tmp_path: Path, dtype: str, allowed: float) -> None:
    """What is left is the rounding of activations: on the CPU to 14 bits."""
    make_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    halves = {name: each.bfloat16() for name, each in load_file(path).items()}
    save_file(halves, path, {"format": "pt"})
    worker = on_gpu(gpu_settings(tmp_path, weights="int4", dtype=dtype), StandingGpu())
    assert worker.report.weights == "int4"
    on_cpu = load_worker(tmp_path, weights="int4", activation_bits="14")
    piece = (0, range(1, 30))
    wanted, found = (Driver(each, seed=1).logits(piece) for each in (on_cpu, worker))
    assert float((found - wanted).norm() / wanted.norm()) < allowed


@pytest.mark.parametrize(("weights", "num_bytes"), [("int4", 500), ("int8", 1000), ("auto", 2000)])
def test_the_memory_that_weights_need_at_least(
    tmp_path: Path, weights: str, num_bytes: int
) -> None:
    checkpoint = Checkpoint.open(str(make_checkpoint(tmp_path)))
    device = CudaDevice(gpu_settings(tmp_path, weights=weights), StandingGpu())
    assert weight_bytes(checkpoint, device.formats, 1000) == num_bytes


def test_kernels_are_run_once_with_progress_and_why_they_cannot_be_compiled() -> None:
    heard: list[tuple[str, int, int]] = []
    ran: list[str] = []

    def fail() -> None:
        raise RuntimeError("ninja exited with 1\nand much more")

    warm_up(lambda: ran.append("step"), lambda *news: heard.append(news))
    assert (ran, heard) == (["step"], [("kernels", 0, 1), ("kernels", 1, 1)])
    with pytest.raises(StartupError) as refused:
        warm_up(fail, nothing)
    assert str(refused.value) == "kernels cannot be compiled or run: ninja exited with 1"


def test_a_step_that_does_not_fit_is_refused_with_what_to_lower(tmp_path: Path) -> None:
    def too_large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    device = CudaDevice(gpu_settings(tmp_path), StandingGpu())
    with pytest.raises(StartupError, match=r"the largest step does not fit on cpu .*--max-batch-"):
        device.kv_capacity(too_large)


def test_the_largest_step_is_rehearsed_with_all_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    run = Stage.read

    def watched(stage: Stage, layout: RaggedLayout, *more: Any) -> Tensor:
        seen.append((layout.num_tokens, len(layout.sampled_rows)))
        return run(stage, layout, *more)

    monkeypatch.setattr(Stage, "read", watched)
    make_checkpoint(tmp_path, "llama")
    settings = gpu_settings(tmp_path, max_batch_size=5, max_batch_tokens=60)
    on_gpu(settings, StandingGpu(total_bytes=1 << 31))
    assert seen[:2] == [(60, 5), (60, 5)]  # once to compile, once to measure; then the warm-up


def test_all_that_a_step_computes_with_lies_on_the_device(tmp_path: Path) -> None:
    """The meta device has no values: tensors of the CPU do not mix with it, and none is read."""
    make_checkpoint(tmp_path, "qwen3")
    nowhere = StandingGpu(place=torch.device("meta"))
    settings = gpu_settings(tmp_path)
    device = CudaDevice(settings, nowhere)
    checkpoint = Checkpoint.open(str(tmp_path))
    shape = checkpoint.family.shape
    weights = checkpoint.open_weights(device.formats.dtype, nothing)
    operators = device.operators()
    with device.source(weights, PackedCache(), 0) as source:
        model = checkpoint.family.build(source, Shard.whole(shape), operators)
    spec = AttentionSpec(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, 1.0, None, torch.bfloat16
    )
    attention = device.backend(ReferenceAttention, spec, device.memory.kv(shape, 8))
    entry = StepEntry(
        RequestId(0), 0, (1, 2, 3), np.arange(1, dtype="<i4").tobytes(), SampleSpec(GREEDY)
    )
    layout = build_layout(Step(StepId(0), (entry,)), LayoutLimits(97, 256, 8, 4))
    stage = Stage(model, attention, put_each(nowhere.put))
    with torch.inference_mode():
        logits = stage.logits(layout)
        assert logits is not None
        pending = Sampler(97, operators.sampling, nowhere.put).begin(
            logits, [SampleSpec(GREEDY)], [3]
        )
    assert pending.ids.device.type == "meta"


def test_weights_go_through_pinned_memory_piece_by_piece() -> None:
    streams = StandInStreams()  # which check that a buffer is written when its last copy has left
    staging = Staging(streams.device, streams, piece_bytes=64)
    assert streams.pinned_bytes == 128
    whole = torch.arange(100, dtype=torch.float32).view(20, 5)
    assert torch.equal(staging.copy_to_gpu(whole), whole)
    assert streams.num_host_waits == 7
    part = whole[:, 1:3]
    assert torch.equal(staging.copy_to_gpu(part), part)
    assert staging.copy_to_gpu(part).is_contiguous()
    halves = torch.arange(70).bfloat16()
    assert torch.equal(staging.copy_to_gpu(halves), halves)
    assert len(staging.copy_to_gpu(torch.empty(0))) == 0
    streams.synchronize()


def test_a_tied_head_is_the_embedding_that_is_there(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama_tied")
    checkpoint = Checkpoint.open(str(tmp_path))
    source = OnDevice(
        checkpoint.open_weights(torch.bfloat16, nothing), torch.device("cpu"), StandInStreams()
    )
    name, shape = "model.embed_tokens.weight", checkpoint.family.shape
    sizes = (shape.vocab_size, shape.hidden_size)
    part = TensorSlice(name, sizes, rows=range(shape.vocab_size))
    embedding = source.tensor(part)
    head = source.weight(part)
    assert head is embedding


def test_batch_invariant_mode_needs_the_kernel_for_products() -> None:
    settings = worker_settings("m", batch_invariant=True, attention="reference")
    with pytest.raises(StartupError, match="--batch-invariant needs --attention flashinfer"):
        CudaDevice(settings, StandingGpu())


@pytest.mark.parametrize(
    ("capability", "is_invariant", "is_ours"),
    [((9, 0), False, True), ((8, 9), False, False), ((12, 0), False, False), ((8, 0), True, True)],
)
def test_products_are_ours_on_gpus_that_take_their_tilings_and_in_batch_invariant_mode(
    capability: tuple[int, int], is_invariant: bool, is_ours: bool
) -> None:
    settings = worker_settings("m", batch_invariant=is_invariant, device="cuda", dtype="bfloat16")
    triton = TritonKernels(gemm=reference)
    device = CudaDevice(settings, StandingGpu(capability=capability), None, triton)
    linear = device.operators().linear([torch.ones(8, 8, dtype=torch.bfloat16)], None)
    assert isinstance(linear, FloatLinear)
    assert (linear.fast.gemm is reference) == is_ours
