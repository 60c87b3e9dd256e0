"""OLMo 3: OLMo 2 with a sliding window in three of four layers."""

from adapters.models.base.fields import Fields
from adapters.models.base.rope_fields import LayerRopes, ropes_by_type
from adapters.models.base.traits import every_nth_full, layer_types, windowed
from adapters.models.dense.olmo2 import Olmo2
from engine.worker.ports import AttentionOptions, ModelShape

PERIOD = 4


class Olmo3(Olmo2):
    """RoPE scaling (YaRN) applies to layers with full attention only."""

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        return windowed(self._types(fields, num_layers), fields.integer("sliding_window", 4096))

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        types = self._types(fields, shape.num_layers)
        thetas = dict.fromkeys(types, fields.number("rope_theta", 500000.0))
        return ropes_by_type(fields, shape, types, thetas)

    def _types(self, fields: Fields, num_layers: int) -> tuple[str, ...]:
        return layer_types(fields, num_layers, every_nth_full(num_layers, PERIOD))
