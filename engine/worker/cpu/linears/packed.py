"""The linear layer of the CPU: packed weights of any format, and inputs converted to match."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.kernels.linears.linear import ROWS_AT_ONCE, InputOperands, LinearOperands
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.cpu.kernels.linears.tile_formats import HAS_AMX
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import ThreadPool, Weight

COLUMNS_FOR_FEW_ROWS = 128  # a chunk's columns at most: weights are read once
COLUMNS_FOR_MANY_ROWS = 96  # a piece of them stays in cache
# Every chunk reads all inputs, and those of a prompt do not stay in the L2 cache. On an Intel Xeon
# with 2 MiB of it 512 rows of int8 and bfloat16 took 0.87 to 1.02 times as long as with 96 columns.
COLUMNS_FOR_PROMPTS = 256 if HAS_AMX else COLUMNS_FOR_MANY_ROWS
PROMPT_ROWS = 4 * ROWS_AT_ONCE
CHUNK_COLUMNS = 2  # in whose time a chunk begins


class CpuLinears(Protocol):
    """How the CPU computes with one format of weights."""

    @property
    def description(self) -> str:
        """The format as reports show it: "int8 (14-bit activations)"."""

    @property
    def kernels(self) -> tuple[Callable[..., None], ...]:
        """The kernels that its linears run."""

    @property
    def packing_kernels(self) -> tuple[Callable[..., None], ...]:
        """The kernels that pack its weights."""

    @property
    def kernel(self) -> Callable[..., None]:
        """The kernel of the linear itself, with `LinearOperands`."""

    @property
    def inputs(self) -> "InputFormat | None":
        """The format of its inputs, None for float32."""

    def pack(
        self, weights: Sequence[Weight], pages: WeightPages, pool: NativeThreadPool
    ) -> "PackedWeights":
        """Convert weights `[out, in]` to the format, stack them along out, and pack them."""


@dataclass(frozen=True, slots=True)
class InputFormat:
    """The format of a linear's inputs if it is not float32."""

    dtype: torch.dtype
    convert: Callable[..., None]  # a kernel of `InputOperands`
    is_quantized: bool = True  # with a scale per row
    group: int = 1  # inputs that are converted together
    group_items: int = 1  # items of `dtype` that a group becomes
    middle: int = 0  # what the sum of each group is multiplied by, as in `InputOperands`


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Packed weights with what their kernel needs beside them; None where it needs nothing."""

    packed: Tensor
    outputs: int
    inputs: int  # padded
    scale: Tensor | None = None
    offset: Tensor | None = None


def columns_of_chunks(outputs: int, threads: int) -> Callable[[int], int]:
    """How many columns a chunk has for so many rows, in whole panels.

    At most as many as suit the cache, and few enough for every thread to have several chunks.
    Fewer, if with these the thread with the most chunks has fewer columns.
    """

    def at_most(most: int, chunks: int) -> int:
        largest = max(WIDTH, min(most, outputs // chunks // WIDTH * WIDTH))
        return min(
            range(largest, 0, -WIDTH),
            key=lambda columns: -(-outputs // (columns * threads)) * (columns + CHUNK_COLUMNS),
        )

    for_few = at_most(COLUMNS_FOR_FEW_ROWS, 6 * threads)
    for_many = at_most(COLUMNS_FOR_MANY_ROWS, 4 * threads)
    for_prompts = at_most(COLUMNS_FOR_PROMPTS, 2 * threads if HAS_AMX else 4 * threads)

    def columns(rows: int) -> int:
        if rows <= ROWS_AT_ONCE:
            return for_few
        return for_many if rows < PROMPT_ROWS else for_prompts

    return columns


def address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def operands_of(weights: PackedWeights, bias: Tensor, threads: int) -> LinearOperands:
    """The operands of a linear that calls do not change. They are addresses only."""
    return LinearOperands(
        weight=weights.packed.data_ptr(),
        weight_scale=address_of(weights.scale),
        offset=address_of(weights.offset),
        bias=bias.data_ptr(),
        inputs=weights.inputs,
        outputs=weights.outputs,
        threads=threads,
    )


class PackedLinear:
    """`[rows, in] -> [rows, out]` in float32, over packed weights."""

    def __init__(
        self,
        pool: ThreadPool,
        linears: CpuLinears,
        weights: PackedWeights,
        bias: Tensor | None,
    ) -> None:
        """The bias has one float32 for each output; None stands for zeros."""
        self._pool = pool
        self._weights = weights  # kernels keep addresses only
        self._bias = torch.zeros(weights.outputs) if bias is None else bias
        self._inputs = inputs = linears.inputs
        self._convert = (
            None
            if inputs is None
            else KernelCall(
                pool, inputs.convert, InputOperands(group=inputs.group, middle=inputs.middle)
            )
        )
        operands = operands_of(weights, self._bias, pool.threads)
        self._linear = KernelCall(pool, linears.kernel, operands, weights.packed, self._fit)
        self._columns = columns_of_chunks(weights.outputs, pool.threads)

    @property
    def outputs(self) -> int:
        return self._weights.outputs

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        y = self._pool.empty("linear", (len(x), self.outputs)) if add_to is None else add_to
        self.write(x, y, adds=add_to is not None)
        return y

    def write(self, x: Tensor, y: Tensor, *, adds: bool) -> None:
        """Write the result to y, or add it to y; y may be some columns of a wider tensor."""
        call = self._linear.operands
        converted: list[Tensor] = []
        if self._inputs is None or self._convert is None:
            call.x, call.x_stride = x.data_ptr(), x.stride(0) * x.itemsize
        else:
            converted = self._convert_inputs(x, self._inputs, self._convert)
        call.y, call.y_stride, call.adds = y.data_ptr(), y.stride(0), adds
        self._linear.over_rows(len(x))
        del converted  # not before the kernel has read it

    def _fit(self, operands: LinearOperands, rows: int) -> int:
        operands.rows, operands.columns = rows, self._columns(rows)
        return -(-operands.outputs // operands.columns)

    def _convert_inputs(
        self, x: Tensor, inputs: InputFormat, convert: KernelCall[InputOperands]
    ) -> list[Tensor]:
        """Convert the rows and point the operands at the result, which is returned."""
        rows, padded, call = len(x), self._weights.inputs, self._linear.operands
        items = padded // inputs.group * inputs.group_items
        values = self._pool.empty("converted inputs", (rows, items), inputs.dtype)
        operands = convert.operands
        operands.x, operands.x_stride, operands.width = x.data_ptr(), x.stride(0), x.shape[1]
        operands.y, operands.padded = values.data_ptr(), padded
        call.x, call.x_stride = values.data_ptr(), items * values.itemsize
        converted = [values]
        if inputs.is_quantized:
            scale = self._pool.empty("input scales", (rows,))
            operands.scale = call.x_scale = scale.data_ptr()
            converted.append(scale)
        convert.over_rows(rows, joins=True)
        return converted


class MixedLinear:
    """A linear whose outputs are those of several linears over the same inputs, side by side."""

    def __init__(self, pool: ThreadPool, parts: Sequence[PackedLinear]) -> None:
        self._pool = pool
        self._parts = parts

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        outputs = sum(part.outputs for part in self._parts)
        y = self._pool.empty("linear", (len(x), outputs)) if add_to is None else add_to
        first = 0
        for part in self._parts:
            part.write(x, y[:, first : first + part.outputs], adds=add_to is not None)
            first += part.outputs
        return y
