"""Dense families with a mixture of experts in every layer, and what is different in each.

Mixtral is Mistral, OLMoE has norms over all heads of q and of k, gpt-oss attention sinks and
windows in every other layer. Qwen 1.5, 2 and 3 are the dense ones. In Hunyuan (A13B) an MLP beside
the experts computes all tokens; in ERNIE 4.5 experts are chosen by their probability and a bias,
shared ones compute all tokens, and layers for multi-token prediction are not loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from adapters.models.base.traits import FULL, SLIDING, FamilyTraits, layer_types
from adapters.models.dense.hunyuan import HunyuanDense
from adapters.models.dense.llama import Ernie45, Mistral
from adapters.models.dense.qwen import Qwen2, Qwen3
from adapters.models.mixtures.experts import DenseFirst, ExpertFamily, ExpertNames
from engine.errors import StartupError
from engine.worker.ports import AttentionOptions, ModelShape, Operators, Routing, TensorSlice


class Mixtral(ExpertFamily, Mistral):
    """The probabilities of the chosen experts are divided by their sum."""

    names = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")

    def routing(self, fields: Fields) -> Routing:
        return Routing(fields.integer("num_experts_per_tok", 2), renormalizes=True)


class Olmoe(ExpertFamily):
    """Clipping of q, k and v is not supported; no published checkpoint uses it."""

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("clip_qkv")
        has_bias = fields.flag("attention_bias", False)
        return FamilyTraits(qkv_bias=has_bias, out_bias=has_bias, qk_norm="width")

    def routing(self, fields: Fields) -> Routing:
        return Routing(
            fields.integer("num_experts_per_tok", 8),
            renormalizes=fields.flag("norm_topk_prob", False),
        )


class SparseQwen(ExpertFamily):
    """The fields that all of Qwen's mixtures have."""

    def inner_size(self, fields: Fields) -> int:
        return fields.integer("moe_intermediate_size")

    def routing(self, fields: Fields) -> Routing:
        fields.reject_unless("decoder_sparse_step", 1)
        fields.reject_unless("mlp_only_layers", [])
        return Routing(
            fields.integer("num_experts_per_tok", 8),
            renormalizes=fields.flag("norm_topk_prob", False),
        )


class SharingQwen(SparseQwen):
    """A Qwen mixture with an expert that all tokens use."""

    def shared_size(self, fields: Fields) -> int:
        return fields.integer("shared_expert_intermediate_size")


class Qwen3Moe(SparseQwen, Qwen3):
    """Layers with a dense MLP between the sparse ones are not supported."""


class Qwen2Moe(SharingQwen, Qwen2):
    """Layers with a dense MLP between the sparse ones are not supported."""


class GptOss(ExpertFamily):
    """All linears but the head have biases; experts have gpt-oss' own gate."""

    names = ExpertNames(router="router", has_biases=True)

    def traits(self, fields: Fields) -> FamilyTraits:
        has_bias = fields.flag("attention_bias", True)
        return FamilyTraits(qkv_bias=has_bias, out_bias=has_bias)

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        default = [(SLIDING, FULL)[layer % 2] for layer in range(num_layers)]
        types = layer_types(fields, num_layers, default)
        window = fields.integer("sliding_window", 128)
        return tuple(
            AttentionOptions(window if each == SLIDING else None, has_sinks=True) for each in types
        )

    def sized(self, fields: Fields, shape: ModelShape) -> ModelShape:
        self._alpha = fields.number("swiglu_alpha", 1.702)
        self._limit = fields.number("swiglu_limit", 7.0)
        return super().sized(fields, shape)

    def routing(self, fields: Fields) -> Routing:
        return Routing(fields.integer("num_experts_per_tok", 4), renormalizes=True)

    def activation(self, operators: Operators) -> Callable[[Tensor], Tensor]:
        return operators.clamped_swiglu(self._alpha, self._limit)


class HunyuanMoe(ExpertFamily, HunyuanDense):
    """`HunYuanMoEV1ForCausalLM`; all layers have equally many experts of one size."""

    names = ExpertNames(router="gate.wg", shared="shared_mlp", gates_shared=False)

    def num_experts(self, fields: Fields) -> int:
        return fields.integer("num_experts")

    def inner_size(self, fields: Fields) -> int:
        name = "moe_intermediate_size"
        return (
            fields.integer("intermediate_size") if fields.get(name) is None else same(fields, name)
        )

    def shared_size(self, fields: Fields) -> int:
        name = "num_shared_expert"
        return self.inner_size(fields) * (1 if fields.get(name) is None else same(fields, name))

    def routing(self, fields: Fields) -> Routing:
        fields.reject_unless("use_cla", False)
        return Routing(same(fields, "moe_topk"), renormalizes=True)


def same(fields: Fields, name: str) -> int:
    """A positive integer, which config.json may have once for each layer."""
    value = fields.get(name)
    if not isinstance(value, list):
        return fields.integer(name)
    if len(set(map(str, value))) != 1:
        raise StartupError(f"{fields.where}: {name}={value} differs between layers")
    return Fields({name: value[0]}, fields.where).integer(name)


class Ernie45Moe(Ernie45, DenseFirst):
    """`Ernie4_5_MoeForCausalLM`: from some layer on all have experts."""

    names = ExpertNames(shared="shared_experts", gates_shared=False)
    ignored_weights = (*Ernie45.ignored_weights, "model.mtp_*")
    defaults: Mapping[str, object] = {
        **Ernie45.defaults,
        "moe_intermediate_size": 1536,
        "moe_num_experts": 64,
    }

    def inner_size(self, fields: Fields) -> int:
        return fields.integer("moe_intermediate_size")

    def num_experts(self, fields: Fields) -> int:
        return fields.integer("moe_num_experts")

    def shared_size(self, fields: Fields) -> int:
        count = fields.count("moe_num_shared_experts", 2)
        return count * fields.integer("moe_intermediate_size")

    def routing(self, fields: Fields) -> Routing:
        fields.reject_unless("use_bias", False)
        fields.reject_unless("moe_layer_interval", 1)
        fields.reject_unless("moe_layer_end_index", -1, fields.layers("num_hidden_layers") - 1)
        self._num_dense = fields.count("moe_layer_start_index", 1)
        self._dense_size = fields.integer("intermediate_size")
        return Routing(fields.integer("moe_k", 6), renormalizes=True)

    def layer_routing(self, projections: Projections, at: str) -> Routing:
        count = self.shape.experts.num_experts if self.shape.experts else 0
        part = TensorSlice(f"{at}.moe_statics.e_score_correction_bias", (1, count))
        bias = projections.weights.tensor(part)[0].float().contiguous()
        return replace(self._routing, bias=projections.operators.constant(bias))
