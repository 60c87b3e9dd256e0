"""`DeltaNet` over native kernels."""

import torch
from torch import Tensor

from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.kernels import delta_rule
from engine.worker.cpu.kernels.delta_tiles import PANEL
from engine.worker.ports import DeltaState, DeltaWeights, StateRuns, ThreadPool


class NativeDeltaNet:
    """Three kernels over the same operands: convolution, delta rule, gated norm."""

    def __init__(self, pool: ThreadPool, weights: DeltaWeights) -> None:
        self._shape = shape = weights.shape
        self._tensors = tuple(
            each.float().contiguous()
            for each in (weights.conv.t(), weights.decay_rate, weights.decay_bias, weights.norm)
        )
        floats = delta_rule.scratch_floats(shape.key_dim)
        self._scratch = torch.empty(pool.threads * floats)
        conv, decay_rate, decay_bias, norm = (each.data_ptr() for each in self._tensors)
        self._operands = operands = delta_rule.DeltaOperands(
            conv=conv,
            decay_rate=decay_rate,
            decay_bias=decay_bias,
            norm=norm,
            eps=weights.eps,
            scratch=self._scratch.data_ptr(),
            scratch_stride=floats,
            channels=shape.channels,
            kernel=shape.kernel,
            key_heads=shape.num_key_heads,
            heads=shape.num_value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
        )
        self._convolution = KernelCall(pool, delta_rule.delta_convolution, operands)
        self._rule = KernelCall(pool, delta_rule.delta_rule, operands)
        self._norm = KernelCall(pool, delta_rule.delta_norm, operands)

    def __call__(self, y: Tensor, state: DeltaState, runs: StateRuns) -> Tensor:
        shape, operands = self._shape, self._operands
        rows, count = len(y), len(runs.runs)
        mixed = torch.empty(rows, shape.channels)
        out = torch.empty(rows, shape.num_value_heads * shape.value_dim)
        operands.y, operands.y_stride = y.data_ptr(), y.stride(0)
        operands.mixed, operands.out = mixed.data_ptr(), out.data_ptr()
        operands.inputs, operands.matrices = state.inputs.data_ptr(), state.matrices.data_ptr()
        operands.runs, operands.writes = runs.runs.ctypes.data, runs.writes.ctypes.data
        self._convolution(count * -(-shape.channels // delta_rule.CHANNELS))
        self._rule(count * shape.num_value_heads * -(-shape.value_dim // PANEL))
        self._norm.over_rows(rows)
        return out
