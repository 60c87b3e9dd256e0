"""`Recurrence` over native kernels."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.kernels import delta_rule, mamba, recurrence
from engine.worker.cpu.kernels.delta_tiles import PANEL
from engine.worker.ports import (
    DeltaShape,
    DeltaState,
    DeltaWeights,
    MambaWeights,
    StateRuns,
    ThreadPool,
)


class NativeScan:
    """Two kernels over the same operands: a convolution, and what is computed token by token."""

    def __init__(
        self,
        pool: ThreadPool,
        shape: DeltaShape,
        scan: Callable[..., None],
        weights: Mapping[str, Tensor],
        eps: float = 0.0,
    ) -> None:
        """`weights` by their names in the operands."""
        self._shape = shape
        self._tensors = {name: each.float().contiguous() for name, each in weights.items()}
        floats = recurrence.scratch_floats(shape.key_dim)
        self._scratch = torch.empty(pool.threads * floats)
        self._operands = recurrence.ScanOperands(
            **{name: each.data_ptr() for name, each in self._tensors.items()},
            eps=eps,
            scratch=self._scratch.data_ptr(),
            channels=shape.channels,
            kernel=shape.kernel,
            key_heads=shape.num_key_heads,
            heads=shape.num_value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
        )
        blocks = -(-shape.channels // recurrence.CHANNELS)
        panels = -(-shape.value_dim // PANEL)

        def fit(operands: recurrence.ScanOperands, runs: int, each: int) -> int:
            operands.panels_per_chunk = each
            return runs * shape.num_value_heads * -(-panels // each)

        self._pool = pool
        self._convolution = KernelCall(
            pool, recurrence.convolution, self._operands, fit=lambda _, runs: runs * blocks
        )
        self._scan = KernelCall(pool, scan, self._operands, fit=partial(fit, each=1))
        self._decode = KernelCall(pool, scan, self._operands, fit=partial(fit, each=panels))

    def __call__(self, y: Tensor, state: DeltaState, runs: StateRuns) -> Tensor:
        shape, operands, empty = self._shape, self._operands, self._pool.empty
        mixed = empty("convolved", (len(y), shape.channels + 2 * shape.num_value_heads))
        out = empty("scanned", (len(y), shape.num_value_heads * shape.value_dim))
        operands.y, operands.y_stride = y.data_ptr(), y.stride(0)
        operands.mixed, operands.out = mixed.data_ptr(), out.data_ptr()
        operands.inputs, operands.matrices = state.inputs.data_ptr(), state.matrices.data_ptr()
        operands.runs, operands.writes = runs.runs.ctypes.data, runs.writes.ctypes.data
        count = len(runs.runs)
        self._convolution.over_rows(count)
        self._prepare(len(y))
        (self._decode if count == len(y) else self._scan).over_rows(count)
        return out

    def _prepare(self, rows: int) -> None:
        """Change what the convolution wrote of so many rows before the scan reads it."""


class NativeDeltaNet(NativeScan):
    """The delta rule, a kernel of what it reads, and one of the gated norm."""

    def __init__(self, pool: ThreadPool, weights: DeltaWeights) -> None:
        tensors = {
            "conv": weights.conv.t(),
            "decay_rate": weights.decay_rate,
            "decay_bias": weights.decay_bias,
            "norm": weights.norm,
        }
        super().__init__(pool, weights.shape, delta_rule.delta_rule, tensors, weights.eps)
        self._inputs = KernelCall(pool, delta_rule.delta_inputs, self._operands)
        self._norm = KernelCall(pool, delta_rule.delta_norm, self._operands)

    def __call__(self, y: Tensor, state: DeltaState, runs: StateRuns) -> Tensor:
        out = super().__call__(y, state, runs)
        self._norm.over_rows(len(y))
        return out

    def _prepare(self, rows: int) -> None:
        self._inputs.over_rows(rows)


class NativeMambaScan(NativeScan):
    """The recurrence of Mamba 2."""

    def __init__(self, pool: ThreadPool, weights: MambaWeights) -> None:
        tensors = {
            "conv": weights.conv.t(),
            "conv_bias": weights.conv_bias,
            "decay_rate": weights.decay_rate,
            "decay_bias": weights.decay_bias,
            "skip": weights.skip,
        }
        super().__init__(pool, weights.shape, mamba.mamba_scan, tensors)
