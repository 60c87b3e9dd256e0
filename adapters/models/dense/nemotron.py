"""Nemotron: LayerNorm whose weights lack 1, RoPE on half of each head, and an MLP without a gate,
whose activation is the square of ReLU. Arcee is Llama with that MLP."""

from collections.abc import Mapping

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import FamilyTraits
from adapters.models.dense.llama import Llama
from engine.worker.model.layers import FeedForward, Mlp
from engine.worker.ports import ModelShape


class UngatedMlp(RotaryFamily):
    """A family whose MLPs have no gate."""

    defaults: Mapping[str, object] = {"hidden_act": "relu2"}

    def _mlp(self, projections: Projections, at: str) -> FeedForward:
        inner, has_bias = projections.shard.inner, self._traits.mlp_bias
        return Mlp(
            up=projections.from_hidden({f"{at}.up_proj": inner}, has_bias=has_bias),
            down=projections.to_hidden(f"{at}.down_proj", inner, has_bias=has_bias),
            activation=projections.operators.activation(self._settings.activation, is_gated=False),
        )


class Arcee(UngatedMlp, Llama):
    """`ArceeForCausalLM` (AFM)."""


class Nemotron(UngatedMlp):
    """`NemotronForCausalLM` (Nemotron 4, Minitron)."""

    eps_field = "norm_eps"
    defaults: Mapping[str, object] = {**UngatedMlp.defaults, "norm_eps": 1e-5}

    def traits(self, fields: Fields) -> FamilyTraits:
        has_bias = fields.flag("attention_bias", False)
        return FamilyTraits(
            qkv_bias=has_bias,
            out_bias=has_bias,
            mlp_bias=fields.flag("mlp_bias", False),
            has_layer_norm=True,
            norm_offset=1.0,
        )

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        source = read_rope(fields, shape.head_dim, shape.max_positions, share=0.5)
        return LayerRopes.same(source, shape.num_layers)
