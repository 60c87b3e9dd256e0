"""Operators with weights of 8 bits; all else is as in float32.

Only linear layers are rounded. A quarter of the bytes to read makes single streams faster, and
pairs of products in one instruction make batches faster.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.worker.native import int8_kernels
from engine.worker.native.int8_tiles import TURN
from engine.worker.native.operators import Call, NativeOperators, columns_of_chunks
from engine.worker.ports import Linear, Team
from engine.worker.rounded import RoundedWeight, Weight, rounded


def round_weights(weights: Sequence[Weight], padded: int) -> RoundedWeight:
    """Weights `[out, in]` taken one below the other, `[sum of out, padded]`."""
    outputs = sum(weight.shape[0] for weight in weights)
    whole = RoundedWeight(torch.zeros((outputs, padded), dtype=torch.int8), torch.empty(outputs))
    done = 0
    for weight in weights:
        part = rounded(weight)
        here = slice(done, done + len(part.scales))
        whole.values[here, : part.shape[1]] = part.values
        whole.scales[here] = part.scales
        done = here.stop
    return whole


class Int8Linear:
    """See `engine.worker.native.int8_kernels`."""

    def __init__(self, team: Team, weights: Sequence[Weight], bias: Tensor | None) -> None:
        self._team = team
        self._inputs = weights[0].shape[1]
        self._padded = -(-self._inputs // TURN) * TURN
        weight, scale = round_weights(weights, self._padded)
        self._held = weight, scale, bias
        self._outputs = len(weight)
        self._round = Call(team, int8_kernels.round_rows, (0,) * 8)
        self._linear = Call(
            team,
            int8_kernels.int8_linear,
            int8_kernels.Int8LinearOperands(
                weight=weight.data_ptr(),
                weight_scale=scale.data_ptr(),
                inputs=self._padded,
                outputs=self._outputs,
                bias=0 if bias is None else bias.data_ptr(),
                columns=0,
                x=0,
                x_scale=0,
                y=0,
                y_stride=0,
                rows=0,
                adds=0,
            ),
        )
        self._columns = columns_of_chunks(self._outputs, team.threads)

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        rounded = self._team.room("rounded", (rows, self._padded), torch.int16)
        scale = self._team.room("scale", (rows,))
        self._round.words[:7] = (
            x.data_ptr(),
            x.stride(0),
            self._inputs,
            rounded.data_ptr(),
            self._padded,
            scale.data_ptr(),
            rows,
        )
        self._round.over_rows(rows, 7)
        y = self._team.room("linear", (rows, self._outputs)) if add_to is None else add_to
        columns = self._columns(rows)
        self._linear.words[5:] = (
            columns,
            rounded.data_ptr(),
            scale.data_ptr(),
            y.data_ptr(),
            y.stride(0),
            rows,
            add_to is not None,
        )
        self._linear(-(-self._outputs // columns))
        return y


class Int8Operators(NativeOperators):
    """`NativeOperators`, but for the linear."""

    def linear(self, weights: Sequence[Weight], bias: Tensor | None) -> Linear:
        return Int8Linear(self._team, weights, bias)
