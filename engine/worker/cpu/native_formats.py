"""Formats of weights whose conversion from float32 runs on the thread pool.

Quantizing by torch took most of a first start. A weight that the kernels do not take is converted
by the format itself.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.kernels.dtypes import has_half
from engine.worker.cpu.kernels.quantize import QuantizeOperands, quantize_int4, quantize_int8
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import LinearFormat, Weight
from engine.worker.weights.formats.int4 import GROUP, INT4, int4_weight
from engine.worker.weights.formats.int8 import INT8, Int8Weight


def native_format(pool: NativeThreadPool, format: LinearFormat | None) -> LinearFormat | None:
    """The same format with a native conversion, if there is one."""
    if format is INT8:
        return NativeFormat(pool, format, _to_int8)
    if format is INT4 and has_half():
        return NativeFormat(pool, format, _to_int4)
    return format


def conversion_kernels(format: LinearFormat | None) -> tuple[Callable[..., None], ...]:
    """The kernels that convert weights to the format."""
    if format is INT8:
        return (quantize_int8,)
    return (quantize_int4,) if format is INT4 and has_half() else ()


class NativeFormat:
    """A `LinearFormat` that converts float32 weights by `convert`."""

    def __init__(
        self,
        pool: NativeThreadPool,
        format: LinearFormat,
        convert: Callable[[NativeThreadPool, Tensor], Weight],
    ) -> None:
        self._pool = pool
        self._format = format
        self._convert = convert

    @property
    def name(self) -> str:
        return self._format.name

    @property
    def bits(self) -> float:
        return self._format.bits

    def convert(self, weight: Weight) -> Weight:
        if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[1] % GROUP:
            return self._format.convert(weight)
        with self._pool.awake():
            return self._convert(self._pool, weight.to(torch.float32).contiguous())


def _to_int8(pool: NativeThreadPool, weight: Tensor) -> Int8Weight:
    found = Int8Weight(torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight)))
    _quantize(pool, quantize_int8, weight, found.values, found.scales)
    return found


def _to_int4(pool: NativeThreadPool, weight: Tensor) -> Weight:
    outputs, inputs = weight.shape
    nibbles = torch.empty((outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.empty((outputs, inputs // GROUP), dtype=torch.float16)
    _quantize(pool, quantize_int4, weight, nibbles, scales)
    return int4_weight(nibbles, scales, inputs)


def _quantize(
    pool: NativeThreadPool,
    kernel: Callable[..., None],
    weight: Tensor,
    values: Tensor,
    scales: Tensor,
) -> None:
    operands = QuantizeOperands(
        x=weight.data_ptr(),
        width=weight.shape[1],
        values=values.data_ptr(),
        scales=scales.data_ptr(),
    )
    KernelCall(pool, kernel, operands).over_rows(len(weight))
