"""EXAONE 4: norms of what layers add, and of each head of q and k; the 32B model has windows in
three of four layers, and no RoPE in the others."""

from adapters.models.base.fields import Fields
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import (
    FULL,
    ONLY_POST_NORMS,
    SLIDING,
    FamilyTraits,
    layer_types,
    windowed,
)
from engine.errors import StartupError
from engine.worker.ports import AttentionOptions, ModelShape

LETTERS = {"L": SLIDING, "G": FULL}


class Exaone4(RotaryFamily):
    """Without `sliding_window` all layers have full attention and RoPE."""

    def traits(self, fields: Fields) -> FamilyTraits:
        return FamilyTraits(qk_norm="head", norms=ONLY_POST_NORMS)

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        if fields.get("sliding_window") is None:
            return ()
        return windowed(_types(fields, num_layers), fields.integer("sliding_window"))

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        source = read_rope(fields, shape.head_dim, shape.max_positions)
        if fields.get("sliding_window") is None:
            return LayerRopes.same(source, shape.num_layers)
        types = _types(fields, shape.num_layers)
        return LayerRopes((source,), tuple(0 if each == SLIDING else None for each in types))


def _types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The type of each layer: `layer_types`, or by the letters or the period of
    `sliding_window_pattern`; the last layer of letters has full attention."""
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or not {*pattern} <= LETTERS.keys():
            raise StartupError(
                f"{fields.where}: sliding_window_pattern is {pattern!r}, expected letters L and G"
            )
        letters = (pattern[layer % len(pattern)] for layer in range(num_layers - 1))
        return layer_types(fields, num_layers, [*(LETTERS[each] for each in letters), FULL])
    period = fields.integer("sliding_window_pattern", 4)
    default = [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(num_layers)]
    return layer_types(fields, num_layers, default)
