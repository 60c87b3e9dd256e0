"""Hunyuan, dense: Llama with norms of each head of q and k behind RoPE, whose base grows by a fixed
`alpha`."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from adapters.models.base.rope_fields import LayerRopes, RopeSource
from adapters.models.base.traits import FamilyTraits
from adapters.models.dense.llama import Llama
from engine.worker.model.layers import AttentionBlock, Mixer
from engine.worker.ports import Linear, ModelShape, Norm, StepContext, TensorSlice


@dataclass(frozen=True, slots=True)
class RopeThenNorm:
    """Attention whose q and k are turned before their norms."""

    attention: AttentionBlock  # it has neither norms nor RoPE
    rope: int
    q_norm: Norm
    k_norm: Norm
    apply_rope_: Callable[[Tensor, Tensor, Tensor], None]  # the function of the `Operators`

    @property
    def out(self) -> Linear:
        return self.attention.out

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        block, angles = self.attention, context.ropes[self.rope]
        heads, kv_heads = block.num_heads, block.num_kv_heads
        qkv = block.qkv(x).view(len(x), heads + 2 * kv_heads, block.head_dim)
        q, k, _ = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        for norm, part in ((self.q_norm, q), (self.k_norm, k)):
            self.apply_rope_(part, angles.cos, angles.sin)
            norm.apply_(part)
        return block.mix(qkv, context)


class HunyuanDense(Llama):
    """`HunYuanDenseV1ForCausalLM`."""

    def traits(self, fields: Fields) -> FamilyTraits:
        has_bias = fields.flag("attention_bias", False)
        return FamilyTraits(qkv_bias=has_bias, out_bias=has_bias)

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        rope = fields.child("rope_parameters") or fields.child("rope_scaling")
        kind = None if rope is None else rope.get("rope_type") or rope.get("type")
        if rope is None or kind != "dynamic":
            return super().ropes(fields, shape)
        dim = shape.head_dim
        theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
        theta *= rope.number("alpha") ** (dim / (dim - 2))
        return LayerRopes.same(RopeSource(dim, theta), shape.num_layers)

    def _attention(self, projections: Projections, at: str, layer: int) -> Mixer:
        block, operators = super()._attention(projections, at, layer), projections.operators
        rope = self._ropes.of_layer[layer]
        assert isinstance(block, AttentionBlock)
        assert rope is not None, "all layers have RoPE"

        def norm(name: str) -> Norm:
            size = (projections.shard.shape.head_dim,)
            weight = projections.weights.tensor(TensorSlice(f"{at}.self_attn.{name}.weight", size))
            return operators.rms_norm(weight, self._settings.eps)

        return RopeThenNorm(
            replace(block, rope=None),
            rope,
            norm("query_layernorm"),
            norm("key_layernorm"),
            operators.apply_rope_,
        )
