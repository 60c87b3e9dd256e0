"""Mixtures of experts on a GPU: grouped products, or every expert over all rows.

Both have shapes that do not depend on which experts are chosen, so steps can be captured as graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.cuda.kernels.reference import FourBitWeight, RowBlocks
from engine.worker.cuda.kernels.tiling import Tiling, expert_tiling
from engine.worker.model.experts import route
from engine.worker.ports import Linear, Routing, name_of

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


@dataclass(frozen=True)
class SortedRows:
    """The expert of each row that the products of experts multiply."""

    experts: Tensor  # [rows], ascending
    ends: Tensor  # int32 [experts], where the rows of each expert end

    @cached_property
    def tiling(self) -> Tiling:
        """How products with 4-bit weights are divided."""
        return expert_tiling(len(self.experts), len(self.ends))

    @cached_property
    def blocks(self) -> RowBlocks:
        """The rows in blocks of that tiling. Their number is what any choice of experts needs."""
        size, rows, experts = self.tiling.block_m, len(self.experts), len(self.ends)
        starts = F.pad(self.ends[:-1], (1, 0))
        counts = (self.ends - starts + size - 1) // size
        lasts = counts.cumsum(0)
        most = min(rows, (rows + min(rows, experts) * (size - 1)) // size)
        numbers = torch.arange(most, device=lasts.device)
        own = torch.searchsorted(lasts, numbers, right=True).clamp_(max=experts - 1)
        first = starts[own] + (numbers - (lasts - counts)[own]) * size
        return RowBlocks(torch.stack((own, first, self.ends[own]), dim=1).to(torch.int32), experts)


# A linear of all experts over rows sorted by expert: `[rows, in] -> [rows, out]`.
ProductOfExperts = Callable[[Tensor, SortedRows], Tensor]


@dataclass(frozen=True, slots=True)
class FloatProduct:
    """torch's grouped product."""

    weight: Tensor  # [experts, out, in]
    bias: Tensor | None  # [experts, out]

    def __call__(self, x: Tensor, rows: SortedRows) -> Tensor:
        y = F.grouped_mm(x, self.weight.transpose(1, 2), offs=rows.ends)
        return y if self.bias is None else y.add_(self.bias[rows.experts])


@dataclass(frozen=True, slots=True)
class FourBitProduct:
    """Our kernel's product with weights in 4 bits."""

    weight: FourBitWeight  # outputs of one expert after those of another
    bias: Tensor | None  # [experts, out]
    kernels: ModuleType

    def __call__(self, x: Tensor, rows: SortedRows) -> Tensor:
        after = self.kernels.Epilogue(bias=self.bias)
        y: Tensor = self.kernels.product(x, self.weight, rows.tiling, after, rows.blocks)
        return y


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """`Experts` as two products over rows sorted by expert."""

    up: ProductOfExperts  # gate and up
    down: ProductOfExperts
    routing: Routing
    activation: Callable[[Tensor], Tensor]
    kernels: ModuleType | None = None  # the module `kernels.experts`

    def __call__(self, x: Tensor, logits: Tensor, add_to: Tensor | None = None) -> Tensor:
        if self.kernels is not None and self.kernels.takes(self.routing, len(x)):
            choices = self.kernels.choose(logits, self.routing)
            found = self._products(x, choices.sources, SortedRows(choices.experts, choices.ends))
            summed: Tensor = self.kernels.add_up(found, choices, add_to)
            return summed
        ids, weights = route(logits, self.routing)
        rows, top_k = ids.shape
        experts, order = ids.flatten().sort(stable=True)
        numbers = torch.arange(logits.shape[1], device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
        found = self._products(x, order // top_k, SortedRows(experts, ends))
        by_row = torch.empty_like(found).index_copy_(0, order, found).view(rows, top_k, -1)
        total = (by_row.float() * weights[:, :, None]).sum(dim=1)
        return total.to(x.dtype) if add_to is None else add_to.add_(total)

    def _products(self, x: Tensor, sources: Tensor, rows: SortedRows) -> Tensor:
        """What the experts return for the rows `sources` of x, which are sorted by expert."""
        return self.down(self.activation(self.up(x.index_select(0, sources), rows)), rows)
