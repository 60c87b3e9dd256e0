"""The machine's limits, on sizes that take no time: all are measured, and said as JSON."""

import json
from collections.abc import Iterator

import pytest
import torch

from engine.worker import roofline as limits


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(limits, "CPU_SQUARE", 64)
    monkeypatch.setattr(limits, "CPU_READ_BYTES", 1 << 20)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_best_of_all_ways_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["limits", "cpu", "1"])
    limits.main()
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"read", "float32", "int8"}
    assert all(rate > 0 for rate, _ in found.values())
    assert found["read"][1] in ("torch.mv", "torch.sum")
    assert found["float32"][1] == "torch.mm"


def test_eight_bits_are_tried_with_the_workers_own_linear_too() -> None:
    ways = limits._int8_products(64, 1)
    assert "Podway's linear" in ways
    results = [way() for way in ways.values()]
    assert all(isinstance(one, torch.Tensor) and one.shape == (64, 64) for one in results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_limits_for_its_formats() -> None:
    found = limits.on_gpu("cuda", 1)
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
    monkeypatch.setattr(limits, "_gpu_seconds", limits._cpu_seconds)
    monkeypatch.setattr(limits, "GPU_SQUARE", 32)
    assert set(limits._eight_bits_on_gpu(torch.device("cpu"))) == {"int8"}
    assert set(strides) == {(1, 32)}
