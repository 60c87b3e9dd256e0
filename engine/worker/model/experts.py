"""The mixture of experts that takes the place of an MLP, and its experts in plain torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.worker.ports import AllReduce, ExpertGroups, Experts, Linear, Norm, Routing


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """The experts of each row and their weights in float32, both `[rows, top_k]`."""
    logits = logits.float()
    probabilities = logits.sigmoid() if routing.has_sigmoids else logits.softmax(dim=-1)
    keys = probabilities if routing.bias is None else probabilities + routing.bias
    if routing.groups is not None:
        keys = _of_best_groups(keys, routing.groups)
    ids = keys.topk(routing.top_k, dim=-1).indices
    weights = probabilities.gather(-1, ids)
    if routing.renormalizes:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if routing.scales is not None:
        weights = weights * routing.scales[ids]
    return ids, weights


def _of_best_groups(keys: Tensor, groups: ExpertGroups) -> Tensor:
    """The keys of experts in the chosen groups, and minus infinity for others."""
    grouped = keys.view(len(keys), groups.num_groups, -1)
    scores = grouped.topk(groups.num_best, dim=-1).values.sum(dim=-1)
    is_chosen = torch.zeros_like(scores, dtype=torch.bool)
    is_chosen.scatter_(-1, scores.topk(groups.top_k, dim=-1).indices, True)
    return grouped.masked_fill(~is_chosen[..., None], -torch.inf).view(keys.shape)


@dataclass(frozen=True, slots=True)
class TorchExperts:
    """`Experts` as one linear after another: (gate and up, down) of each expert."""

    linears: Sequence[tuple[Linear, Linear]]
    routing: Routing
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, logits: Tensor, add_to: Tensor | None = None) -> Tensor:
        ids, weights = route(logits, self.routing)
        y = torch.zeros_like(x) if add_to is None else add_to
        for expert, (up, down) in enumerate(self.linears):
            rows, places = torch.where(ids == expert)
            if len(rows):
                found = down(self.activation(up(x[rows])))
                y.index_add_(0, rows, found * weights[rows, places, None].to(found.dtype))
        return y


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that all tokens use beside their experts; with a `gate`, times the sigmoid of a score
    per token."""

    up: Linear  # gate and up
    down: Linear
    activation: Callable[[Tensor], Tensor]
    gate_rows_: Callable[[Tensor, Tensor], None]
    gate: Linear | None = None  # to one score

    def __call__(self, x: Tensor, add_to: Tensor) -> Tensor:
        inner = self.activation(self.up(x))
        if self.gate is not None:
            self.gate_rows_(inner, self.gate(x))
        return self.down(inner, add_to)


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """A mixture of experts; with `all_reduce` each rank has some columns of every expert."""

    router: Linear
    experts: Experts
    all_reduce: AllReduce | None = None
    shared: SharedExpert | None = None

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        logits = self.router(x)
        y = self.experts(x, logits, add_to if self.all_reduce is None else None)
        if self.shared is not None:
            y = self.shared(x, y)
        if self.all_reduce is None:
            return y
        self.all_reduce(y)
        return y if add_to is None else add_to.add_(y)


@dataclass(frozen=True, slots=True)
class MlpBesideExperts:
    """An MLP and a mixture of experts that read the same hidden states, each behind a norm of its
    own; the norms of their results are summed. The router has a norm of its own, too (Gemma 4)."""

    mlp_norm: Norm
    mlp: Callable[[Tensor], Tensor]
    mlp_post_norm: Norm
    router_norm: Norm
    router: Linear
    experts_norm: Norm
    experts: Experts
    experts_post_norm: Norm
    all_reduce: AllReduce | None = None

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """`x` are hidden states without a norm."""
        logits = self.router(self.router_norm(x))
        y = self.experts(self.experts_norm(x), logits)
        if self.all_reduce is not None:
            self.all_reduce(y)
        self.experts_post_norm.apply_(y[:, None])
        y = self.mlp_post_norm(self.mlp(self.mlp_norm(x)), y)
        return y if add_to is None else add_to.add_(y)
