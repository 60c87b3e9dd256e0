"""A linear of each head over packed weights, all heads in one call of a kernel."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.worker.cpu.build import kernel
from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.kernels import heads as kernels
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.experts import SCRATCH_BYTES
from engine.worker.cpu.kernels.linears.linear import LinearOperands
from engine.worker.cpu.linears.packed import (
    CpuLinears,
    InputFormat,
    PackedWeights,
    address_of,
    columns_of_chunks,
    operands_of,
)
from engine.worker.cpu.linears.packed_store import PackedStore
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import LinearWeight, ThreadPool


class HeadInputs:
    """Converts the inputs of all heads to the format that their linears read."""

    def __init__(self, pool: ThreadPool, inputs: InputFormat, padded: int, heads: int) -> None:
        self._pool, self._inputs, self._heads = pool, inputs, heads
        self._items = padded // inputs.group * inputs.group_items
        self.row_bytes = self._items * inputs.dtype.itemsize
        self._scratch = torch.empty(pool.threads * SCRATCH_BYTES, dtype=torch.uint8)
        operands = kernels.HeadInputOperands(
            padded=padded,
            group=inputs.group,
            middle=inputs.middle,
            kernel=kernel(inputs.convert).address,
            scratch=self._scratch.data_ptr(),
        )
        self._call = KernelCall(pool, kernels.head_inputs, operands, fit=self._fit)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The inputs `[heads, rows, items]`, and their scales `[heads, rows]`."""
        rows, heads, operands = len(x), self._heads, self._call.operands
        y = self._pool.empty("head inputs", (heads, rows, self._items), self._inputs.dtype)
        is_scaled = self._inputs.is_quantized
        scale = self._pool.empty("head scales", (heads, rows)) if is_scaled else None
        operands.x, operands.x_stride, operands.x_head = _places(x)
        operands.width = x.shape[2]
        operands.y, operands.scale = y.data_ptr(), address_of(scale)
        self._call.over_rows(rows)
        return y, scale

    def _fit(self, operands: kernels.HeadInputOperands, rows: int) -> int:
        operands.rows, operands.y_head = rows, rows * self.row_bytes
        operands.scale_head = rows * BYTES if self._inputs.is_quantized else 0
        return self._heads


class NativeHeadLinear:
    """`HeadLinear` in float32, over packed weights of one format."""

    def __init__(
        self, pool: ThreadPool, linears: CpuLinears, weights: Sequence[PackedWeights]
    ) -> None:
        first, self._heads = weights[0], len(weights)
        self._outputs = first.outputs
        self._zeros = torch.zeros(first.outputs)
        self._weights = tuple(weights)  # kernels keep addresses only
        self._inputs = (
            None
            if linears.inputs is None
            else HeadInputs(pool, linears.inputs, first.inputs, self._heads)
        )
        self._table = (LinearOperands * self._heads)(
            *(operands_of(each, self._zeros, pool.threads) for each in weights)
        )
        self._scratch = torch.empty(pool.threads * SCRATCH_BYTES, dtype=torch.uint8)
        self._columns = columns_of_chunks(first.outputs * self._heads, pool.threads)
        operands = kernels.HeadLinearOperands(
            kernel=kernel(linears.kernel).address,
            table=ctypes.addressof(self._table),
            scratch=self._scratch.data_ptr(),
        )
        self._call = KernelCall(pool, kernels.head_linear, operands, fit=self._fit)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        call, converted = self._call.operands, None
        if self._inputs is None:
            call.x, stride, call.x_head = _places(x)
            call.x_stride = stride * BYTES
        else:
            converted = values, scale = self._inputs(x)
            call.x, call.x_stride = values.data_ptr(), self._inputs.row_bytes
            call.x_scale = address_of(scale)
        call.y, call.y_stride, call.y_head = _places(y)
        self._call.over_rows(len(x))
        del converted  # not before the kernel has read it

    def _fit(self, operands: kernels.HeadLinearOperands, rows: int) -> int:
        operands.rows, operands.columns = rows, self._columns(rows)
        operands.column_chunks = -(-self._outputs // operands.columns)
        if self._inputs is not None:
            operands.x_head = rows * self._inputs.row_bytes
            operands.scale_head = rows * BYTES if operands.x_scale else 0
        return operands.column_chunks * self._heads


class NativeHeads:
    """`HeadOperators` over native kernels."""

    def __init__(self, pool: NativeThreadPool, store: PackedStore) -> None:
        self._pool, self._store = pool, store
        self._copy = KernelCall(pool, kernels.copy_heads, kernels.CopyHeadsOperands())

    def linear(self, weights: Sequence[LinearWeight]) -> NativeHeadLinear:
        packed = [self._store.packed(self._pool, [weight]) for weight in weights]
        linears = packed[0][0][0]
        assert all(each is linears for ((each, _),) in packed), "heads have the same formats"
        return NativeHeadLinear(self._pool, linears, [one for ((_, one),) in packed])

    def empty(self, kind: str, like: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return self._pool.empty(kind, sizes)

    def copy(self, x: Tensor, y: Tensor, pairs: int) -> None:
        operands = self._copy.operands
        operands.x, operands.x_stride, operands.x_head = _places(x)
        operands.y, operands.y_stride, operands.y_head = _places(y)
        operands.heads, operands.dim, operands.pairs = x.shape[1], x.shape[2], pairs
        self._copy.over_rows(len(x))


def _places(heads: Tensor) -> tuple[int, int, int]:
    """The address of rows of heads, floats between rows, bytes between heads."""
    return heads.data_ptr(), heads.stride(0), heads.stride(1) * BYTES
