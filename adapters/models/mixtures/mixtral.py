"""Mixtral: Mistral with a mixture of experts in every layer."""

from adapters.models.base.fields import Fields
from adapters.models.dense.mistral import Mistral
from adapters.models.mixtures.experts import ExpertFamily, ExpertNames
from engine.worker.ports import Routing


class Mixtral(ExpertFamily, Mistral):
    """The probabilities of the chosen experts are divided by their sum."""

    names = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")

    def routing(self, fields: Fields) -> Routing:
        return Routing(fields.integer("num_experts_per_tok", 2), renormalizes=True)
