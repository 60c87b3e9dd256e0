"""Qwen 2 MoE (and 1.5) and Qwen 3 MoE: Qwen 2 and 3 with a mixture of experts in every layer."""

from adapters.models.base.fields import Fields
from adapters.models.dense.qwen import Qwen2, Qwen3
from adapters.models.mixtures.experts import ExpertFamily
from engine.worker.ports import Routing


class SparseQwen(ExpertFamily):
    """The fields that all of Qwen's mixtures have."""

    def inner_size(self, fields: Fields) -> int:
        return fields.integer("moe_intermediate_size")

    def routing(self, fields: Fields) -> Routing:
        fields.reject_unless("decoder_sparse_step", 1)
        fields.reject_unless("mlp_only_layers", [])
        return Routing(
            fields.integer("num_experts_per_tok", 8),
            renormalizes=fields.flag("norm_topk_prob", False),
        )


class SharingQwen(SparseQwen):
    """A Qwen mixture with an expert that all tokens use."""

    def shared_size(self, fields: Fields) -> int:
        return fields.integer("shared_expert_intermediate_size")


class Qwen3Moe(SparseQwen, Qwen3):
    """Layers with a dense MLP between the sparse ones are not supported."""


class Qwen2Moe(SharingQwen, Qwen2):
    """Layers with a dense MLP between the sparse ones are not supported."""
