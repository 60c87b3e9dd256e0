"""gpt-oss: a mixture of experts in every layer, attention sinks, windows in every other layer."""

from collections.abc import Callable

from torch import Tensor

from adapters.models.base.fields import Fields
from adapters.models.base.traits import FULL, SLIDING, FamilyTraits, layer_types
from adapters.models.mixtures.experts import ExpertFamily, ExpertNames
from engine.worker.ports import AttentionOptions, ModelShape, Operators, Routing


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
