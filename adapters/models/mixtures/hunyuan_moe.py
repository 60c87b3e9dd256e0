"""Hunyuan with experts (A13B): each layer has some, and an MLP that computes all tokens."""

from adapters.models.base.fields import Fields
from adapters.models.dense.hunyuan import HunyuanDense
from adapters.models.mixtures.experts import ExpertFamily, ExpertNames
from engine.errors import StartupError
from engine.worker.ports import Routing


class HunyuanMoe(ExpertFamily, HunyuanDense):
    """`HunYuanMoEV1ForCausalLM`; all layers have equally many experts of one size."""

    names = ExpertNames(router="gate.wg", shared="shared_mlp", gates_shared=False)

    def num_experts(self, fields: Fields) -> int:
        return fields.integer("num_experts")

    def inner_size(self, fields: Fields) -> int:
        name = "moe_intermediate_size"
        return (
            fields.integer("intermediate_size") if fields.get(name) is None else same(fields, name)
        )

    def shared_size(self, fields: Fields) -> int:
        name = "num_shared_expert"
        return self.inner_size(fields) * (1 if fields.get(name) is None else same(fields, name))

    def routing(self, fields: Fields) -> Routing:
        fields.reject_unless("use_cla", False)
        return Routing(same(fields, "moe_topk"), renormalizes=True)


def same(fields: Fields, name: str) -> int:
    """A positive integer, which config.json may have once for each layer."""
    value = fields.get(name)
    if not isinstance(value, list):
        return fields.integer(name)
    if len(set(map(str, value))) != 1:
        raise StartupError(f"{fields.where}: {name}={value} differs between layers")
    return Fields({name: value[0]}, fields.where).integer(name)
