"""Linear layers with int8 weights and quantized activations.
 A quarter of the bytes to read makes single streams faster, and
several products in one instruction make batches faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.worker.cpu.kernels import int8_linear as int8_kernels
from engine.worker.cpu.kernels.linear import LinearOperands
from engine.worker.cpu.kernels.packed_tiles import (
    GROUPS,
    HAS_QUADS,
    PAIR,
    PAIRS,
    QUADS,
    WIDTH,
    Form,
)
from engine.worker.cpu.kernels.packing import pack
from engine.worker.cpu.operators import KernelCall, columns_of_chunks
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool as NativeTeam
from engine.worker.ports import ThreadPool, Weight
from engine.worker.weights.formats.int8 import Int8Weight, quantize


class Rounding(NamedTuple):
    """What activations are rounded to, and what multiplies them."""

    name: str
    form: Form
    dtype: torch.dtype
    zero: int  # what stands for 0
    round_rows: Callable[..., None]
    linear: Callable[..., None]


SHORTS = Rounding(
    name="14-bit activations",
    form=PAIRS,
    dtype=torch.int16,
    zero=0,
    round_rows=int8_kernels.round_to_shorts,
    linear=int8_kernels.linear_of_shorts,
)
OCTETS = Rounding(
    name="8-bit activations, VNNI",
    form=QUADS,
    dtype=torch.uint8,
    zero=int8_kernels.ZERO_OCTET,
    round_rows=int8_kernels.round_to_octets,
    linear=int8_kernels.linear_of_octets,
)
FASTEST = OCTETS if HAS_QUADS else SHORTS  # on this machine
BY_BITS = {"auto": FASTEST, "8": OCTETS, "14": SHORTS}


def activations_of(bits: str) -> Rounding:
    """The activation format for `activation_bits`; raises `StartupError` if the CPU lacks it."""
    if bits not in BY_BITS:
        raise StartupError(f"activation_bits {bits!r} is not supported on cpu; known: auto, 8, 14")
    if bits == "8" and not HAS_QUADS:
        raise StartupError("activation_bits '8' needs a CPU with VNNI; use auto or 14")
    return BY_BITS[bits]


def stack(weights: Sequence[Weight], unit: int) -> Int8Weight:
    """Weights `[out, in]` one below the other, with zeros up to whole panels and `unit`s of in;
    scales only of what is there."""
    outputs = sum(weight.shape[0] for weight in weights)
    rows, depth = (
        -(-size // unit) * unit for size, unit in ((outputs, WIDTH), (weights[0].shape[1], unit))
    )
    whole = Int8Weight(torch.zeros((rows, depth), dtype=torch.int8), torch.empty(outputs))
    done = 0
    for weight in weights:
        part = quantize(weight)
        here = slice(done, done + len(part.scales))
        whole.values[here, : part.shape[1]] = part.values
        whole.scales[here] = part.scales
        done = here.stop
    return whole


def offsets(values: Tensor, zero: int) -> Tensor:
    """What `zero` adds to the sums over each piece of k, int32 `[pieces, outputs]`."""
    pieces = torch.split(values, int8_kernels.DEPTH, dim=1)
    return torch.stack([piece.sum(dim=1, dtype=torch.int32) * zero for piece in pieces])


class CpuInt8Linear:
    """See `engine.worker.cpu.kernels.int8_linear`."""

    def __init__(
        self, team: ThreadPool, weight: Int8Weight, packed: Tensor, bias: Tensor, rounding: Rounding
    ) -> None:
        """From what `stack` and `pack` made, and a bias for all rows."""
        self._team = team
        self._outputs, self._padded = len(weight.scales), weight.shape[1]
        self._dtype = rounding.dtype
        offset = offsets(weight.values, rounding.zero)
        self._held = packed, weight.scales, offset, bias
        self._round = KernelCall(team, rounding.round_rows, (0,) * 8)
        self._linear = KernelCall(
            team,
            rounding.linear,
            LinearOperands(
                weight=packed.data_ptr(),
                weight_scale=weight.scales.data_ptr(),
                offset=offset.data_ptr(),
                bias=bias.data_ptr(),
                inputs=self._padded,
                outputs=self._outputs,
                columns=0,
                x=0,
                x_stride=0,
                x_scale=0,
                y=0,
                y_stride=0,
                rows=0,
                adds=0,
            ),
        )
        self._columns = columns_of_chunks(self._outputs, team.threads)

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        rows, inputs = x.shape
        values = self._team.room("quantize", (rows, self._padded), self._dtype)
        scale = self._team.room("scale", (rows,))
        self._round.words[:7] = (
            x.data_ptr(),
            x.stride(0),
            inputs,
            values.data_ptr(),
            self._padded,
            scale.data_ptr(),
            rows,
        )
        self._round.over_rows(rows, 7)
        y = self._team.room("linear", (rows, self._outputs)) if add_to is None else add_to
        columns = self._columns(rows)
        self._linear.words[6:] = (
            columns,
            values.data_ptr(),
            values.stride(0) * values.itemsize,
            scale.data_ptr(),
            y.data_ptr(),
            y.stride(0),
            rows,
            add_to is not None,
        )
        self._linear(-(-self._outputs // columns))
        return y


@dataclass(frozen=True, slots=True)
class Int8Linears:
    """Linears with int8 weights and quantized activations; float weights are quantized."""

    rounding: Rounding = FASTEST

    @property
    def description(self) -> str:
        return f"int8 ({self.rounding.name})"

    @property
    def kernels(self) -> tuple[Callable[..., None], ...]:
        return self.rounding.round_rows, self.rounding.linear

    def linear(
        self, team: NativeTeam, pages: WeightPages, weights: Sequence[Weight], bias: Tensor | None
    ) -> CpuInt8Linear:
        form = self.rounding.form
        weight = stack(weights, GROUPS * form.group)
        items = weight.values.view(torch.int16 if form.group == PAIR else torch.int32)
        packed = pack(items, pages)  # a group moves as one
        shift = torch.zeros(len(weight.scales)) if bias is None else bias
        return CpuInt8Linear(team, weight, packed, shift, self.rounding)
