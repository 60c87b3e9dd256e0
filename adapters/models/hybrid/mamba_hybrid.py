"""What families with Mamba 2 beside attention share, and Bamba."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from adapters.models.base.fields import Fields
from adapters.models.base.mamba import MambaFields
from adapters.models.base.projections import Projections
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import FamilyTraits, LinearNames, NormNames
from adapters.models.dense.llama import Llama
from engine.worker.model.layers import Mixer
from engine.worker.ports import ModelShape


class MambaHybrid(RotaryFamily):
    """A `RotaryFamily` in which some layers have Mamba 2 in place of attention."""

    mamba_name = "mamba"
    _mamba: MambaFields

    @abstractmethod
    def has_attention(self, fields: Fields, num_layers: int) -> Sequence[bool]:
        """Whether each layer has attention. Raises `StartupError`."""
        ...

    def sized(self, fields: Fields, shape: ModelShape) -> ModelShape:
        shape = super().sized(fields, shape)
        has_attention = self.has_attention(fields, shape.num_layers)
        if all(has_attention):
            return shape
        width = self.mamba_width(fields, shape)
        self._mamba = MambaFields.read(fields, width, fields.number(self.eps_field, 1e-6))
        recurrent = tuple(None if each else self._mamba.shape for each in has_attention)
        return replace(shape, recurrent=recurrent)

    def mamba_width(self, fields: Fields, shape: ModelShape) -> int:
        """The width of all heads of Mamba."""
        return fields.integer("mamba_expand", 2) * shape.hidden_size

    def _attention(self, projections: Projections, at: str, layer: int) -> Mixer:
        shard = projections.shard
        if layer in shard.shape.attention_layers:
            return super()._attention(projections, at, layer)
        return self._mamba.layer(projections, f"{at}.{self.mamba_name}", shard.number_of(layer))


class Bamba(MambaHybrid, Llama):
    """`BambaForCausalLM`: RoPE turns half of each head."""

    defaults: Mapping[str, object] = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
    }

    def traits(self, fields: Fields) -> FamilyTraits:
        return replace(
            super().traits(fields),
            norms=NormNames(mlp="pre_ff_layernorm"),
            names=LinearNames(norm="final_layernorm", mlp="feed_forward"),
        )

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        source = read_rope(fields, shape.head_dim, shape.max_positions, share=0.5)
        return LayerRopes.same(source, shape.num_layers)

    def has_attention(self, fields: Fields, num_layers: int) -> Sequence[bool]:
        found = fields.get("attn_layer_indices") or []
        layers = fields.counts("attn_layer_indices", len(found) if isinstance(found, list) else 0)
        return [layer in layers for layer in range(num_layers)]
