"""Adds up attention over parts of a row's keys, in their order, and the row's sink."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

from engine.worker.cuda.kernels.dependent import launch_options, wait

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def kernel(
    found,
    sums,
    first,
    sinks,
    out,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    MIN_PARTS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: rows × heads. A part's share of its row is `2 ** (its sum - the row's)`."""
    wait(IS_DEPENDENT)
    row, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, DIM)
    start, end = tl.load(first + row), tl.load(first + row + 1)
    if end - start < MIN_PARTS:
        return
    most = tl.load(sums + start * NUM_HEADS + head)
    for part in range(start + 1, end):
        most = tl.maximum(most, tl.load(sums + part * NUM_HEADS + head))
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        most = tl.maximum(most, sink)
        total = tl.exp2(sink - most)
    else:
        total = tl.full([], 0.0, tl.float32)
    mean = tl.zeros([DIM], tl.float32)
    for part in range(start, end):
        at = part * NUM_HEADS + head
        share = tl.exp2(tl.load(sums + at) - most)
        mean += share * tl.load(found + at * DIM + dims).to(tl.float32)
        total += share
    at = (row * NUM_HEADS + head) * DIM + dims
    tl.store(out + at, (mean / total).to(out.dtype.element_ty))


def merge_parts(
    found: Tensor, sums: Tensor, first: Tensor, out: Tensor, sinks: Tensor | None = None
) -> None:
    """See `reference.merge_parts`; all tensors are contiguous, heads are a power of two wide."""
    _merge(found, sums, first, out, sinks, 1)


def merge_runs(
    found: Tensor, sums: Tensor, first: Tensor, out: Tensor, sinks: Tensor | None = None
) -> None:
    """See `reference.merge_runs`."""
    _merge(found, sums, first, out, sinks, 2)


def _merge(
    found: Tensor,
    sums: Tensor,
    first: Tensor,
    out: Tensor,
    sinks: Tensor | None,
    min_parts: int,
) -> None:
    rows, num_heads, dim = out.shape
    kernel[(rows, num_heads)](
        found,
        sums,
        first,
        sums if sinks is None else sinks,
        out,
        NUM_HEADS=num_heads,
        DIM=dim,
        HAS_SINKS=sinks is not None,
        MIN_PARTS=min_parts,
        num_warps=max(1, dim // 128),
        **launch_options(out.device),
    )
