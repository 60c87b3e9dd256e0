"""Granite 4: Mamba 2 in most layers, and in some or all attention, mostly without RoPE; the MLP of
a layer is alone or beside a mixture of experts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Fused, Projections
from adapters.models.base.rope_fields import LayerRopes
from adapters.models.base.traits import FULL, FamilyTraits, LinearNames
from adapters.models.dense.llama import Granite
from adapters.models.hybrid.mamba_hybrid import MambaHybrid
from adapters.models.mixtures.experts import ExpertFamily, ExpertNames
from engine.errors import StartupError
from engine.worker.model.experts import SharedExpert
from engine.worker.ports import ModelShape, Routing, TensorSlice

TYPES = {"mamba": False, "linear_attention": False, "attention": True, FULL: True}


class GraniteHybrid(MambaHybrid, Granite):
    """`GraniteMoeHybridForCausalLM` without experts."""

    def traits(self, fields: Fields) -> FamilyTraits:
        is_fused = not fields.flag("splits_gate_up", False)  # GGUF files do
        names = LinearNames(mlp="shared_mlp", down="output_linear", gate_up="input_linear")
        return replace(super().traits(fields), names=names, has_fused_mlp=is_fused)

    def inner_size(self, fields: Fields) -> int:
        return fields.integer("shared_intermediate_size", 1024)

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        fields.reject_unless("position_embedding_type", "nope", "rope")
        if fields.get("position_embedding_type") == "rope":
            return super().ropes(fields, shape)
        return LayerRopes((), (None,) * shape.num_layers)

    def has_attention(self, fields: Fields, num_layers: int) -> Sequence[bool]:
        types = fields.get("layer_types")
        if not isinstance(types, list) or len(types) != num_layers or {*types} - TYPES.keys():
            raise StartupError(
                f"{fields.where}: layer_types is {types!r}; expected {num_layers} of "
                f"{', '.join(TYPES)}"
            )
        return [TYPES[each] for each in types]


class GraniteMoeHybrid(ExpertFamily, GraniteHybrid):
    """`GraniteMoeHybridForCausalLM` with experts. The probabilities of the chosen ones are divided
    by their sum."""

    names = ExpertNames("block_sparse_moe", "router.layer", gates_shared=False)
    defaults: Mapping[str, object] = {"num_local_experts": 8}

    def inner_size(self, fields: Fields) -> int:
        return fields.integer("intermediate_size")

    def shared_size(self, fields: Fields) -> int:
        return fields.integer("shared_intermediate_size", 1024)

    def routing(self, fields: Fields) -> Routing:
        return Routing(fields.integer("num_experts_per_tok", 2), renormalizes=True)

    def _shared(self, projections: Projections, at: str) -> SharedExpert:
        """`shared_mlp`, which is beside the mixture named `at`."""
        at = f"{at.rpartition('.')[0]}.shared_mlp"
        operators, part = projections.operators, projections.shard.even(self._shared_size)
        parts = [(f"{at}.{name}_proj", part) for name in ("gate", "up")]
        fused = Fused(f"{at}.input_linear", (part, part))
        size = (projections.shard.shape.hidden_size, part.size)
        down = TensorSlice(f"{at}.output_linear.weight", size, columns=part.run)
        return SharedExpert(
            up=projections.from_hidden(
                fused if self._traits.has_fused_mlp else parts, has_bias=False
            ),
            down=operators.linear([projections.weights.weight(down)], None),
            activation=self.activation(operators),
            gate_rows_=operators.gate_rows_,
        )


def granite_hybrid(config: Mapping[str, object]) -> GraniteHybrid:
    """The family of a `GraniteMoeHybridForCausalLM`, which may have no experts."""
    has_none = config.get("num_local_experts") == 0
    return GraniteHybrid(config) if has_none else GraniteMoeHybrid(config)
