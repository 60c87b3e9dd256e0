"""Adds what attention or an MLP computed to the residual stream in the kernel of the next norm.

    attention.out ─▶ all-reduce ─▶ [post norm] ─▶ add ─▶ norm of the MLP        one launch
    MLP.down      ─▶ all-reduce ─▶ [post norm] ─▶ add ─▶ norm of the next layer   from there on

The layers stay as they are. What would add to the residual stream leaves its result in a `Pending`
instead, from which the next norm takes it. A linear whose GEMM adds to the residual stream in its
epilogue is left alone: the sum costs it no launch.
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from engine.worker.cuda.kernels.reference import RowNorm
from engine.worker.cuda.model.kernels import AddNorm, fits
from engine.worker.cuda.model.linears import CudaFp8Linear, CudaInt8Linear, FloatLinear
from engine.worker.cuda.model.operators import FusedRmsNorm
from engine.worker.model.layers import (
    AttentionBlock,
    DecoderLayer,
    FeedForward,
    GatedAttentionBlock,
    Layer,
    Mixer,
    Mlp,
)
from engine.worker.model.torch_operators import RmsNorm
from engine.worker.ports import Linear


class Summand(NamedTuple):
    """What is to be added to the residual stream: `delta`, or its norm `post`."""

    delta: Tensor  # [tokens, hidden]
    post: RowNorm | None


class Pending:
    """Passes a summand from a sublayer to the norm behind it, within one step."""

    def __init__(self) -> None:
        self._summand: Summand | None = None

    def put(self, summand: Summand) -> None:
        """Replaces a summand that a failed step has left."""
        self._summand = summand

    def take(self) -> Summand:
        summand, self._summand = self._summand, None
        assert summand is not None, "the sublayer runs before the norm"
        return summand


@dataclass(frozen=True, slots=True)
class DeferredSum:
    """A linear or an MLP whose result the next norm adds to the residual stream."""

    inner: Linear | FeedForward
    pending: Pending

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """`add_to` as it is: the sum comes later."""
        assert add_to is not None, "only what adds to the residual stream is deferred"
        self.pending.put(Summand(self.inner(x), None))
        return add_to


@dataclass(frozen=True, slots=True)
class DeferredPostNorm:
    """A norm of a sublayer's result that the next norm computes and adds to the residual stream."""

    norm: RowNorm
    pending: Pending

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """`add_to` as it is: norm and sum come later."""
        assert add_to is not None, "only what adds to the residual stream is deferred"
        self.pending.put(Summand(x, self.norm))
        return add_to

    def apply_(self, heads: Tensor) -> None:
        raise AssertionError("a norm of heads is not deferred")


@dataclass(frozen=True, slots=True)
class AddedPostNorm:
    """A norm of a sublayer's result and its sum with the residual stream in one launch."""

    norm: RowNorm
    kernels: ModuleType

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        assert add_to is not None, "only what adds to the residual stream is fused"
        self.kernels.add_rows(add_to, x, self.norm)
        return add_to

    def apply_(self, heads: Tensor) -> None:
        raise AssertionError("a norm of heads is not fused with a sum")


@dataclass(frozen=True, slots=True)
class ResidualNorm:
    """Adds the pending summand to the residual stream in place; returns the norm of the sum."""

    norm: RowNorm
    pending: Pending
    kernel: AddNorm

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        assert add_to is None, "only norms before a linear are fused"
        delta, post = self.pending.take()
        return self.kernel(x, delta, self.norm, post)

    def apply_(self, heads: Tensor) -> None:
        raise AssertionError("a norm of heads is not fused with a sum")


@dataclass(frozen=True, slots=True)
class ResidualKernels:
    """An `AddNorm` of several kernels.

    `library` is another library's kernel, for sums without a post norm; `rows` is the module
    `kernels.rows`. One of the two is None where it cannot be used.
    """

    rows: ModuleType | None
    library: AddNorm | None = None

    def __call__(
        self, residual: Tensor, delta: Tensor, norm: RowNorm, post: RowNorm | None
    ) -> Tensor:
        is_plain = post is None and fits(residual.shape[1], residual.dtype)
        if self.library is not None and is_plain:
            return self.library(residual, delta, norm, post)
        assert self.rows is not None, "checked by `supports`"
        found: Tensor = self.rows.add_norm(residual, delta, norm, post)
        return found

    def supports(self, norm: RowNorm, post: RowNorm | None) -> bool:
        """Whether a kernel takes rows of this width, with this post norm."""
        width = len(norm.weight)
        if self.rows is not None and width <= self.rows.MAX_WIDTH:
            return True
        return self.library is not None and post is None and fits(width, norm.weight.dtype)


def deferred(layers: tuple[Layer, ...], kernels: ResidualKernels) -> tuple[Layer, ...]:
    """The same layers, in which norms add what the sublayers before them have computed."""
    found = list(layers)
    for at, layer in enumerate(found):
        if isinstance(layer, DecoderLayer):
            found[at] = _inside(layer, kernels)
    for at in range(len(found) - 1):
        found[at : at + 2] = _between(found[at], found[at + 1], kernels)
    rows = kernels.rows
    return tuple(found) if rows is None else tuple(_summed(layer, rows) for layer in found)


def row_norm(norm: object) -> RowNorm | None:
    """The weight and epsilon of an RMS norm; None for any other norm or none at all."""
    return RowNorm(norm.weight, norm.eps) if isinstance(norm, FusedRmsNorm | RmsNorm) else None


def _inside(layer: DecoderLayer, kernels: ResidualKernels) -> DecoderLayer:
    """Attention's result is added by the MLP's norm."""
    norm, post, pending = row_norm(layer.mlp_norm), layer.attention_post_norm, Pending()
    if norm is None or not kernels.supports(norm, row_norm(post)):
        return layer
    if post is None and not adds_by_itself(layer.attention.out):
        mixer = _with_out(layer.attention, DeferredSum(layer.attention.out, pending))
        if mixer is None:
            return layer
        layer = replace(layer, attention=mixer)
    elif (post_norm := row_norm(post)) is not None:
        layer = replace(layer, attention_post_norm=DeferredPostNorm(post_norm, pending))
    else:
        return layer
    return replace(layer, mlp_norm=ResidualNorm(norm, pending, kernels))


def _between(before: Layer, after: Layer, kernels: ResidualKernels) -> tuple[Layer, Layer]:
    """The MLP's result is added by the norm of the next layer."""
    if not isinstance(before, DecoderLayer) or not isinstance(after, DecoderLayer):
        return before, after
    norm, post, pending = row_norm(after.attention_norm), before.mlp_post_norm, Pending()
    reads_sum = before.input is not None or before.scale is not None
    if norm is None or reads_sum or not kernels.supports(norm, row_norm(post)):
        return before, after
    if post is None and not adds_by_itself(before.mlp):
        before = replace(before, mlp=DeferredSum(before.mlp, pending))
    elif (post_norm := row_norm(post)) is not None:
        before = replace(before, mlp_post_norm=DeferredPostNorm(post_norm, pending))
    else:
        return before, after
    return before, replace(after, attention_norm=ResidualNorm(norm, pending, kernels))


def _summed(layer: Layer, rows: ModuleType) -> Layer:
    """Post norms that no other norm follows are fused with the sum alone (OLMo 2)."""
    if not isinstance(layer, DecoderLayer):
        return layer
    for name in ("attention_post_norm", "mlp_post_norm"):
        norm = row_norm(getattr(layer, name))
        if norm is not None and len(norm.weight) <= rows.MAX_WIDTH:
            added = AddedPostNorm(norm, rows)
            layer = replace(layer, **{name: added})  # type: ignore[arg-type] # a norm's field
    return layer


def adds_by_itself(part: object) -> bool:
    """Whether the GEMM of a linear, or of the last linear of an MLP, adds in its epilogue."""
    if isinstance(part, Mlp):
        return adds_by_itself(part.down)
    if isinstance(part, FloatLinear):
        return part.bias is None
    if isinstance(part, CudaInt8Linear | CudaFp8Linear):
        return part.fast.gemm is not None
    return False


def _with_out(mixer: Mixer, out: Linear) -> Mixer | None:
    """The mixer with another linear behind it; None if it is neither kind of attention."""
    if isinstance(mixer, AttentionBlock):
        return replace(mixer, out=out)
    if isinstance(mixer, GatedAttentionBlock):
        return replace(mixer, attention=replace(mixer.attention, out=out))
    return None
