"""Attention whose keys and values come from one latent vector per token (MLA, arXiv:2405.04434).

Section 2.1.2 of the paper: a head's key without RoPE is a product with the latent vector, so the
query can be multiplied by that matrix instead, and the mixed latent vectors by the one of the
values. Then all heads have one key, of which the value is a part, and nothing else is cached:

    cached      k with RoPE (64) | normed latent vector (512)
    a query     q with RoPE (64) | q without RoPE, times its head's key matrix (512)
    a result    mixed latent vectors (512), times its head's value matrix

Prompts are computed in the same form as decodes, so that a token has the same bits in both. Their
scores and sums take (576 + 512) / (192 + 128) = 3.4 times the products of attention with a key and
a value for each head, in DeepSeek's sizes.

Where the attention of a device does not take them (on a GPU other sizes than 512 + 64, fp8,
`--batch-invariant`), keys and values of each head are cached (`ModelShape.expanded`): KV takes the
memory of attention with as many KV heads as heads, each as wide as a key.
"""

from dataclasses import dataclass, replace

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
    HeadLinear,
    HeadOperators,
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

    @property
    def cached(self) -> int:
        return self.turned + self.latent


@dataclass(frozen=True, slots=True)
class LatentInputs:
    """The linears before the attention of one layer. RoPE pairs neighbours in the checkpoint if it
    has `pairs`, so many of them, and halves in the engine."""

    linear: Linear  # to q or its latent vector, k with RoPE, and the latent vector of k and v
    kv_norm: Norm
    q_norm: Norm | None
    q: Linear | None
    pairs: int

    def queries(self, q: Tensor, heads: int, sizes: LatentSizes) -> Tensor:
        """All heads of q, `[tokens, heads, key]`, from the first outputs of the linear."""
        if self.q is not None and self.q_norm is not None:
            q = self.q(self.q_norm(q))
        return q.view(-1, heads, sizes.key)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA over cached latent vectors."""

    layer: int
    num_heads: int
    sizes: LatentSizes
    rope: int
    inputs: LatentInputs
    keys: HeadLinear  # from q without RoPE to what the latent vector is multiplied by
    values: HeadLinear  # from a mixed latent vector
    out: Linear
    of_heads: HeadOperators

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        sizes, heads, pairs = self.sizes, self.num_heads, self.inputs.pairs
        rows, turned = len(x), sizes.turned
        y = self.inputs.linear(x)
        qk = self.of_heads.empty("latent q and k", y, (rows, heads + 1, sizes.cached))
        own_q, own_k = torch.split(qk, [heads, 1], dim=1)
        self.of_heads.copy(y[:, -sizes.cached :].view(rows, 1, sizes.cached), own_k, pairs)
        self.inputs.kv_norm.apply_(own_k[..., turned:])
        q = self.inputs.queries(y[:, : -sizes.cached], heads, sizes)
        self.of_heads.copy(q[..., sizes.plain :], own_q[..., :turned], pairs)
        self.keys(q[..., : sizes.plain], own_q[..., turned:])
        rope = context.ropes[self.rope]
        mixed = context.attention.run(self.layer, own_q, own_k, None, rope)
        values = self.of_heads.empty("values of heads", mixed, (rows, heads, sizes.value))
        self.values(mixed, values)
        return values.view(rows, heads * sizes.value)


@dataclass(frozen=True, slots=True)
class ExpandedAttention:
    """MLA with keys and values of each head. The dimensions with RoPE come first in a head."""

    layer: int
    num_heads: int
    sizes: LatentSizes
    rope: int
    inputs: LatentInputs
    kv: Linear
    out: Linear
    of_heads: HeadOperators

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        sizes, heads, pairs = self.sizes, self.num_heads, self.inputs.pairs
        y = self.inputs.linear(x)
        q = self.inputs.queries(y[:, : -sizes.cached].contiguous(), heads, sizes)
        k_turned, latent = torch.split(y[:, -sizes.cached :], [sizes.turned, sizes.latent], dim=1)
        kv = self.kv(self.inputs.kv_norm(latent.contiguous()))
        kv = kv.view(-1, heads, sizes.plain + sizes.value)
        qkv = y.new_zeros(len(x), 3 * heads, sizes.key)
        own_q, own_k, own_v = torch.split(qkv, heads, dim=1)
        self.of_heads.copy(q[..., sizes.plain :], own_q[..., : sizes.turned], pairs)
        own_q[..., sizes.turned :] = q[..., : sizes.plain]
        own_k[..., sizes.turned :] = kv[..., : sizes.plain]
        shared = k_turned[:, None].expand(-1, heads, -1)
        self.of_heads.copy(shared, own_k[..., : sizes.turned], pairs)
        own_v[..., : sizes.value] = kv[..., sizes.plain :]
        mixed = context.attention.run(self.layer, own_q, own_k, own_v, context.ropes[self.rope])
        values = mixed.view(len(x), heads, sizes.key)[..., : sizes.value]
        return values.reshape(len(x), heads * sizes.value)


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

    def sized(self, fields: Fields, shape: ModelShape) -> ModelShape:
        """The shape with one KV head, whose values are the latent vectors."""
        sizes = self._sizes
        return replace(
            super().sized(fields, shape),
            num_kv_heads=1,
            head_dim=sizes.cached,
            values_from=sizes.turned,
            expanded_dim=sizes.key,
        )

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
        inputs, number = self._inputs(projections, at), layer - shard.span.start
        width = heads.times(sizes.value)
        out = projections.to_hidden(f"{at}.o_proj", width, has_bias=False)
        if shard.shape.values_from is None:
            kv = _up(projections, f"{at}.kv_b_proj", sizes.plain + sizes.value, sizes.latent)
            of_heads = operators.heads
            return ExpandedAttention(number, len(heads.run), sizes, rope, inputs, kv, out, of_heads)
        return LatentAttention(
            layer=number,
            num_heads=len(heads.run),
            sizes=sizes,
            rope=rope,
            inputs=inputs,
            keys=self._of_heads(projections, f"{at}.kv_b_proj.weight", is_key=True),
            values=self._of_heads(projections, f"{at}.kv_b_proj.weight", is_key=False),
            out=out,
            of_heads=operators.heads,
        )

    def _inputs(self, projections: Projections, at: str) -> LatentInputs:
        """The linears before the attention; the rows for k with RoPE come first."""
        sizes, heads = self._sizes, projections.shard.heads
        own_q = (f"{at}.q_proj", heads.times(sizes.key))
        if sizes.q_latent:
            own_q = (f"{at}.q_a_proj", RankPart.whole(sizes.q_latent))
        kv, size = f"{at}.kv_a_proj_with_mqa", sizes.cached
        turned = (kv, RankPart(size, range(sizes.latent, size)))
        latent = (kv, RankPart(size, range(sizes.latent)))

        def norm(name: str, width: int) -> Norm:
            part = TensorSlice(f"{at}.{name}.weight", (width,))
            return projections.operators.rms_norm(projections.weights.tensor(part), LATENT_EPS)

        up = f"{at}.q_b_proj"
        return LatentInputs(
            linear=projections.from_hidden([own_q, turned, latent], has_bias=False),
            kv_norm=norm("kv_a_layernorm", sizes.latent),
            q_norm=norm("q_a_layernorm", sizes.q_latent) if sizes.q_latent else None,
            q=_up(projections, up, sizes.key, sizes.q_latent) if sizes.q_latent else None,
            pairs=sizes.turned // 2 if self.pairs_neighbours else 0,
        )

    def _of_heads(self, projections: Projections, name: str, *, is_key: bool) -> HeadLinear:
        """The matrices of this rank's heads that keys are made by, transposed, or those of
        values."""
        sizes, heads = self._sizes, projections.shard.heads
        both, rows = sizes.plain + sizes.value, []
        for head in heads.run:
            first = head * both + (0 if is_key else sizes.plain)
            rows.append(range(first, first + (sizes.plain if is_key else sizes.value)))
        whole = heads.size * both, sizes.latent
        parts = [
            TensorSlice(name, whole[::-1], columns=run, is_transposed=True, as_floats=True)
            if is_key
            else TensorSlice(name, whole, rows=run)
            for run in rows
        ]
        return projections.operators.heads.linear([projections.weights.weight(p) for p in parts])


def _up(projections: Projections, name: str, width: int, inputs: int) -> Linear:
    """A linear from a latent vector to `width` outputs of each of this rank's heads."""
    part = projections.shard.heads.times(width)
    weight = TensorSlice(f"{name}.weight", (part.size, inputs), rows=part.run)
    return projections.operators.linear([projections.weights.weight(weight)], None)
