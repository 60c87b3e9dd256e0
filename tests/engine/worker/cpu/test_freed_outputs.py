import pytest
import torch

from engine.worker.cpu import freed_outputs
from engine.worker.cpu.freed_outputs import FreedOutputs
from engine.worker.cpu.kernels.vectors import LINE

ROWS, SHAPE = 300, (300, 1024)  # more than MIN_BYTES of float32


def test_memory_is_used_again_once_no_view_of_it_is_left() -> None:
    outputs = FreedOutputs()
    first = outputs.take(SHAPE, torch.float32)
    view, address = first[1:], first.data_ptr()
    del first
    second = outputs.take(SHAPE, torch.float32)
    assert second.data_ptr() != address
    del view
    third = outputs.take((ROWS, 2048), torch.bfloat16)
    assert third.data_ptr() == address
    for tensor in (second, third):
        assert tensor.data_ptr() % LINE == 0
        assert tensor.is_contiguous()
    second.fill_(1)
    third.fill_(2)
    assert second.sum() == ROWS * 1024
    assert (third.shape, third.dtype) == ((ROWS, 2048), torch.bfloat16)


def test_small_outputs_are_torchs_own() -> None:
    outputs = FreedOutputs()
    assert outputs.take((3, 5), torch.int32).shape == (3, 5)
    assert outputs._free == {}


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_outputs, "KEPT_BYTES", 5 << 20)
    outputs = FreedOutputs()
    several = [outputs.take(SHAPE, torch.float32) for _ in range(4)]  # of 2 MiB each
    assert outputs.kept == 0
    several.clear()
    assert outputs.kept == 4 << 20
    again = outputs.take(SHAPE, torch.float32)
    assert outputs.kept == 2 << 20
    del again
    assert outputs.kept == 4 << 20
