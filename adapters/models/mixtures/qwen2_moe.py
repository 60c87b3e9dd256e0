"""Qwen 1.5 and 2 MoE: Qwen 2 with a mixture of experts, and one that all tokens use."""

from adapters.models.dense.qwen2 import Qwen2
from adapters.models.mixtures.qwen3_moe import SharingQwen


class Qwen2Moe(SharingQwen, Qwen2):
    """Layers with a dense MLP between the sparse ones are not supported."""
