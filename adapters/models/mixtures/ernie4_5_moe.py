"""ERNIE 4.5 with experts: they are chosen by their probability and a bias, and shared ones compute
all tokens. Its layers for multi-token prediction are not loaded."""

from collections.abc import Mapping
from dataclasses import replace

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from adapters.models.dense.ernie4_5 import Ernie45
from adapters.models.mixtures.experts import DenseFirst, ExpertNames
from engine.worker.ports import Routing, TensorSlice


class Ernie45Moe(Ernie45, DenseFirst):
    """`Ernie4_5_MoeForCausalLM`: from some layer on all have experts."""

    names = ExpertNames(shared="shared_experts", gates_shared=False)
    ignored_weights = (*Ernie45.ignored_weights, "model.mtp_*")
    defaults: Mapping[str, object] = {
        **Ernie45.defaults,
        "moe_intermediate_size": 1536,
        "moe_num_experts": 64,
    }

    def inner_size(self, fields: Fields) -> int:
        return fields.integer("moe_intermediate_size")

    def num_experts(self, fields: Fields) -> int:
        return fields.integer("moe_num_experts")

    def shared_size(self, fields: Fields) -> int:
        count = fields.count("moe_num_shared_experts", 2)
        return count * fields.integer("moe_intermediate_size")

    def routing(self, fields: Fields) -> Routing:
        fields.reject_unless("use_bias", False)
        fields.reject_unless("moe_layer_interval", 1)
        fields.reject_unless("moe_layer_end_index", -1, fields.layers("num_hidden_layers") - 1)
        self._num_dense = fields.count("moe_layer_start_index", 1)
        self._dense_size = fields.integer("intermediate_size")
        return Routing(fields.integer("moe_k", 6), renormalizes=True)

    def layer_routing(self, projections: Projections, at: str) -> Routing:
        count = self.shape.experts.num_experts if self.shape.experts else 0
        part = TensorSlice(f"{at}.moe_statics.e_score_correction_bias", (1, count))
        bias = projections.weights.tensor(part)[0].float().contiguous()
        return replace(self._routing, bias=projections.operators.constant(bias))
