# mypy: disable-error-code="no-untyped-call"
import json

import pytest
import torch

from engine.worker import roofline as limits
from engine.worker.cpu import limits as cpu_limits
from engine.worker.cpu.kernels.limits import ReadOperands, make_read_kernel
from engine.worker.cpu.thread_pool import NativeThreadPool


def test_all_limits_of_a_cpu_are_measured_and_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_limits, "CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr(cpu_limits, "READ_BYTES", 4 << 20)
    monkeypatch.setattr(cpu_limits, "WINDOW_BYTES", 1 << 20)
    monkeypatch.setattr(cpu_limits, "PEAK_ITERATIONS", 100)
    monkeypatch.setattr("sys.argv", ["limits", "cpu", "1"])
    monkeypatch.setattr("sys.stdin", ["3000000\n", "5000000\n"])
    limits.main()
    found, *reads = map(json.loads, capsys.readouterr().out.splitlines())
    assert len(reads) == 2
    assert min(reads) > 0
    assert found.keys() == {"read", "float32", "float16", "bfloat16", "int8", "int4"}
    assert found["int8"] == found["int4"]
    assert all(rate > 0 for rate, _ in found.values())
    assert found["read"][1].endswith("1 threads")


@pytest.mark.parametrize("streams_and_prefetch", cpu_limits.STREAMS_AND_PREFETCH)
def test_a_read_kernel_loads_every_byte(streams_and_prefetch: tuple[int, int]) -> None:
    memory = torch.zeros(4 << 10, dtype=torch.int32)
    kernel = cpu_limits._compile(make_read_kernel(*streams_and_prefetch))
    for place in (0, 1023, 4095):
        memory.zero_()
        memory[place] = 5
        total = torch.zeros(1, dtype=torch.int64)
        operands = ReadOperands(
            address=memory.data_ptr(), chunk_bytes=memory.nbytes, total=total.data_ptr()
        )
        cpu_limits.seconds_of(NativeThreadPool(1), kernel.address, operands, 1)
        assert total.item() == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_limits_for_its_formats() -> None:
    found = limits.on_gpu("cuda")
    assert {"read", "bfloat16", "float16", "float32", "int8"} <= found.keys()
    assert found["read"].rate > 1e11
    assert found["bfloat16"].rate > found["float32"].rate


def test_the_int8_limit_of_a_gpu_multiplies_in_the_layout_of_linears(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linears pass `weight.t()`, which is column-major; the row-major product is slower."""
    strides: list[tuple[int, ...]] = []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        strides.append(b.stride())
        return a

    monkeypatch.setattr(torch, "_int_mm", product)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (8, 0))
    monkeypatch.setattr(limits, "_gpu_seconds", lambda way: float(way() is not None))
    monkeypatch.setattr(limits, "GPU_SQUARE", 32)
    assert set(limits._eight_bits_on_gpu(torch.device("cpu"))) == {"int8"}
    assert set(strides) == {(1, 32)}
