"""Sizes of a model and of the largest step it has to run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Each layer's MLP is a mixture of experts, of which each token uses `top_k`."""

    num_experts: int
    top_k: int
    parameters: int  # matrix elements of one expert


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a checkpoint that a worker needs before it reads any weight.

    `inner_size` is the width of the MLP, or of one expert; `layer_parameters` is the number of
    matrix elements in one layer, with all experts. `window` is the sliding window of attention in
    tokens, counting the token itself; None means full attention.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    inner_size: int
    layer_parameters: int
    vocab_size: int
    max_positions: int
    window: int | None = None
    experts: ExpertShape | None = None

    @property
    def idle_parameters(self) -> int:
        """Matrix elements of the experts that one token does not use, in all layers."""
        if self.experts is None:
            return 0
        idle = self.experts.num_experts - self.experts.top_k
        return self.num_layers * idle * self.experts.parameters


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that a worker has to run; buffers allocated once are sized for it."""

    max_requests: int
    max_tokens: int
    max_model_len: int
