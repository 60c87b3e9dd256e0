import pytest
import torch
from torch import Tensor

from engine.worker.cpu.native_formats import native_format
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import Weight, dequantize
from engine.worker.weights.formats import FORMATS


def quantized(name: str, weight: Tensor) -> tuple[Weight, Weight]:
    """By the kernels, and by torch."""
    native = native_format(NativeThreadPool(2), FORMATS[name])
    assert native is not None
    assert native is not FORMATS[name]
    return native.convert(weight), FORMATS[name].convert(weight)


def rows_of_all_sizes(outputs: int, inputs: int) -> Tensor:
    """Rows of noise from 1e-3 to 1e3, one of zeros."""
    noise = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs))
    weight = noise * torch.logspace(-3, 3, outputs)[:, None]
    weight[outputs // 2] = 0
    return weight


@pytest.mark.parametrize("shape", [(1, 32), (70, 96), (513, 896)])
def test_int8_weights_have_the_same_bits(shape: tuple[int, int]) -> None:
    native, plain = quantized("int8", rows_of_all_sizes(*shape))
    for name, tensor in plain.tensors.items():  # type: ignore[union-attr]
        assert torch.equal(native.tensors[name], tensor)  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [(1, 32), (70, 96), (513, 896)])
def test_int4_weights_differ_only_where_two_ranges_are_equally_good(shape: tuple[int, int]) -> None:
    weight = rows_of_all_sizes(*shape)
    native, plain = (dequantize(each) for each in quantized("int4", weight))
    groups = (native != plain).view(shape[0], -1, 32).any(dim=2)
    assert groups.float().mean() < 0.001
    errors = [(each - weight).square().sum(dim=1).sqrt() for each in (native, plain)]
    torch.testing.assert_close(*errors, rtol=1e-5, atol=0)


def test_weights_of_other_widths_and_formats_are_converted_by_the_format_itself() -> None:
    native, plain = quantized("int8", rows_of_all_sizes(7, 33))
    assert torch.equal(dequantize(native), dequantize(plain))
    again, _ = quantized("int8", native)  # type: ignore[arg-type]
    assert again is native
    assert native_format(NativeThreadPool(1), FORMATS["float32"]) is FORMATS["float32"]
