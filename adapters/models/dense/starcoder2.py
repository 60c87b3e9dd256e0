"""StarCoder 2: LayerNorm, biases, and an MLP without a gate."""

from collections.abc import Mapping

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from adapters.models.base.traits import FamilyTraits
from adapters.models.dense.mistral import Mistral
from engine.worker.model.layers import FeedForward, Mlp


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
