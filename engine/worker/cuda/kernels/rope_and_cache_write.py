"""RoPE and the write of keys and values to the paged KV cache, in one launch per layer.

It replaces three launches: RoPE of q and k, and one indexed copy each for keys and values. A
program handles a block of heads of one token; the rotated k goes to the cache only.

Dimensions are handled in pairs: `ROTATED` pairs are turned, and lie in the first `2 * ROTATED`
dimensions of a head; the pairs of the others are only copied. Heads of `q_out` may be wider, and
get zeros there; keys are finite then, see `reference`. Pages of the cache may lie apart.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

from engine.worker.cuda.kernels.dependent import launch_options, wait
from engine.worker.cuda.kernels.fp8 import to_fp8
from engine.worker.cuda.kernels.reference import FP8, CacheRows

BLOCK_ELEMENTS = 1024  # elements of q, k or v per program
LARGEST_HALF, LARGEST_BFLOAT16 = tl.constexpr(65504.0), tl.constexpr(3.3895313892515355e38)


@triton.jit
def kernel(
    q,
    k,
    v,
    cos,
    sin,
    slots,
    keys,
    values,
    q_out,
    q_stride,
    q_out_stride,
    k_stride,
    v_stride,
    page_stride,
    angle_stride,
    k_factor,
    v_factor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    Q_OUT_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    IS_FP8: tl.constexpr,
    WRITES_Q: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: tokens × (head blocks of q, then of k, then of v, if any). Strides are in elements."""
    wait(IS_DEPENDENT)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_turned = pair < ROTATED
    dims = tl.where(is_turned, pair, pair + ROTATED)
    gap = tl.where(is_turned, ROTATED, HALF - ROTATED)  # to the second dimension of the pair
    angle = token * angle_stride + pair
    if block < Q_BLOCKS:
        if WRITES_Q:
            heads = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
            mask = (heads < NUM_HEADS) & (pair < HALF)
            at = q + token * q_stride + heads * (2 * HALF) + dims
            first, second = _rotated(at, mask, cos + angle, sin + angle, is_turned, gap, ROTATED)
            q_at = q_out + token * q_out_stride + heads * Q_OUT_DIM
            tl.store(q_at + dims, first.to(q.dtype.element_ty), mask=mask)
            tl.store(q_at + dims + gap, second.to(q.dtype.element_ty), mask=mask)
            for start in tl.static_range(2 * HALF, Q_OUT_DIM, BLOCK_HALF):
                behind = start + pair
                is_there = (heads < NUM_HEADS) & (behind < Q_OUT_DIM)
                zeros = tl.zeros([BLOCK_HEADS, BLOCK_HALF], q.dtype.element_ty)
                tl.store(q_at + behind, zeros, mask=is_there)
    else:
        is_key = block < Q_BLOCKS + KV_BLOCKS
        block -= tl.where(is_key, Q_BLOCKS, Q_BLOCKS + KV_BLOCKS)
        heads = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        mask = (heads < NUM_KV_HEADS) & (pair < HALF)
        inside = heads * (2 * HALF) + dims
        slot = tl.load(slots + token)
        to = slot // PAGE * page_stride + slot % PAGE * (NUM_KV_HEADS * 2 * HALF) + inside
        if is_key:
            at = k + token * k_stride + inside
            left, right = _rotated(at, mask, cos + angle, sin + angle, is_turned, gap, ROTATED)
            if Q_OUT_DIM > 2 * HALF:
                left, right = _finite(left, right, k.dtype.element_ty)
            _store(keys + to, left, right, mask, k_factor, k.dtype.element_ty, gap, IS_FP8)
        else:
            left, right = _pairs(v + token * v_stride + inside, mask, gap)
            _store(values + to, left, right, mask, v_factor, v.dtype.element_ty, gap, IS_FP8)


@triton.jit
def _pairs(at, mask, gap):
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(at + gap, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rotated(at, mask, cos, sin, is_turned, gap, ROTATED: tl.constexpr):
    """The pairs of heads, after RoPE if there is one."""
    first, second = _pairs(at, mask, gap)
    if ROTATED > 0:
        c = tl.load(cos, mask=is_turned, other=1.0).to(tl.float32)
        s = tl.load(sin, mask=is_turned, other=0.0).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s
    return first, second


@triton.jit
def _finite(left, right, dtype: tl.constexpr):
    most = LARGEST_HALF if dtype == tl.float16 else LARGEST_BFLOAT16
    left = tl.minimum(tl.maximum(tl.where(left == left, left, 0.0), -most), most)
    right = tl.minimum(tl.maximum(tl.where(right == right, right, 0.0), -most), most)
    return left, right


@triton.jit
def _store(to, left, right, mask, factor, dtype: tl.constexpr, gap, IS_FP8: tl.constexpr):
    """Store both dimensions of pairs, scaled if they are in 8 bits."""
    tl.store(to, _stored(left, factor, dtype, IS_FP8), mask=mask)
    tl.store(to + gap, _stored(right, factor, dtype, IS_FP8), mask=mask)


@triton.jit
def _stored(rows, factor, dtype: tl.constexpr, IS_FP8: tl.constexpr):
    if IS_FP8:
        scaled = rows.to(dtype).to(tl.float32) * factor
        return to_fp8(tl.minimum(tl.maximum(scaled, -448.0), 448.0))
    else:
        return rows.to(dtype)


def rope_and_cache_write(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    angles: tuple[Tensor, Tensor] | None,
    cache: CacheRows,
    q_out: Tensor | None = None,
) -> None:
    """See `reference.rope_and_cache_write`; heads of a token are adjacent, tokens may be
    strided."""
    tokens, num_heads, dim = q.shape
    half = dim // 2
    num_kv_heads = 0 if k is None else k.shape[1]
    parts = (k is not None) + (v is not None)
    k, v = (q if k is None else k), (q if v is None else v)
    block_half = triton.next_power_of_2(half)
    block_heads = max(1, BLOCK_ELEMENTS // (2 * block_half))
    cos, sin = (q, q) if angles is None else angles
    to = q if q_out is None else q_out
    blocks = triton.cdiv(num_heads, block_heads) + parts * triton.cdiv(num_kv_heads, block_heads)
    kernel[(tokens, blocks)](
        q,
        k,
        v,
        cos,
        sin,
        cache.slots,
        cache.keys,
        cache.values,
        to,
        q.stride(0),
        to.stride(0),
        k.stride(0),
        v.stride(0),
        cache.keys.stride(0),
        cos.stride(0),
        1 / cache.k_scale,
        1 / cache.v_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        Q_OUT_DIM=to.shape[2],
        PAGE=cache.keys.shape[1],
        ROTATED=0 if angles is None else cos.shape[1],
        BLOCK_HALF=block_half,
        BLOCK_HEADS=block_heads,
        IS_FP8=cache.keys.dtype == FP8,
        WRITES_Q=angles is not None or q_out is not None,
        num_warps=4,
        **launch_options(q.device),
    )
