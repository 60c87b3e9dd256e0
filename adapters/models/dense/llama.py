"""Llama 2 and 3, other models of its architecture, and families that differ from it in a few
fields.

Mistral has an optional sliding window over all layers, Seed-OSS biases, Granite 3 and 4 (dense)
multipliers of embeddings, scores, residuals and logits, Phi-3 to Phi-4 fused tensors, partial RoPE
(Phi-4-mini) and LongRoPE, StableLM LayerNorm and RoPE on a quarter of each head. In ERNIE 4.5
(dense) RoPE turns neighbouring dimensions of a head; in SmolLM 3 every fourth layer has none (NoPE,
arXiv:2305.19466). StarCoder 2 has LayerNorm, biases, and an MLP without a gate.
"""

from collections.abc import Mapping
from dataclasses import replace

from adapters.models.base.fields import Fields
from adapters.models.base.paired_rows import PairedRows
from adapters.models.base.projections import Projections
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import FULL, FamilyTraits
from engine.errors import StartupError
from engine.worker.model.layers import Decoder, FeedForward, Mlp
from engine.worker.ports import AttentionOptions, ModelShape, Operators, Shard, WeightSource


class Llama(RotaryFamily):
    """Biases as config.json says; no sliding window."""

    def traits(self, fields: Fields) -> FamilyTraits:
        attention_bias = fields.flag("attention_bias", False)
        return FamilyTraits(
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias", False),
        )


class Mistral(RotaryFamily):
    """If `sliding_window` is null or absent, attention is full."""

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("layer_types", [FULL] * self.shape.num_layers)
        return FamilyTraits()

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        if fields.get("sliding_window") is None:
            return ()
        return (AttentionOptions(window=fields.integer("sliding_window")),) * num_layers


class SeedOss(RotaryFamily):
    """Each group of biases is a field of config.json."""

    def traits(self, fields: Fields) -> FamilyTraits:
        return FamilyTraits(
            qkv_bias=fields.flag("attention_bias", True),
            out_bias=fields.flag("attention_out_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
        )


class Granite(Llama):
    """`attention_multiplier` is the scale of the scores, `logits_scaling` divides the logits."""

    def traits(self, fields: Fields) -> FamilyTraits:
        return replace(
            super().traits(fields),
            residual_scale=fields.number("residual_multiplier", 1.0),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logit_scale=1 / fields.number("logits_scaling", 1.0),
        )

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        super().attention(fields, num_layers)
        return (AttentionOptions(scale=fields.number("attention_multiplier", 1.0)),) * num_layers


class Phi3(RotaryFamily):
    """A sliding window that is no shorter than the context is none."""

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("attention_bias", False)
        return FamilyTraits(is_fused=True)

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        if fields.get("sliding_window") is None:
            return ()
        window = fields.integer("sliding_window")
        if window >= fields.integer("max_position_embeddings"):
            return ()
        return (AttentionOptions(window=window),) * num_layers

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        source = read_rope(fields, shape.head_dim, shape.max_positions)
        return LayerRopes.same(source, shape.num_layers)


class StableLM(RotaryFamily):
    """Checkpoints with parallel residuals or norms of q and k (12B) are not supported."""

    eps_field = "layer_norm_eps"

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("use_parallel_residual", False)
        fields.reject_unless("qk_layernorm", False)
        return FamilyTraits(qkv_bias=fields.flag("use_qkv_bias", False), has_layer_norm=True)

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        source = read_rope(fields, shape.head_dim, shape.max_positions, share=0.25)
        return LayerRopes.same(source, shape.num_layers)


class Ernie45(RotaryFamily):
    """All linears of the layers have biases or none has, as config.json says."""

    defaults: Mapping[str, object] = {"tie_word_embeddings": True, "rope_theta": 500000.0}

    def traits(self, fields: Fields) -> FamilyTraits:
        has_bias = fields.flag("use_bias", False)
        return FamilyTraits(qkv_bias=has_bias, out_bias=has_bias, mlp_bias=has_bias)

    def build(self, weights: WeightSource, shard: Shard, operators: Operators) -> Decoder:
        head_dim = shard.shape.head_dim
        return super().build(PairedRows(weights, head_dim, head_dim), shard, operators)


class SmolLM3(Llama):
    """`no_rope_layers` has 1 for each layer with RoPE and 0 for each without."""

    defaults: Mapping[str, object] = {"tie_word_embeddings": True}

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        fields.reject_unless("use_sliding_window", False)
        fields.reject_unless("layer_types", [FULL] * num_layers)
        return ()

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        period, count = fields.integer("no_rope_layer_interval", 4), shape.num_layers
        found = fields.get("no_rope_layers")
        if found is None:
            found = [int((layer + 1) % period != 0) for layer in range(count)]
        if not isinstance(found, list) or len(found) != count or not {*found} <= {0, 1}:
            raise StartupError(
                f"config.json: no_rope_layers is {found!r}, expected 0 or 1 for {count} layers"
            )
        source = read_rope(fields, shape.head_dim, shape.max_positions, theta=2000000.0)
        return LayerRopes((source,), tuple(0 if has_rope else None for has_rope in found))


class Starcoder2(Mistral):
    """A window, if there is one, is over all layers."""

    eps_field = "norm_epsilon"
    defaults: Mapping[str, object] = {
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
    }

    def traits(self, fields: Fields) -> FamilyTraits:
        has_bias = fields.flag("use_bias", True)
        return FamilyTraits(
            qkv_bias=has_bias, out_bias=has_bias, mlp_bias=has_bias, has_layer_norm=True
        )

    def _mlp(self, projections: Projections, at: str) -> FeedForward:
        inner, has_bias = projections.shard.inner, self._traits.mlp_bias
        return Mlp(
            up=projections.from_hidden({f"{at}.c_fc": inner}, has_bias=has_bias),
            down=projections.to_hidden(f"{at}.c_proj", inner, has_bias=has_bias),
            activation=projections.operators.activation(self._settings.activation, is_gated=False),
        )
