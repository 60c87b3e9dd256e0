"""The norms of q and k, of each head or over the width of all heads."""

from typing import NamedTuple

from adapters.models.base.projections import Projections
from adapters.models.base.traits import FamilyTraits
from engine.worker.model.layers import HeadNorm, SplitWidthNorm, WidthNorm
from engine.worker.ports import RankPart, TensorSlice


class HeadNorms(NamedTuple):
    """The norms of q and of k; None if the family has none."""

    q: HeadNorm | None = None
    k: HeadNorm | None = None


def head_norms(
    projections: Projections, at: str, traits: FamilyTraits, eps: float, *, has_own_kv: bool
) -> HeadNorms:
    """The norms of the attention named `at`; without KV of its own it has none of k."""
    if not traits.qk_norm:
        return HeadNorms()
    shard = projections.shard
    make = _of_width if traits.qk_norm == "width" else _of_head
    return HeadNorms(
        make(projections, f"{at}.{traits.names.q_norm}.weight", shard.heads, traits, eps),
        make(projections, f"{at}.{traits.names.k_norm}.weight", shard.kv_heads, traits, eps)
        if has_own_kv
        else None,
    )


def _of_head(
    projections: Projections, name: str, heads: RankPart, traits: FamilyTraits, eps: float
) -> HeadNorm:
    weight = projections.weights.tensor(TensorSlice(name, (projections.shard.shape.head_dim,)))
    weight = weight + traits.norm_offset if traits.norm_offset else weight
    return projections.operators.rms_norm(weight, eps)


def _of_width(
    projections: Projections, name: str, heads: RankPart, traits: FamilyTraits, eps: float
) -> HeadNorm:
    shard = projections.shard
    width = heads.times(shard.shape.head_dim)
    weight = projections.weights.tensor(TensorSlice(name, (width.size,), rows=width.run))
    if shard.all_reduce is None:
        return WidthNorm(projections.operators.rms_norm(weight, eps))
    share = heads.size / (shard.num_ranks * len(heads.run))
    return SplitWidthNorm(weight, eps, width.size, share, shard.all_reduce)
