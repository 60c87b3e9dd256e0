"""Attention whose keys and values come from one latent vector per token (MLA, arXiv:2405.04434).

Keys and values are expanded before they are cached, as wide as a key, so KV takes the memory of
attention with as many KV heads as heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import FamilyTraits
from engine.errors import StartupError
from engine.worker.model.layers import Mixer
from engine.worker.model.rope import yarn_magnitude
from engine.worker.ports import (
    AttentionOptions,
    Linear,
    ModelShape,
    Norm,
    RankPart,
    StepContext,
    TensorSlice,
)

LATENT_EPS = 1e-6  # the norms of latent vectors use it, whatever config.json says


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Widths of a head's key without and with RoPE and of its value, and of the latent vectors."""

    plain: int
    turned: int
    value: int
    latent: int
    q_latent: int  # 0: queries have no latent vector

    @property
    def key(self) -> int:
        return self.plain + self.turned


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA with expanded keys and values. The dimensions with RoPE come first in a cached head, and
    are put into halves where RoPE pairs neighbours in the checkpoint."""

    layer: int
    num_heads: int
    sizes: LatentSizes
    rope: int
    inputs: Linear  # to q or its latent vector, the latent vector of k and v, and k with RoPE
    kv_norm: Norm
    kv: Linear
    out: Linear
    pairs_neighbours: bool
    q_norm: Norm | None = None
    q: Linear | None = None

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        sizes, heads = self.sizes, self.num_heads
        y = self.inputs(x)
        q_width = y.shape[1] - sizes.latent - sizes.turned
        q, latent, k_turned = torch.split(y, [q_width, sizes.latent, sizes.turned], dim=1)
        if self.q is not None and self.q_norm is not None:
            q = self.q(self.q_norm(q.contiguous()))
        q = q.reshape(-1, heads, sizes.key)
        kv = self.kv(self.kv_norm(latent.contiguous()))
        kv = kv.view(-1, heads, sizes.plain + sizes.value)
        turned = slice(0, sizes.turned)
        qkv = y.new_zeros(len(x), 3 * heads, sizes.key)
        own_q, own_k, own_v = torch.split(qkv, heads, dim=1)
        own_q[..., turned] = self._turned(q[..., sizes.plain :])
        own_q[..., sizes.turned :] = q[..., : sizes.plain]
        own_k[..., turned] = self._turned(k_turned)[:, None]
        own_k[..., sizes.turned :] = kv[..., : sizes.plain]
        own_v[..., : sizes.value] = kv[..., sizes.plain :]
        mixed = context.attention.run(self.layer, own_q, own_k, own_v, context.ropes[self.rope])
        values = mixed.view(len(x), heads, sizes.key)[..., : sizes.value]
        return values.reshape(len(x), heads * sizes.value)

    def _turned(self, part: Tensor) -> Tensor:
        """Dimensions with RoPE, in the engine's order."""
        if not self.pairs_neighbours:
            return part
        return torch.cat((part[..., ::2], part[..., 1::2]), dim=-1)


class LatentFamily(RotaryFamily):
    """A `RotaryFamily` with this attention."""

    pairs_neighbours = True

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("attention_bias", False)
        fields.reject_unless("mlp_bias", False)
        return FamilyTraits()

    def head_dim(self, fields: Fields, default: int) -> int:
        self._sizes = LatentSizes(
            plain=fields.integer("qk_nope_head_dim", 128),
            turned=fields.integer("qk_rope_head_dim", 64),
            value=fields.integer("v_head_dim", 128),
            latent=fields.integer("kv_lora_rank", 512),
            q_latent=fields.count("q_lora_rank", 0),
        )
        if self._sizes.value > self._sizes.key:
            raise StartupError(
                f"{fields.where}: v_head_dim={self._sizes.value} is more than the key's "
                f"{self._sizes.key} dimensions"
            )
        fields.reject_unless("num_key_value_heads", fields.integer("num_attention_heads"))
        return self._sizes.key

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        rope = fields.child("rope_parameters") or fields.child("rope_scaling") or Fields({})
        magnitude = 1.0
        if rope.get("mscale_all_dim"):
            magnitude = yarn_magnitude(rope.number("factor"), rope.number("mscale_all_dim"))
        scale = self._sizes.key**-0.5 * magnitude**2
        return (AttentionOptions(scale=scale),) * num_layers

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        source = read_rope(fields, self._sizes.turned, shape.max_positions)
        return LayerRopes.same(source, shape.num_layers)

    def _attention(self, projections: Projections, at: str, layer: int) -> Mixer:
        shard, operators, sizes = projections.shard, projections.operators, self._sizes
        at, heads, rope = f"{at}.self_attn", shard.heads, self._ropes.of_layer[layer]
        assert rope is not None, "all layers have RoPE"

        def up(name: str, width: int, inputs: int) -> Linear:
            part = heads.times(width)
            weight = TensorSlice(f"{at}.{name}.weight", (part.size, inputs), rows=part.run)
            return operators.linear([projections.weights.weight(weight)], None)

        def norm(name: str, width: int) -> Norm:
            weight = projections.weights.tensor(TensorSlice(f"{at}.{name}.weight", (width,)))
            return operators.rms_norm(weight, LATENT_EPS)

        own_q = (f"{at}.q_proj", heads.times(sizes.key))
        if sizes.q_latent:
            own_q = (f"{at}.q_a_proj", RankPart.whole(sizes.q_latent))
        latent = (f"{at}.kv_a_proj_with_mqa", RankPart.whole(sizes.latent + sizes.turned))
        return LatentAttention(
            layer=layer - shard.span.start,
            num_heads=len(heads.run),
            sizes=sizes,
            rope=rope,
            inputs=projections.from_hidden([own_q, latent], has_bias=False),
            kv_norm=norm("kv_a_layernorm", sizes.latent),
            kv=up("kv_b_proj", sizes.plain + sizes.value, sizes.latent),
            out=projections.to_hidden(f"{at}.o_proj", heads.times(sizes.value), has_bias=False),
            pairs_neighbours=self.pairs_neighbours,
            q_norm=norm("q_a_layernorm", sizes.q_latent) if sizes.q_latent else None,
            q=up("q_b_proj", sizes.key, sizes.q_latent) if sizes.q_latent else None,
        )
