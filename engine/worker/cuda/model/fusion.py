"""Fuses what precedes an 8-bit linear with the quantization of its input, and the gate with the
float linear before it.

    norm ─▶ quantize ─▶ qkv, up   one launch before the product instead of two
    gate ─▶ quantize ─▶ down      the same
    up ─▶ gate                    one launch instead of two, up to 128 rows

The layers stay as they are: the norm or gate moves into the linear, and a pass-through takes its
place.
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import TypeGuard

from torch import Tensor

from engine.worker.cuda.model.linears import EightBitLinear, FloatLinear
from engine.worker.cuda.model.operators import FusedGate, FusedRmsNorm
from engine.worker.model.layers import (
    AttentionBlock,
    Decoder,
    DecoderLayer,
    FeedForward,
    Layer,
    Mlp,
    RowParallelLinear,
)
from engine.worker.model.torch_operators import RmsNorm
from engine.worker.ports import Linear, Norm, StageModel


@dataclass(frozen=True, slots=True)
class NormedLinear:
    """RMS norm and an 8-bit linear: `[tokens, hidden] -> [tokens, out]`."""

    weight: Tensor
    eps: float
    linear: EightBitLinear
    kernels: ModuleType

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        rows = self.kernels.norm_and_quantize(x, self.weight, self.eps, self.linear.dtype)
        return self.linear.multiply(rows, x.dtype, add_to)


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """A gated activation and an 8-bit linear: `[tokens, 2 * inner] -> [tokens, out]`."""

    name: str
    linear: EightBitLinear
    kernels: ModuleType

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        rows = self.kernels.gate_and_quantize(self.name, x, self.linear.dtype)
        return self.linear.multiply(rows, x.dtype, add_to)


@dataclass(frozen=True, slots=True)
class LinearWithGate:
    """A float linear of gate and up, and the gate: `[tokens, hidden] -> [tokens, inner]`."""

    linear: FloatLinear
    gate: FusedGate

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        assert add_to is None, "a gated activation is not added to anything"
        linear = self.linear
        found = linear.fast.gated_product(self.gate.name, x, linear.weight, linear.bias)
        return self.gate(linear(x)) if found is None else found


class PassThrough:
    """Stands in the place of a norm or activation that the next linear computes."""

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        assert add_to is None, "only norms before a linear are fused"
        return x

    def apply_(self, heads: Tensor) -> None:
        raise AssertionError("a norm of heads is not fused")


def fused(model: StageModel, kernels: ModuleType | None) -> StageModel:
    """The same model. `kernels` is the module `kernels.rows`; None leaves the model as it is."""
    if kernels is None or not isinstance(model, Decoder):
        return model
    return replace(model, blocks=tuple(_fused_layer(block, kernels) for block in model.blocks))


def _fused_layer(layer: Layer, kernels: ModuleType) -> Layer:
    if not isinstance(layer, DecoderLayer):
        return layer
    block = layer.attention
    if isinstance(block, AttentionBlock):
        normed = _normed(layer.attention_norm, block.qkv, kernels)
        if normed is not None:
            attention = replace(block, qkv=normed)
            layer = replace(layer, attention_norm=PassThrough(), attention=attention)
    return _fused_mlp(layer, layer.mlp, kernels)


def _normed(norm: Norm | None, linear: Linear, kernels: ModuleType) -> Linear | None:
    """The linear with the norm before it; None if the kernels do not take one of them."""
    if not fits(linear, kernels.MAX_PAIR_WIDTH):
        return None
    if isinstance(norm, FusedRmsNorm | RmsNorm):
        return NormedLinear(norm.weight, norm.eps, linear, kernels)
    return None


def _fused_mlp(layer: DecoderLayer, mlp: FeedForward, kernels: ModuleType) -> DecoderLayer:
    if not isinstance(mlp, Mlp):
        return layer
    normed = _normed(layer.mlp_norm, mlp.up, kernels)
    if normed is not None:
        mlp = replace(mlp, up=normed)
        layer = replace(layer, mlp_norm=PassThrough())
    gate = mlp.activation
    if isinstance(gate, FusedGate):
        gated = _gated(gate, mlp.down, kernels)
        if gated is not None:
            mlp = replace(mlp, activation=PassThrough(), down=gated)
        elif isinstance(mlp.up, FloatLinear):
            mlp = replace(mlp, activation=PassThrough(), up=LinearWithGate(mlp.up, gate))
    return replace(layer, mlp=mlp)


def fits(linear: Linear, most: int) -> TypeGuard[EightBitLinear]:
    """Whether this is an 8-bit linear whose rows of input the kernels take."""
    return isinstance(linear, EightBitLinear) and linear.width <= most


def _gated(gate: FusedGate, down: Linear, kernels: ModuleType) -> Linear | None:
    """The linear with the gate before it; None if it is not an 8-bit linear."""
    if isinstance(down, RowParallelLinear):
        part = _gated(gate, down.part, kernels)
        return None if part is None else replace(down, part=part)
    if not fits(down, kernels.MAX_PAIR_WIDTH):
        return None
    return GatedLinear(gate.name, down, kernels)
