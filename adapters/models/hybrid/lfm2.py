"""LFM2, dense or with experts: short convolutions, and attention with norms of q and k."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Fused, Projections
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import FULL, FamilyTraits, LinearNames, NormNames
from adapters.models.mixtures.experts import DenseFirst, ExpertNames
from engine.errors import StartupError
from engine.worker.model.layers import Mixer
from engine.worker.model.mixers import RecurrentMixer
from engine.worker.ports import ConvShape, ConvWeights, ModelShape, Routing, TensorSlice

CONV = "conv"


class Lfm2(RotaryFamily):
    """`Lfm2ForCausalLM`."""

    defaults: Mapping[str, object] = {"tie_word_embeddings": True, "rope_theta": 1000000.0}
    eps_field = "norm_eps"

    def __init__(self, config: Mapping[str, object]) -> None:
        names = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
        super().__init__({names.get(name, name): value for name, value in config.items()})

    def traits(self, fields: Fields) -> FamilyTraits:
        self._has_bias = fields.flag("conv_bias", False)
        return FamilyTraits(
            qk_norm="head",
            norms=NormNames("operator_norm", "ffn_norm"),
            names=LinearNames(
                *("embedding_norm", "q_layernorm", "k_layernorm", "out_proj"),
                *("feed_forward", "w1", "w3", "w2"),
            ),
        )

    def inner_size(self, fields: Fields) -> int:
        inner = fields.integer("intermediate_size")
        if not fields.flag("block_auto_adjust_ff_dim", True):
            return inner
        multiple = fields.integer("block_multiple_of", 256)
        inner = int(fields.number("block_ffn_dim_multiplier", 1.0) * (2 * inner // 3))
        return -(-inner // multiple) * multiple

    def sized(self, fields: Fields, shape: ModelShape) -> ModelShape:
        shape = super().sized(fields, shape)
        conv = ConvShape(shape.hidden_size, fields.integer("conv_L_cache", 3))
        types = _layer_types(fields, shape.num_layers)
        return replace(shape, recurrent=tuple(conv if each == CONV else None for each in types))

    def _attention(self, projections: Projections, at: str, layer: int) -> Mixer:
        shard, weights = projections.shard, projections.weights
        whole = shard.shape.recurrent[layer]
        if not isinstance(whole, ConvShape):
            return super()._attention(projections, at, layer)
        width, has_bias, at = shard.even(whole.channels), self._has_bias, f"{at}.conv"
        sizes = (whole.channels, 1, whole.kernel)
        conv = weights.tensor(TensorSlice(f"{at}.conv.weight", sizes, rows=width.run))[:, 0].float()
        bias = torch.zeros_like(conv[:, 0])
        if has_bias:
            bias = weights.tensor(TensorSlice(f"{at}.conv.bias", sizes[:1], rows=width.run)).float()
        own = ConvWeights(whole.of_rank(shard.num_ranks), conv, bias)
        return RecurrentMixer(
            layer=shard.number_of(layer),
            inputs=projections.from_hidden(Fused(f"{at}.in_proj", (width,) * 3), has_bias=has_bias),
            recurrence=projections.operators.recurrence(own),
            out=projections.to_hidden(f"{at}.out_proj", width, has_bias=has_bias),
        )


class Lfm2Moe(Lfm2, DenseFirst):
    """`Lfm2MoeForCausalLM`. transformers adds 1e-6 to the sum by which it divides probabilities;
    here nothing is added."""

    names = ExpertNames(block="feed_forward", gate="w1", up="w3", down="w2")
    bias_name = "expert_bias"

    def inner_size(self, fields: Fields) -> int:
        return fields.integer("moe_intermediate_size")

    def routing(self, fields: Fields) -> Routing:
        self._num_dense = fields.count("num_dense_layers", 2)
        self._dense_size = fields.integer("intermediate_size")
        factor = fields.number("routed_scaling_factor", 1.0)
        return Routing(
            fields.integer("num_experts_per_tok", 4),
            renormalizes=fields.flag("norm_topk_prob", True),
            scales=torch.full((self.num_experts(fields),), factor),
            has_sigmoids=True,
        )


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    """`layer_types` of config.json, or attention in the layers `full_attn_idxs` (default: all)."""
    types = fields.get("layer_types")
    if types is None:
        full = fields.get("full_attn_idxs")
        full = range(num_layers) if full is None else full
        if not isinstance(full, list | range):
            raise StartupError(f"{fields.where}: full_attn_idxs is {full!r}, expected a list")
        types = [FULL if layer in full else CONV for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or {*types} - {FULL, CONV}:
        raise StartupError(
            f"{fields.where}: layer_types is {types!r}; expected {num_layers} of {FULL!r}, {CONV!r}"
        )
    return types
