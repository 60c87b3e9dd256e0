import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from engine.errors import StartupError
from engine.worker.cpu import device as cpu
from engine.worker.cpu import native_formats
from engine.worker.cpu.attention.paged_kernels import merge_partials
from engine.worker.cpu.kernels import delta_rule, experts
from engine.worker.cpu.kernels.quantize import quantize_int8
from engine.worker.cpu.kernels.sampling import sample
from engine.worker.cuda import requirements as lacking
from engine.worker.cuda.device import gpu_index
from engine.worker.device import open_device
from engine.worker.ports import PreferredFormat
from engine.worker.weights.packed_cache import PackedCache
from engine.worker_settings import Placement, WorkerSettings
from tests.worker_settings import changed

SETTINGS = WorkerSettings(model="")


def no_driver() -> bool:
    return False


def a_driver() -> bool:
    return True


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torch has CUDA and sees a GPU; FlashInfer and nvcc are there."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(lacking, "_has_driver", a_driver)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(lacking, "nvcc", lambda: "/usr/local/cuda/bin/nvcc")
    return monkeypatch


def refusal(settings: WorkerSettings) -> str:
    with pytest.raises(StartupError) as refused:
        open_device(settings)
    line = str(refused.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_without_a_gpu_the_cpu_is_used(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    opened = open_device(changed(SETTINGS, device=device, threads=1))
    assert (opened.name, opened.formats.dtype) == ("cpu", torch.float32)


def test_only_kernels_of_a_dense_model_are_compiled_first_and_those_of_attention_beside_the_packing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[set[Callable[..., None]]] = []
    is_packed = threading.Event()

    def compile_all(functions: Sequence[Callable[..., None]], progress: object = None) -> None:
        if merge_partials in functions:
            assert is_packed.wait(10)
        if sample not in functions:  # which is compiled at some time after those of attention
            compiled.append(set(functions))

    requested: list[Callable[..., None]] = []
    monkeypatch.setattr(cpu, "compile_all", compile_all)
    monkeypatch.setattr(cpu, "request", requested.extend)
    device = cpu.CpuDevice(changed(SETTINGS, threads=1, weights="int8"))
    device.prepare(lambda what, done, total: None)
    with device.source(cast(Any, None), PackedCache(), 0):
        (first,) = compiled
    assert requested.index(sample) == 1, "the two kernels that take longest are begun first"
    assert first < set(requested)
    assert quantize_int8 in first
    assert first.isdisjoint({*delta_rule.KERNELS, *experts.KERNELS})
    is_packed.set()
    found = device.backend(lambda *_: cast(Any, len(compiled)), cast(Any, None), cast(Any, None))
    assert cast(Any, found) == 2


def test_a_dtype_that_the_cpu_does_not_support_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = changed(SETTINGS, device="cpu", threads=1)
    known = "known: float32, float16, bfloat16, int8"
    assert refusal(changed(asked, kv_cache_dtype="fp8")) == (
        f"--kv-cache-dtype 'fp8' is not supported on cpu; {known}"
    )
    monkeypatch.setattr(native_formats, "has_half", lambda: False)
    assert refusal(changed(asked, kv_cache_dtype="float16")) == (
        "--kv-cache-dtype 'float16' needs a CPU with F16C"
    )
    assert refusal(changed(asked, dtype="float16")) == "--dtype 'float16' needs a CPU with F16C"
    assert open_device(changed(asked, kv_cache_dtype="int8")).formats.kv_dtype is torch.int8


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_kv_on_a_cpu_has_16_bits_by_default(dtype: str, attention: str) -> None:
    if dtype.endswith("float16") and attention == "reference":
        pytest.skip("the reference computes in float32 only")
    settings = changed(SETTINGS, device="cpu", threads=1, dtype=dtype, attention=attention)
    in_pairs = dtype == "bfloat16" and native_formats.MULTIPLIES_BFLOAT16
    expected = torch.bfloat16 if in_pairs else torch.float16
    assert open_device(settings).formats.kv_dtype is expected
    assert (
        open_device(changed(settings, kv_cache_dtype="float32")).formats.kv_dtype is torch.float32
    )


def test_an_encoder_computes_with_keys_and_values_in_float32_by_default() -> None:
    settings = changed(SETTINGS, device="cpu", threads=1)
    encoder = PreferredFormat(keeps_kv=False)
    assert open_device(settings, encoder).formats.kv_dtype is torch.float32
    assert (
        open_device(changed(settings, kv_cache_dtype="int8"), encoder).formats.kv_dtype
        is torch.int8
    )


def test_kv_is_in_float32_by_default_on_a_cpu_that_does_not_convert_float16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_formats, "has_half", lambda: False)
    device = open_device(changed(SETTINGS, device="cpu", threads=1))
    assert device.formats.kv_dtype is torch.float32


@pytest.mark.parametrize("device", ["cuda:x", "tpu", "cpu:1", "auto:0", "cuda:-1"])
def test_an_unknown_device_is_rejected(device: str) -> None:
    says = f"--device {device!r} is not supported; known: auto, cpu, cuda, cuda:N"
    assert refusal(changed(SETTINGS, device=device)) == says


def test_what_is_missing_for_a_gpu_is_named(with_gpu: pytest.MonkeyPatch) -> None:
    asked = changed(SETTINGS, device="cuda")
    with_gpu.setattr(lacking, "nvcc", lambda: None)
    with_gpu.setattr(lacking, "has_cached_kernels", lambda: False)
    assert "there is no nvcc in" in refusal(asked)
    with_gpu.setattr("importlib.util.find_spec", lambda name: None)
    assert "flashinfer is not installed (pip install 'podway[cuda]')" in refusal(asked)
    with_gpu.setattr("torch.cuda.device_count", lambda: 0)
    with_gpu.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "there is a driver, but no GPU (CUDA_VISIBLE_DEVICES='7')" in refusal(asked)
    with_gpu.setattr(lacking, "_has_driver", no_driver)
    assert "there is no NVIDIA driver: libcuda.so.1" in refusal(asked)
    with_gpu.setattr("torch.version.cuda", None)
    line = refusal(asked)
    assert line.startswith("--device 'cuda' cannot be used: torch ")
    assert "is built without CUDA" in line


def test_plain_torch_on_a_gpu_needs_no_flashinfer(with_gpu: pytest.MonkeyPatch) -> None:
    with_gpu.setattr("importlib.util.find_spec", lambda name: None)
    assert lacking.missing(wants_kernels=False) == ""
    assert "flashinfer" in lacking.missing(wants_kernels=True)


def test_kernels_that_were_compiled_before_need_no_nvcc(
    with_gpu: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("kernels")
    with_gpu.setattr(lacking, "nvcc", lambda: None)
    with_gpu.setenv("FLASHINFER_WORKSPACE_BASE", str(base))
    with_gpu.setattr("importlib.util.find_spec", lambda name: Spec)
    assert "no nvcc" in lacking.missing(wants_kernels=True)
    compiled = base / ".cache/flashinfer/0.7.2/90a/cached_ops/page/page.so"
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert lacking.missing(wants_kernels=True) == ""


class Spec:
    """A package that is nowhere on disk."""

    submodule_search_locations: tuple[str, ...] = ()


def test_auto_falls_back_to_the_cpu_and_logs_why(
    with_gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_gpu.setattr("importlib.util.find_spec", lambda name: None)
    assert open_device(changed(SETTINGS, threads=1)).name == "cpu"
    assert caplog.messages == [
        "there is a GPU, but the CPU is used: flashinfer is not installed "
        "(pip install 'podway[cuda]')"
    ]


def test_each_worker_of_a_machine_takes_a_gpu_of_its_own() -> None:
    places = [
        Placement(rank=n, num_ranks=4, num_local_workers=2, local_index=n % 2) for n in range(4)
    ]
    assert [gpu_index("auto", place, 2) for place in places] == [0, 1, 0, 1]
    assert [gpu_index("cuda:1", place, 3) for place in places] == [1, 2, 1, 2]
    with pytest.raises(StartupError, match="2 workers need one GPU each, but only 1 "):
        gpu_index("cuda", places[0], 1)
    with pytest.raises(StartupError, match=r"need one GPU each.* but only 2 "):
        gpu_index("cuda:1", places[0], 2)
    with pytest.raises(StartupError, match=r"1 workers .* starting at cuda:1, .* --replicas"):
        gpu_index("cuda:1", Placement(), 1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"dtype": "float64"},
            "--dtype 'float64' is not supported on cpu; known: float32, float16, bfloat16",
        ),
        (
            {"weights": "fp8"},
            "--weights 'fp8' is not supported on cpu; known: auto, float32, float16, bfloat16, "
            "int8, int4",
        ),
        ({"attention": "flashinfer"}, "--attention 'flashinfer' does not run on cpu"),
        (
            {"activation_bits": "16"},
            "activation_bits '16' is not supported on cpu; known: auto, 8, 14",
        ),
        ({"batch_invariant": True}, "--batch-invariant is not supported on cpu, only on cuda"),
        ({"attention": "reference", "weights": "int8"}, "weights in int8 need another attention"),
    ],
)
def test_what_the_cpu_does_not_support_is_rejected(settings: dict[str, Any], says: str) -> None:
    assert refusal(changed(SETTINGS, device="cpu", **settings)).startswith(says)


@pytest.mark.parametrize(
    ("available", "neighbours", "usual"),
    [(100 << 30, 1, 4 << 30), (4 << 30, 1, 1 << 30), (100 << 30, 4, 1 << 30)],
)
def test_on_the_cpu_kv_takes_4_gib_or_a_quarter_of_the_memory(
    available: int, neighbours: int, usual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "available_bytes", lambda: available)
    placement = Placement(num_local_workers=neighbours)
    device = open_device(changed(SETTINGS, device="cpu", threads=1, placement=placement))
    room = device.kv_capacity(lambda: pytest.fail("the CPU does not rehearse"))
    assert (room.most, room.usual) == (available, usual)
    assert room.left_on_host(usual) == available - usual
