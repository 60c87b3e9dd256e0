"""Reads the sizes and weights of a Mamba 2 layer.

The rows of its `in_proj` are the gate, x, B, C and the time steps, in this order; those of its
`conv1d` are x, B and C.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Fused, Projections
from engine.errors import StartupError
from engine.worker.model.layers import HeadNorm, SplitWidthNorm
from engine.worker.model.mamba import GroupNorm
from engine.worker.model.mixers import RecurrentMixer
from engine.worker.ports import MambaShape, MambaWeights, RankPart, TensorSlice

NO_LIMITS = (0.0, float("inf"))


class MambaFields(NamedTuple):
    """What config.json says of all Mamba layers of a model."""

    shape: MambaShape
    has_conv_bias: bool
    has_bias: bool  # whether `in_proj` and `out_proj` have one
    eps: float
    has_norm: bool = True
    multipliers: tuple[float, ...] = ()  # factors of the gate, x, B, C and the time steps

    @classmethod
    def read(cls, fields: Fields, width: int, eps: float) -> "MambaFields":
        """The fields `mamba_…`; `width` is that of all heads. Raises `StartupError`."""
        heads, groups = fields.integer("mamba_n_heads", 128), fields.integer("mamba_n_groups", 1)
        is_auto = fields.get("mamba_d_head") in (None, "auto")
        head_dim = width // heads if is_auto else fields.integer("mamba_d_head")
        if heads * head_dim != width or heads % groups:
            raise StartupError(
                f"{fields.where}: mamba_n_heads={heads} heads of {head_dim} in {groups} groups do "
                f"not divide {width} evenly"
            )
        fields.reject_unless("hidden_act", "silu", "swish")
        limits = fields.get("time_step_limit")
        if isinstance(limits, list | tuple) and tuple(map(_number, limits)) != NO_LIMITS:
            raise StartupError(f"{fields.where}: time_step_limit={limits!r} is not supported")
        state_dim, kernel = fields.integer("mamba_d_state", 256), fields.integer("mamba_d_conv", 4)
        return cls(
            MambaShape(groups, heads, state_dim, head_dim, kernel),
            fields.flag("mamba_conv_bias", True),
            fields.flag("mamba_proj_bias", False),
            eps,
        )

    def layer(self, projections: Projections, at: str, number: int) -> RecurrentMixer:
        """The layer whose tensors are named `at`, the recurrent one of this `number`."""
        return _Layer(self, projections, at).build(number)


def _number(limit: object) -> object:
    """A limit as a number: JSON has no infinity, which transformers writes as an object."""
    return float("inf") if limit in ("Infinity", {"__float__": "Infinity"}) else limit


class _Layer:
    """The parts of this rank in the rows of a layer's tensors."""

    def __init__(self, fields: MambaFields, projections: Projections, at: str) -> None:
        shard, shape = projections.shard, fields.shape
        self._fields, self._projections, self._at = fields, projections, at
        groups, self._heads = shard.even(shape.num_key_heads), shard.even(shape.num_value_heads)
        if shape.num_key_heads == 1:
            groups = RankPart.whole(1)
        self._keys = groups.times(shape.key_dim)
        self._values = self._heads.times(shape.value_dim)

    def build(self, number: int) -> RecurrentMixer:
        projections, at, values = self._projections, self._at, self._values
        has_bias = self._fields.has_bias
        parts = (values, values, self._keys, self._keys, self._heads)
        order = (3, 2, 1, 0, 4)
        stored, weights = Fused(f"{at}.in_proj", parts, order), self._weights()
        scales = None
        if multipliers := self._fields.multipliers:
            widths = torch.tensor([len(parts[each].run) for each in order])
            numbers = torch.tensor([multipliers[each] for each in order])
            scales = numbers.repeat_interleave(widths).to(weights.conv)
        return RecurrentMixer(
            layer=number,
            inputs=projections.from_hidden(stored, has_bias=has_bias),
            recurrence=projections.operators.recurrence(weights),
            norm=self._norm() if self._fields.has_norm else None,
            out=projections.to_hidden(f"{at}.out_proj", values, has_bias=has_bias),
            scales=scales,
        )

    def _weights(self) -> MambaWeights:
        shape, at = self._fields.shape, self._at
        stored = Fused(f"{at}.conv1d", (self._values, self._keys, self._keys), order=(2, 1, 0))
        size = (shape.channels, 1, shape.kernel)
        conv = self._tensor(f"{stored.name}.weight", size, stored.runs)[:, 0].contiguous()
        bias = torch.zeros_like(conv[:, 0])
        if self._fields.has_conv_bias:
            bias = self._tensor(f"{stored.name}.bias", size[:1], stored.runs)
        return MambaWeights(
            shape=shape.of_rank(self._projections.shard.num_ranks),
            conv=conv,
            conv_bias=bias,
            decay_rate=-self._vector("A_log", self._heads).exp(),
            decay_bias=self._vector("dt_bias", self._heads),
            skip=self._vector("D", self._heads),
        )

    def _norm(self) -> HeadNorm:
        projections, values, eps = self._projections, self._values, self._fields.eps
        groups, operators = self._fields.shape.num_key_heads, projections.operators
        part = TensorSlice(f"{self._at}.norm.weight", (values.size,), rows=values.run)
        weight = projections.weights.tensor(part)
        if groups > 1:
            size = values.size // groups
            ones = operators.rms_norm(torch.ones_like(weight[:size]), eps)
            return GroupNorm(ones, weight.view(-1, size))
        if projections.shard.all_reduce is None:
            return operators.rms_norm(weight, eps)
        return SplitWidthNorm(weight, eps, values.size, 1.0, projections.shard.all_reduce)

    def _vector(self, name: str, part: RankPart) -> Tensor:
        return self._tensor(f"{self._at}.{name}", (part.size,), [part.run])

    def _tensor(self, name: str, size: tuple[int, ...], runs: Sequence[range]) -> Tensor:
        """Some rows of a tensor, in float32."""
        source = self._projections.weights
        return torch.cat([source.tensor(TensorSlice(name, size, run)).float() for run in runs])
