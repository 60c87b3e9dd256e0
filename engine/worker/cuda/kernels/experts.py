"""What is around the products of a mixture of experts: routing, sorting by expert, and the sum of
what the experts of a row return. A launch each, for what are 16 operations of torch.

Sorting is stable and counts: the program of an expert finds the places of its own rows. So it
reads all of them, which is estimated to take longer than torch's sort beyond `MAX_CHOICES`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.worker.cuda.kernels.dependent import launch_options, wait
from engine.worker.ports import Routing

MAX_CHOICES = 8192  # rows × experts of each
SORTED = 1024  # choices per iteration
COLUMNS = 1024  # per program of the sum


class Choices(NamedTuple):
    """The experts of all rows, sorted."""

    weights: Tensor  # float32 [rows, top_k]
    sources: Tensor  # int64 [choices]: the row of each choice, in the order of experts
    experts: Tensor  # int64 [choices], ascending
    ends: Tensor  # int32 [experts], where the choices of each end
    places: Tensor  # int32 [rows, top_k]: where a choice is in that order


@triton.jit
def route_kernel(
    logits,
    bias,
    scales,
    ids,
    weights,
    num_experts,
    row_stride,
    TOP_K: tl.constexpr,
    HAS_SIGMOIDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: rows. Of equal experts the first is chosen."""
    wait(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, EXPERTS), tl.arange(0, CHOSEN)
    mask = expert < num_experts
    at = logits + row * row_stride + expert
    logit = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
    if HAS_SIGMOIDS:
        share = 1.0 / (1.0 + tl.exp(-logit))
    else:
        share = tl.exp(logit - tl.max(logit, axis=0))
        share = share / tl.sum(share, axis=0)
    key = share
    if HAS_BIAS:
        key += tl.load(bias + expert, mask=mask, other=0.0)
    key = tl.where(mask, key, float("-inf"))
    chosen = tl.zeros([CHOSEN], tl.int32)
    own = tl.zeros([CHOSEN], tl.float32)
    for number in range(TOP_K):
        best = tl.min(tl.where(key == tl.max(key, axis=0), expert, num_experts - 1), axis=0)
        chosen = tl.where(place == number, best, chosen)
        own = tl.where(place == number, tl.sum(tl.where(expert == best, share, 0.0), axis=0), own)
        key = tl.where(expert == best, float("-inf"), key)
    if RENORMALIZES:
        own = own / tl.sum(own, axis=0)
    if HAS_SCALES:
        own *= tl.load(scales + chosen)
    is_chosen = place < TOP_K
    tl.store(ids + row * TOP_K + place, chosen, mask=is_chosen)
    tl.store(weights + row * TOP_K + place, own, mask=is_chosen)


@triton.jit
def sort_kernel(
    ids,
    sources,
    experts,
    ends,
    places,
    num_choices,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: experts."""
    wait(IS_DEPENDENT)
    expert = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_choices, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        chosen = tl.load(ids + choice, mask=choice < num_choices, other=1 << 30)
        before += (chosen < expert).to(tl.int32)
    count = tl.sum(before, axis=0)
    for start in range(0, num_choices, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        chosen = tl.load(ids + choice, mask=choice < num_choices, other=1 << 30)
        is_own = chosen == expert
        place = count + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(places + choice, place, mask=is_own)
        tl.store(sources + place, (choice // TOP_K).to(tl.int64), mask=is_own)
        tl.store(experts + place, chosen.to(tl.int64), mask=is_own)
        count += tl.sum(is_own.to(tl.int32), axis=0)
    tl.store(ends + expert, count)


@triton.jit
def sum_kernel(
    found,
    weights,
    places,
    before,
    out,
    width,
    before_row,
    TOP_K: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: rows × blocks of columns."""
    wait(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(TOP_K):
        place = tl.load(places + row * TOP_K + number).to(tl.int64)
        weight = tl.load(weights + row * TOP_K + number)
        total += (
            tl.load(found + place * width + column, mask=mask, other=0.0).to(tl.float32) * weight
        )
    if HAS_ADDED:
        at = before + row * before_row + column
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, total.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=mask)


def takes(routing: Routing, num_rows: int) -> bool:
    """Whether the kernels route so many rows in this way."""
    return routing.groups is None and num_rows * routing.top_k <= MAX_CHOICES


def choose(logits: Tensor, routing: Routing) -> Choices:
    """The choices of rows with these logits `[rows, experts]`; see `model.experts.route`."""
    rows, num_experts = logits.shape
    place, top_k, options = logits.device, routing.top_k, launch_options(logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=place)
    ids, places = torch.empty(2, rows, top_k, dtype=torch.int32, device=place)
    sources, experts = torch.empty(2, rows * top_k, dtype=torch.int64, device=place)
    ends = torch.empty(num_experts, dtype=torch.int32, device=place)
    route_kernel[(rows,)](
        logits,
        weights if routing.bias is None else routing.bias,
        weights if routing.scales is None else routing.scales,
        ids,
        weights,
        num_experts,
        logits.stride(0),
        TOP_K=top_k,
        HAS_SIGMOIDS=routing.has_sigmoids,
        HAS_BIAS=routing.bias is not None,
        HAS_SCALES=routing.scales is not None,
        RENORMALIZES=routing.renormalizes,
        EXPERTS=triton.next_power_of_2(num_experts),
        CHOSEN=triton.next_power_of_2(top_k),
        num_warps=1,
        **options,
    )
    sort_kernel[(num_experts,)](
        ids,
        sources,
        experts,
        ends,
        places,
        rows * top_k,
        TOP_K=top_k,
        BLOCK=min(SORTED, triton.next_power_of_2(rows * top_k)),
        num_warps=4,
        **options,
    )
    return Choices(weights, sources, experts, ends, places)


def add_up(found: Tensor, choices: Choices, add_to: Tensor | None) -> Tensor:
    """The weighted sum of each row's results in `found` `[choices, width]`, which are in the order
    of experts: a new tensor, or `add_to` with it added in place."""
    rows, top_k = choices.weights.shape
    width = found.shape[1]
    out = found.new_empty(rows, width) if add_to is None else add_to
    block = min(COLUMNS, triton.next_power_of_2(width))
    sum_kernel[(rows, triton.cdiv(width, block))](
        found,
        choices.weights,
        choices.places,
        out,
        out,
        width,
        out.stride(0),
        TOP_K=top_k,
        HAS_ADDED=add_to is not None,
        BLOCK=block,
        num_warps=max(1, block // 256),
        **launch_options(found.device),
    )
    return out
