"""The operators over native kernels: tensors in, addresses to the team, tensors out.

A layer keeps the operands of its kernel and fills in what changes from call to call, so a call
costs a few microseconds of Python.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.step import SamplingParams
from engine.worker.cpu.build import kernel
from engine.worker.cpu.kernels import elementwise as kernels
from engine.worker.cpu.kernels import linear
from engine.worker.cpu.kernels import sampling as drawing
from engine.worker.cpu.kernels.linear import PANEL, LinearOperands, linear_of_floats
from engine.worker.cpu.kernels.packed_tiles import WIDTH
from engine.worker.cpu.kernels.packing import pack
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.recorded_decoder import RecordedDecoder
from engine.worker.cpu.thread_pool import NativeThreadPool as NativeTeam
from engine.worker.model.layers import Decoder
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import (
    Argmax,
    Linear,
    StageModel,
    ThreadPool,
    Weight,
    common_format,
    dequantize,
)

ACTIVATION_KINDS = {
    "silu": kernels.SILU,
    "swish": kernels.SILU,
    "gelu_new": kernels.GELU_TANH,
    "gelu_pytorch_tanh": kernels.GELU_TANH,
}
CHUNKS_PER_THREAD = 4
COLUMNS_FOR_FEW = 128  # of a chunk, at most: weights stream through
COLUMNS_FOR_MANY = 96  # a piece of them stays in cache


class KernelCall:
    """A kernel with its operands: words that the kernel reads, in the order of its tuple."""

    def __init__(
        self, team: ThreadPool, function: Callable[..., None], operands: Sequence[int]
    ) -> None:
        self.words = np.array(operands, dtype=np.int64)
        self._team = team
        self._kernel: int = kernel(function).address
        self._address = int(self.words.ctypes.data)

    def __call__(self, chunks: int) -> None:
        if self._team.tape is not None:
            self._team.tape.add(self._kernel, self.words, chunks)
        self._team.run(self._kernel, self._address, chunks)

    def over_rows(self, rows: int, at: int) -> None:
        """Run over all rows; word `at` takes the rows of a chunk."""
        share = -(-rows // (self._team.threads * CHUNKS_PER_THREAD))
        self.words[at] = share
        self(-(-rows // share))


def columns_of_chunks(outputs: int, threads: int) -> Callable[[int], int]:
    """Columns of a chunk for so many rows, in whole panels: at most so many that they suit the
    cache, and few enough that every thread has some."""

    def at_most(most: int, chunks: int) -> int:
        return max(WIDTH, min(most, outputs // chunks // WIDTH * WIDTH))

    for_few = at_most(COLUMNS_FOR_FEW, 12 * threads)
    for_many = at_most(COLUMNS_FOR_MANY, 4 * threads)
    return lambda rows: for_few if rows <= PANEL else for_many


class NativeLinear:
    """Packed weights of 32 bits."""

    def __init__(self, team: ThreadPool, packed: Tensor, outputs: int, bias: Tensor | None) -> None:
        """From what `pack` made, and a bias for all rows."""
        self._team = team
        self._outputs = outputs
        shift = torch.zeros(outputs) if bias is None else bias
        self._held = packed, shift
        blank = LinearOperands(
            weight=packed.data_ptr(),
            weight_scale=0,
            offset=0,
            bias=shift.data_ptr(),
            inputs=packed.shape[1],
            outputs=outputs,
            columns=0,
            x=0,
            x_stride=0,
            x_scale=0,
            y=0,
            y_stride=0,
            rows=0,
            adds=0,
        )
        self._call = KernelCall(team, linear_of_floats, blank)
        self._columns = columns_of_chunks(outputs, team.threads)

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        y = self._team.room("linear", (rows, self._outputs)) if add_to is None else add_to
        columns = self._columns(rows)
        self._call.words[6:] = (
            columns,
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            0,
            y.data_ptr(),
            y.stride(0),
            rows,
            add_to is not None,
        )
        self._call(-(-self._outputs // columns))
        return y


class NativeNorm:
    """Root mean square norm, or with a bias that of mean and variance."""

    def __init__(self, team: ThreadPool, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._held = weight, bias
        self._team = team
        self._dim = len(weight)
        self._call = KernelCall(
            team,
            kernels.rms_norm if bias is None else kernels.layer_norm,
            (weight.data_ptr(), 0, self._dim, *(0,) * 7, 0 if bias is None else bias.data_ptr()),
        )
        self._call.words.view(np.float32)[2] = eps

    def __call__(self, x: Tensor) -> Tensor:
        y = self._team.room("norm", (len(x), self._dim))
        self._run(x, y, 1)
        return y

    def apply_(self, heads: Tensor) -> None:
        self._run(heads, heads, heads.shape[1])

    def _run(self, x: Tensor, y: Tensor, groups: int) -> None:
        rows = x.shape[0]
        self._call.words[3:9] = (
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
            rows,
            groups,
        )
        self._call.over_rows(rows, 9)


class NativeActivation:
    """silu or the tanh form of gelu, gated or not."""

    def __init__(self, team: ThreadPool, kind: int, is_gated: bool) -> None:
        self._team = team
        self._is_gated = is_gated
        self._call = KernelCall(team, kernels.activation, (kind, is_gated, *(0,) * 7))

    def __call__(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        width = width // 2 if self._is_gated else width
        y = self._team.room("activation", (rows, width))
        self._call.words[2:8] = (
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
            rows,
            width,
        )
        self._call.over_rows(rows, 8)
        return y


class CpuLinears(Protocol):
    """How the CPU computes with one format of weights."""

    @property
    def description(self) -> str:
        """As reports show it: "int8 (14-bit activations)"."""
        ...

    @property
    def kernels(self) -> tuple[Callable[..., None], ...]: ...

    def linear(
        self,
        team: NativeTeam,
        pages: WeightPages,
        weights: Sequence[Weight],
        bias: Tensor | None,
    ) -> Linear:
        """Packs weights, of this format or not, and makes the linear that computes with them."""
        ...


class FloatLinears:
    """Linears in float32; quantized weights are dequantized."""

    description = "float32"
    kernels = linear.KERNELS

    def linear(
        self, team: NativeTeam, pages: WeightPages, weights: Sequence[Weight], bias: Tensor | None
    ) -> NativeLinear:
        parts = [dequantize(weight) for weight in weights]
        outputs = sum(len(part) for part in parts)
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return NativeLinear(team, pack(whole, pages), outputs, bias)


FLOATS = FloatLinears()


class NativeOperators:
    """`Operators` over native kernels. Activations without a kernel are torch's."""

    def __init__(self, team: NativeTeam, linears: Mapping[str, CpuLinears] | None = None) -> None:
        """`linears` by the format of the weights; weights of any other format become floats."""
        self._team = team
        self._linears = linears or {}
        self.is_native = True  # until something is asked for that torch does
        self._pages = WeightPages()
        self._torch = TorchOperators()
        self._rope = KernelCall(team, kernels.apply_rope, (0,) * 8)
        self._largest = KernelCall(team, drawing.largest, (0,) * 5)
        self._draw = KernelCall(team, drawing.draw, (0,) * 8)

    @property
    def kernels(self) -> tuple[Callable[..., None], ...]:
        """Every kernel that these operators may run."""
        of_linears = [kernel for linears in self._linears.values() for kernel in linears.kernels]
        return *kernels.KERNELS, *linear.KERNELS, *of_linears, *drawing.KERNELS

    def recorded(self, model: StageModel, num_ranks: int) -> StageModel:
        """The same model, with less Python in steps of decodes if its blocks are all kernels."""
        if isinstance(model, Decoder) and self.is_native and num_ranks == 1:
            return RecordedDecoder(model, self._team)
        return model

    def linear(self, weights: Sequence[Weight], bias: Tensor | None) -> Linear:
        linears = self._linears.get(common_format(weights) or "", FLOATS)
        return linears.linear(self._team, self._pages, weights, bias)

    def constant(self, tensor: Tensor) -> Tensor:
        return tensor

    def rms_norm(self, weight: Tensor, eps: float) -> NativeNorm:
        return NativeNorm(self._team, weight, None, eps)

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> NativeNorm:
        return NativeNorm(self._team, weight, bias, eps)

    def activation(self, name: str, *, is_gated: bool) -> Callable[[Tensor], Tensor]:
        if name in ACTIVATION_KINDS:
            return NativeActivation(self._team, ACTIVATION_KINDS[name], is_gated)
        self.is_native = False
        return self._torch.activation(name, is_gated=is_gated)

    def apply_rope_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        rows, count, dim = heads.shape
        self._rope.words[:7] = (
            heads.data_ptr(),
            heads.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            rows,
            count,
            dim // 2,
        )
        self._rope.over_rows(rows, 7)

    def argmax(self, logits: Tensor) -> Argmax:
        rows, vocab = logits.shape
        values = logits.new_empty(rows)
        ids = torch.empty(rows, dtype=torch.int64)
        self._largest.words[:] = (
            logits.data_ptr(),
            logits.stride(0),
            vocab,
            values.data_ptr(),
            ids.data_ptr(),
        )
        self._largest(rows)
        return Argmax(values, ids)

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[int],
        samplings: Sequence[SamplingParams],
        points: Sequence[float],
    ) -> list[int]:
        integers = np.array(
            [(row, one.top_k) for row, one in zip(rows, samplings, strict=True)], dtype=np.int64
        )
        reals = np.array(
            [
                (one.temperature, one.min_p, one.top_p, point)
                for one, point in zip(samplings, points, strict=True)
            ],
            dtype=np.float64,
        )
        ids = np.empty(len(rows), dtype=np.int64)
        vocab = logits.shape[1]
        scratch_bytes = drawing.BUCKETS * 8 + vocab * drawing.BYTES + drawing.BUCKETS
        scratch = np.empty(self._team.threads * scratch_bytes // 8 + 1, dtype=np.int64)
        self._draw.words[:] = (
            logits.data_ptr(),
            logits.stride(0),
            vocab,
            integers.ctypes.data,
            reals.ctypes.data,
            ids.ctypes.data,
            scratch.ctypes.data,
            scratch_bytes // 64 * 64,
        )
        self._draw(len(rows))
        found: list[int] = ids.tolist()
        return found
