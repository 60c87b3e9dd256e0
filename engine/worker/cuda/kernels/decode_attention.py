"""Attention of decodes, one new token per request, over the paged KV cache.

A program reads a run of keys and values of one KV head for all query heads that share it, in tiles
with a running maximum (online softmax). The ids of a tile's pages are loaded one tile ahead, so
that the loads of keys and values do not wait for them. Programs are small enough for four on each
multiprocessor of an H200: as many loads are in flight as its memory takes.

Pairs of fp8 numbers are read as one 16-bit number and widened by shifts into the even and the odd
dimensions, as float16 of 1/256 of their value.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.worker.cuda.kernels.dependent import launch_options, wait
from engine.worker.cuda.kernels.reference import FP8, DecodeKeys, Scoring

LOG2_E = tl.constexpr(1.4426950408889634)
TWICE_LOG2_E = tl.constexpr(2.8853900817779268)
MIN_HEADS = 16  # rows of a product on tensor cores
TILE_BYTES = 8192  # keys alone
MIN_TILE, MAX_TILE = 16, 64  # tokens
WIDE = 256  # numbers of a head from which on a program has more warps
FP8_FACTOR = 256.0


@triton.jit
def _widened(pairs):
    """1/256 of the even and of the odd e4m3 of 16-bit pairs, in float16."""
    bits = pairs.to(tl.int32)
    even = ((bits << 7) & 0x3F80) | ((bits << 8) & 0x8000)
    odd = ((bits >> 1) & 0x3F80) | (bits & 0x8000)
    return even.to(tl.int16).to(tl.float16, bitcast=True), odd.to(tl.int16).to(
        tl.float16, bitcast=True
    )


@triton.jit
def _query(q_at, is_head, IS_FP8: tl.constexpr):
    """All numbers of q twice, or the even and the odd ones in float16."""
    left = tl.load(q_at, mask=is_head, other=0.0)
    if IS_FP8:
        right = tl.load(q_at + 1, mask=is_head, other=0.0)
        return left.to(tl.float16), right.to(tl.float16)
    else:
        return left, left


@triton.jit
def _scores(left, right, key, factor, cap, IS_FP8: tl.constexpr, HAS_CAP: tl.constexpr):
    """The scores of a tile's keys for all heads, to base 2."""
    if IS_FP8:
        even, odd = _widened(key)
        scores = tl.dot(right, tl.trans(odd), tl.dot(left, tl.trans(even))) * factor
    else:
        scores = tl.dot(left, tl.trans(key)) * factor
    if HAS_CAP:  # cap * tanh(scores / cap)
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * TWICE_LOG2_E / cap) + 1.0))
    return scores


@triton.jit
def _added(share, value, mean, odd_mean, factor, IS_FP8: tl.constexpr):
    """The weighted values with those of a tile."""
    if IS_FP8:
        even, odd = _widened(value)
        mean = tl.dot(share, even, mean * factor)
        odd_mean = tl.dot(share, odd, odd_mean * factor)
    else:
        mean = tl.dot(share, value, mean * factor)
    return mean, odd_mean


@triton.jit
def _store(out_at, mean, odd_mean, scale, is_head, IS_FP8: tl.constexpr):
    kind: tl.constexpr = out_at.dtype.element_ty
    tl.store(out_at, (mean * scale).to(kind), mask=is_head)
    if IS_FP8:
        tl.store(out_at + 1, (odd_mean * scale).to(kind), mask=is_head)


@triton.jit
def _run(at):
    """Its row and how it is named, the place of its pages, its first and its end token."""
    named = tl.load(at).to(tl.int64)
    row = tl.where(named < 0, -1 - named, named)
    return row, named, tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def kernel(
    q,
    keys,
    values,
    runs,
    pages,
    out,
    parts,
    sums,
    sinks,
    q_row,
    page_stride,
    token_stride,
    head_stride,
    score_factor,
    out_factor,
    cap,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: KV heads × runs. `cap` is to base 2; strides of the cache are in loaded numbers."""
    wait(IS_DEPENDENT)
    run = tl.program_id(1).to(tl.int64)
    row, named, start, first, end = _run(runs + 4 * run)
    if first >= end:
        return
    own_pages = pages + start
    STEP: tl.constexpr = 2 if IS_FP8 else 1
    dims, group = tl.arange(0, DIM // STEP), tl.arange(0, HEADS)
    heads, is_head = tl.program_id(0) * GROUP + group, group[:, None] < GROUP
    at = heads[:, None] * DIM + STEP * dims[None, :]
    left, right = _query(q + row * q_row + at, is_head, IS_FP8)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    weights = tl.zeros([HEADS, TILE], tl.float32)  # added up over a tile once, at the end
    mean, odd_mean = tl.zeros_like(left).to(tl.float32), tl.zeros_like(left).to(tl.float32)
    key_at = keys + tl.program_id(0) * head_stride + dims[None, :]
    value_at = values + tl.program_id(0) * head_stride + dims[None, :]
    token = first + tl.arange(0, TILE)
    page = tl.load(own_pages + tl.minimum(token, end - 1) // PAGE)
    for _ in range(first, end, TILE):
        # places behind the last token are not read: anything may lie there
        place = page.to(tl.int64) * page_stride + tl.minimum(token, end - 1) % PAGE * token_stride
        page = tl.load(own_pages + tl.minimum(token + TILE, end - 1) // PAGE)
        key, value = tl.load(key_at + place[:, None]), tl.load(value_at + place[:, None])
        scores = _scores(left, right, key, score_factor, cap, IS_FP8, HAS_CAP)
        scores = tl.where(token[None, :] < end, scores, float("-inf"))
        most = tl.maximum(largest, tl.max(scores, axis=1))
        share, factor = tl.exp2(scores - most[:, None]), tl.exp2(largest - most)[:, None]
        weights = weights * factor + share
        mean, odd_mean = _added(share.to(left.dtype), value, mean, odd_mean, factor, IS_FP8)
        largest = most
        token += TILE
    total = tl.sum(weights, axis=1)
    is_part = group < tl.where(named < 0, GROUP, 0)
    is_whole = group < tl.where(named < 0, 0, GROUP)
    tl.store(sums + run * NUM_HEADS + heads, largest + tl.log2(total), mask=is_part)
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_whole, other=float("-inf")) * LOG2_E
        total += tl.exp2(sink - largest)
    scale = (out_factor / total)[:, None]
    part_at, out_at = parts + run * NUM_HEADS * DIM + at, out + row * NUM_HEADS * DIM + at
    _store(part_at, mean, odd_mean, scale, is_part[:, None], IS_FP8)
    _store(out_at, mean, odd_mean, scale, is_whole[:, None], IS_FP8)


class Tiling(NamedTuple):
    """Tokens of a tile, the warps of a program, and the stages of its loads."""

    tokens: int
    num_warps: int
    num_stages: int


def tiling_of(dim: int, itemsize: int) -> Tiling:
    """For heads of `dim` numbers in the cache; any GPU has 99 KiB of shared memory for it."""
    tokens = min(MAX_TILE, max(MIN_TILE, TILE_BYTES // (dim * itemsize)))
    is_large = tokens * dim * itemsize > TILE_BYTES
    return Tiling(tokens, 2 if dim < WIDE else 4, 3 if is_large else 4)


def attend_decodes(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    read: DecodeKeys,
    out: Tensor,
    parts: tuple[Tensor, Tensor],
    scoring: Scoring,
    sinks: Tensor | None = None,
) -> None:
    """See `reference.attend_decodes`; heads are a power of two wide and lie side by side in q and
    `out`."""
    num_heads, dim = q.shape[1:]
    num_kv_heads, group = keys.shape[2], num_heads // keys.shape[2]
    tiling = tiling_of(dim, keys.itemsize)
    is_fp8, factor, cap = keys.dtype == FP8, 1.0, scoring.soft_cap
    if is_fp8:
        keys, values, factor = keys.view(torch.int16), values.view(torch.int16), FP8_FACTOR
    kernel[(num_kv_heads, len(read.runs))](
        q,
        keys,
        values,
        read.runs,
        read.pages,
        out,
        *parts,
        out if sinks is None else sinks,
        q.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        scoring.scale * scoring.k_scale * LOG2_E.value * factor,
        scoring.v_scale * factor,
        1.0 if cap is None else cap * LOG2_E.value,
        NUM_HEADS=num_heads,
        GROUP=group,
        HEADS=max(MIN_HEADS, triton.next_power_of_2(group)),
        DIM=dim,
        PAGE=keys.shape[1],
        TILE=tiling.tokens,
        IS_FP8=is_fp8,
        HAS_CAP=cap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **launch_options(q.device),
    )
