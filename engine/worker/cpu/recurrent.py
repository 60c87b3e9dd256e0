"""`Recurrence` over native kernels."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.kernels import delta_rule, mamba, recurrence
from engine.worker.cpu.kernels.delta_tiles import PANEL
from engine.worker.ports import (
    ConvWeights,
    DeltaWeights,
    MambaWeights,
    RecurrentWeights,
    StateRuns,
    ThreadPool,
)

OPERANDS = {"norm": "outputs", "skip": "outputs"}  # the others have the names of the weights


class NativeConvolution:
    """A kernel of the causal convolution of each channel; alone it is LFM2's, with its gates."""

    def __init__(self, pool: ThreadPool, weights: RecurrentWeights) -> None:
        named = {each.name: getattr(weights, each.name) for each in fields(weights)}
        shape, eps = named.pop("shape"), named.pop("eps", 0.0)
        named["conv"] = named["conv"].t()
        self._tensors = {
            OPERANDS.get(name, name): each.float().contiguous() for name, each in named.items()
        }
        self._operands = recurrence.ScanOperands(
            **{name: each.data_ptr() for name, each in self._tensors.items()},
            eps=eps,
            channels=shape.channels,
            kernel=shape.kernel,
        )
        blocks = -(-shape.channels // recurrence.CHANNELS)
        self._pool = pool
        self._convolution = KernelCall(
            pool, recurrence.convolution, self._operands, fit=lambda _, runs: runs * blocks
        )

    def __call__(self, y: Tensor, state: tuple[Tensor, ...], runs: StateRuns) -> Tensor:
        operands = self._operands
        width = operands.channels + 2 * operands.heads
        mixed = self._pool.empty("convolved", (len(y), width))
        operands.y, operands.y_stride = y.data_ptr(), y.stride(0)
        operands.mixed, operands.inputs = mixed.data_ptr(), state[0].data_ptr()
        operands.runs, operands.writes = runs.runs.ctypes.data, runs.writes.ctypes.data
        self._convolution.over_rows(len(runs.runs))
        return mixed


class NativeScan(NativeConvolution):
    """Two kernels over the same operands: a convolution, and what is computed token by token."""

    def __init__(
        self, pool: ThreadPool, weights: DeltaWeights | MambaWeights, scan: Callable[..., None]
    ) -> None:
        super().__init__(pool, weights)
        shape, operands = weights.shape, self._operands
        self._scratch = torch.empty(pool.threads * recurrence.scratch_floats(shape.key_dim))
        operands.scratch = self._scratch.data_ptr()
        operands.key_heads, operands.heads = shape.num_key_heads, shape.num_value_heads
        operands.key_dim, operands.value_dim = shape.key_dim, shape.value_dim
        operands.tiles_outputs = shape.tiles_outputs
        panels = -(-shape.value_dim // PANEL)

        def fit(operands: recurrence.ScanOperands, runs: int, each: int) -> int:
            operands.panels_per_chunk = each
            return runs * shape.num_value_heads * -(-panels // each)

        self._scan = KernelCall(pool, scan, operands, fit=partial(fit, each=1))
        self._decode = KernelCall(pool, scan, operands, fit=partial(fit, each=panels))

    def __call__(self, y: Tensor, state: tuple[Tensor, ...], runs: StateRuns) -> Tensor:
        mixed = super().__call__(y, state, runs)
        operands, rows, count = self._operands, len(y), len(runs.runs)
        out = self._pool.empty("scanned", (rows, operands.heads * operands.value_dim))
        operands.out, operands.matrices = out.data_ptr(), state[1].data_ptr()
        self._prepare(mixed)
        (self._decode if count == rows else self._scan).over_rows(count)
        return out

    def _prepare(self, mixed: Tensor) -> None:
        """Change what the convolution wrote before the scan reads it."""


class NativeDeltaNet(NativeScan):
    """The delta rule, a kernel of what it reads, and one of the gated norm."""

    def __init__(self, pool: ThreadPool, weights: DeltaWeights) -> None:
        super().__init__(pool, weights, delta_rule.delta_rule)
        self._inputs = KernelCall(pool, delta_rule.delta_inputs, self._operands)
        self._norm = KernelCall(pool, delta_rule.delta_norm, self._operands)

    def __call__(self, y: Tensor, state: tuple[Tensor, ...], runs: StateRuns) -> Tensor:
        out = super().__call__(y, state, runs)
        self._norm.over_rows(len(y))
        return out

    def _prepare(self, mixed: Tensor) -> None:
        self._inputs.over_rows(len(mixed))


def native_recurrence(pool: ThreadPool, weights: RecurrentWeights) -> NativeConvolution:
    """The `Recurrence` of such a layer."""
    match weights:
        case ConvWeights():
            return NativeConvolution(pool, weights)
        case MambaWeights():
            return NativeScan(pool, weights, mamba.mamba_scan)
        case DeltaWeights():
            return NativeDeltaNet(pool, weights)
