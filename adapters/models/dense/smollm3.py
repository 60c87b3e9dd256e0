"""SmolLM 3: Llama in which every fourth layer has no RoPE (NoPE, arXiv:2305.19466)."""

from collections.abc import Mapping

from adapters.models.base.fields import Fields
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.traits import FULL
from adapters.models.dense.llama import Llama
from engine.errors import StartupError
from engine.worker.ports import AttentionOptions, ModelShape


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
