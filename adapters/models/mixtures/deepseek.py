"""DeepSeek V2, V3 and R1, Moonlight (V3's architecture) and GLM-4.7-Flash."""

from adapters.models.base.fields import Fields
from adapters.models.base.latent_attention import LatentFamily
from adapters.models.mixtures.glm4_moe import Glm4Moe
from engine.errors import StartupError
from engine.worker.ports import ExpertGroups, Routing


class DeepseekV2(LatentFamily, Glm4Moe):
    """`DeepseekV2ForCausalLM`; the experts of V2-Lite are in no groups."""

    methods: tuple[str, ...] = ("greedy", "group_limited_greedy")  # how experts may be chosen
    renormalizes = False
    has_sigmoids = False
    num_best = 1

    def routing(self, fields: Fields) -> Routing:
        fields.reject_unless("moe_layer_freq", 1)
        fields.reject_unless("topk_method", *self.methods)
        return super().routing(fields)

    def groups(self, fields: Fields, top_k: int) -> ExpertGroups | None:
        is_greedy = (fields.get("topk_method") or self.methods[0]) == "greedy"
        return None if is_greedy else super().groups(fields, top_k)


class DeepseekV3(DeepseekV2):
    """`DeepseekV3ForCausalLM`: experts are chosen by sigmoids and a bias."""

    methods = ("noaux_tc",)
    renormalizes = True
    has_sigmoids = True
    num_best = 2


class Glm4MoeLite(DeepseekV3):
    """`Glm4MoeLiteForCausalLM` (GLM-4.7-Flash): the dense layers are those of `mlp_layer_types`."""

    def routing(self, fields: Fields) -> Routing:
        fields.reject_unless("rope_interleave", True)
        routing = super().routing(fields)
        types = fields.get("mlp_layer_types")
        if types is None:
            return routing
        num_dense = types.count("dense") if isinstance(types, list) else 0
        num_layers = fields.layers("num_hidden_layers")
        if types != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
            raise StartupError(
                f"{fields.where}: mlp_layer_types is {types!r}, expected 'dense' for the first "
                "layers and 'sparse' for the others"
            )
        self._num_dense = num_dense
        return routing
