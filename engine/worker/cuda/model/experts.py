"""Mixtures of experts on a GPU: grouped products, or every expert over all rows.

Both have shapes that do not depend on which experts are chosen, so steps can be captured as graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.cuda.model.linears import stacked
from engine.worker.model.experts import route
from engine.worker.ports import ExpertWeights, Linear, Routing, loaded, name_of

GROUPED_CAPABILITY = (9, 0)  # torch's grouped products do not wait for the host from here on
ALIGNMENT = 8  # grouped products need sizes that are multiples of it


def why_not_grouped(
    capability: tuple[int, int], dtype: torch.dtype, weights: str, sizes: Sequence[int]
) -> str:
    """Why grouped products cannot compute experts of these sizes; empty if they can."""
    if dtype is not torch.bfloat16:
        return f"grouped products need --dtype bfloat16, not {name_of(dtype)}"
    if weights in ("int8", "fp8"):
        return f"grouped products need weights in bfloat16, not {weights}"
    if capability < GROUPED_CAPABILITY:
        major, minor = capability
        return (
            f"grouped products need a GPU of compute capability 9.0, this one has {major}.{minor}"
        )
    odd = [size for size in sizes if size % ALIGNMENT]
    if odd:
        return f"grouped products need sizes that are multiples of {ALIGNMENT}, not {odd[0]}"
    return ""


@dataclass(frozen=True, slots=True)
class MaskedExperts:
    """`Experts` in which each expert computes all rows, and counts for those that chose it."""

    linears: Sequence[tuple[Linear, Linear]]  # gate and up, down
    routing: Routing
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, logits: Tensor, add_to: Tensor | None = None) -> Tensor:
        ids, weights = route(logits, self.routing)
        shares = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, ids, weights)
        is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert, (up, down) in enumerate(self.linears):
            column = slice(expert, expert + 1)
            found = down(self.activation(up(x))).float().mul_(shares[:, column])
            total += found.masked_fill_(~is_chosen[:, column], 0.0)
        return total.to(x.dtype) if add_to is None else add_to.add_(total)


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """`Experts` as two grouped products over rows sorted by expert."""

    up: Tensor  # gate and up, [experts, 2 * inner, hidden]
    up_bias: Tensor | None  # [experts, 2 * inner]
    down: Tensor  # [experts, hidden, inner]
    down_bias: Tensor | None  # [experts, hidden]
    routing: Routing
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def of(
        cls,
        experts: Sequence[ExpertWeights],
        routing: Routing,
        activation: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> "GroupedExperts":
        """Copies the weights of all experts into one tensor for each product."""
        up = [stacked([loaded(each.gate), loaded(each.up)], dtype) for each in experts]
        up_bias = [each.up_bias for each in experts if each.up_bias is not None]
        down = [stacked([loaded(each.down)], dtype) for each in experts]
        down_bias = [each.down_bias for each in experts if each.down_bias is not None]
        return cls(
            up=torch.stack(up),
            up_bias=torch.stack(up_bias) if up_bias else None,
            down=torch.stack(down),
            down_bias=torch.stack(down_bias) if down_bias else None,
            routing=routing,
            activation=activation,
        )

    def __call__(self, x: Tensor, logits: Tensor, add_to: Tensor | None = None) -> Tensor:
        ids, weights = route(logits, self.routing)
        rows, top_k = ids.shape
        experts, order = ids.flatten().sort(stable=True)
        numbers = torch.arange(len(self.up), device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
        inner = F.grouped_mm(x[order // top_k], self.up.transpose(1, 2), offs=ends)
        if self.up_bias is not None:
            inner += self.up_bias[experts]
        found = F.grouped_mm(self.activation(inner), self.down.transpose(1, 2), offs=ends)
        if self.down_bias is not None:
            found += self.down_bias[experts]
        by_row = torch.empty_like(found).index_copy_(0, order, found).view(rows, top_k, -1)
        total = (by_row.float() * weights[:, :, None]).sum(dim=1)
        return total.to(x.dtype) if add_to is None else add_to.add_(total)
