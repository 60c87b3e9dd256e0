"""The image encoder of Gemma 4: images in about their own ratio, norms before and after each block
and on each head, RoPE that turns one half of a head by the column and the other by the row, and
tokens that are means of squares of patches."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.models.base.fields import Fields
from adapters.models.encoders.vision_transformer import (
    EncoderShape,
    VisionReader,
    VisionTransformer,
    angles_of,
    places,
)
from engine.errors import StartupError
from engine.media import EncoderReport
from engine.worker.model.rope import inverse_frequencies
from engine.worker.ports import (
    EncoderPixels,
    EncoderState,
    Encoding,
    Linear,
    Norm,
    Operators,
    TensorSlice,
    WeightSource,
)

LAST = -1  # in `EncoderState.outputs`: the patches behind the last layer
VALUES = 2  # the index of the values in q, k and v
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True, slots=True)
class Gemma4VisionShape(EncoderShape):
    """The sizes in `vision_config`; `pool` patches along each side make a token of `out_width`."""

    activation: str
    eps: float
    theta: float
    patch: int
    positions: int
    pool: int
    is_clipped: bool
    is_standardized: bool
    is_whole: bool  # as in `EncoderReport`

    @classmethod
    def read(cls, fields: Fields, out_width: int, *, is_whole: bool) -> "Gemma4VisionShape":
        """Raises `StartupError` for a field that is not supported."""
        width, heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12)
        fields.reject_unless("num_key_value_heads", heads)
        fields.reject_unless("head_dim", width // heads)
        fields.reject_unless("attention_bias", False)
        if width % (4 * heads):
            raise StartupError(
                f"{fields.where}: num_attention_heads={heads} times 4 does not divide "
                f"hidden_size={width}"
            )
        rope = fields.child("rope_parameters") or Fields({})
        return cls(
            num_layers=fields.layers("num_hidden_layers"),
            width=width,
            inner=fields.integer("intermediate_size", 3072),
            num_heads=heads,
            activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
            eps=fields.number("rms_norm_eps", 1e-6),
            theta=rope.number("rope_theta", 100.0),
            patch=fields.integer("patch_size", 16),
            positions=fields.integer("position_embedding_size", 10240),
            pool=fields.integer("pooling_kernel_size", 3),
            is_clipped=fields.flag("use_clipped_linears", False),
            is_standardized=fields.flag("standardize", False),
            out_width=out_width,
            is_whole=is_whole,
        )

    @property
    def report(self) -> EncoderReport:
        """What the control plane knows of it."""
        return self.reported(num_matrices=3, is_whole=self.is_whole)


@dataclass(frozen=True, slots=True)
class ClippedLinear:
    """A linear whose inputs and outputs are bounded, if it has `bounds`."""

    linear: Linear
    bounds: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        if not self.bounds:
            return self.linear(x)
        least, most, lowest, highest = self.bounds
        return self.linear(x.clamp(least, most)).clamp(lowest, highest)


@dataclass(frozen=True, slots=True)
class Gemma4VisionLayer:
    """Attention and a gated MLP, each between two norms."""

    attention_norm: Norm
    inputs: tuple[ClippedLinear, ...]  # q, k, v
    head_norms: tuple[Norm, ...]
    out: ClippedLinear
    attention_post_norm: Norm
    mlp_norm: Norm
    gate: ClippedLinear
    up: ClippedLinear
    down: ClippedLinear
    mlp_post_norm: Norm
    activation: Callable[[Tensor, Tensor], Tensor]
    order: Tensor  # the order of a head's dimensions for RoPE
    is_windowed: bool = False

    def read(self, hidden: Tensor, qkv: Tensor) -> None:
        x = self.attention_norm(hidden)
        for place, linear in enumerate(self.inputs):
            heads = linear(x).view(len(x), *qkv.shape[2:])
            qkv[:, place] = heads if place == VALUES else heads[..., self.order]
        for place, norm in enumerate(self.head_norms):
            norm.apply_(qkv[:, place])

    def add(self, mixed: Tensor, hidden: Tensor) -> None:
        self.attention_post_norm(self.out(mixed), hidden)
        x = self.mlp_norm(hidden)
        gate = self.gate(x).clone()  # kernels use the memory of their results again
        self.mlp_post_norm(self.down(self.activation(gate, self.up(x))), hidden)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the parts of layers."""

    reader: VisionReader
    shape: Gemma4VisionShape

    def linear(self, name: str, outputs: int, inputs: int) -> ClippedLinear:
        part = TensorSlice(f"{self.reader.root}{name}.linear.weight", (outputs, inputs))
        linear = self.reader.operators.linear([self.reader.weights.weight(part)], None)
        bounds = [float(self.reader.tensor(f"{name}.{each}")) for each in self.bound_names]
        return ClippedLinear(linear, tuple(bounds))

    @property
    def bound_names(self) -> tuple[str, ...]:
        return BOUNDS if self.shape.is_clipped else ()

    def layer(self, at: str) -> Gemma4VisionLayer:
        shape, operators = self.shape, self.reader.operators
        width, inner, dim, eps = shape.width, shape.inner, shape.head_dim, shape.eps
        order = _rope_order(dim)
        q, k = (
            self.reader.tensor(f"{at}self_attn.{each}_norm.weight", dim)[order] for each in "qk"
        )
        weights = (q * dim**0.5, k, torch.ones_like(k))  # attention divides scores by this root

        def norm(name: str) -> Norm:
            return self.reader.rms_norm(f"{at}{name}", width, eps)

        return Gemma4VisionLayer(
            attention_norm=norm("input_layernorm"),
            inputs=tuple(self.linear(f"{at}self_attn.{name}_proj", width, width) for name in "qkv"),
            head_norms=tuple(operators.rms_norm(each, eps) for each in weights),
            out=self.linear(f"{at}self_attn.o_proj", width, width),
            attention_post_norm=norm("post_attention_layernorm"),
            mlp_norm=norm("pre_feedforward_layernorm"),
            gate=self.linear(f"{at}mlp.gate_proj", inner, width),
            up=self.linear(f"{at}mlp.up_proj", inner, width),
            down=self.linear(f"{at}mlp.down_proj", width, inner),
            mlp_post_norm=norm("post_feedforward_layernorm"),
            activation=operators.gate(shape.activation),
            order=operators.constant(order),
        )


class Gemma4Vision(VisionTransformer):
    """Built from the tensors that begin with `root`, and the linear `projection`."""

    def __init__(
        self,
        weights: WeightSource,
        operators: Operators,
        shape: Gemma4VisionShape,
        root: str,
        projection: str,
    ) -> None:
        reader = VisionReader(weights, operators, root)
        parts = _Reader(reader, shape)
        layers = [parts.layer(f"encoder.layers.{n}.") for n in range(shape.num_layers)]
        super().__init__(operators, layers, shape.num_heads)
        self._shape = shape
        name, size = "patch_embedder.input_proj.weight", 3 * shape.patch**2
        self._patches = operators.linear([reader.tensor(name, shape.width, size)], None)
        name = "patch_embedder.position_embedding_table"
        self._positions = reader.tensor(name, 2, shape.positions, shape.width)
        self._standard: tuple[Tensor, ...] = ()
        if shape.is_standardized:
            names = ("std_bias", "std_scale")
            self._standard = tuple(reader.tensor(each, shape.width).float() for each in names)
        self._inverse = operators.constant(inverse_frequencies(shape.head_dim // 2, shape.theta))
        self._norm = operators.rms_norm(torch.ones_like(self._positions[0, 0]), shape.eps)
        linear = weights.weight(TensorSlice(projection, (shape.out_width, shape.width)))
        self._projection = operators.linear([linear], None)

    @property
    def smallest(self) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        pool = self._shape.pool
        return (pool**2, 3, self._shape.patch**2), (1, pool, pool)

    def begin(self, pixels: EncoderPixels, grid: tuple[int, int, int]) -> EncoderState:
        """With the angles of each patch's column and row."""
        frames, height, width = grid
        if frames != 1 or height % self._shape.pool or width % self._shape.pool:
            raise ValueError(f"an image of {frames} frames of {height} × {width} patches")
        down, across = places(height, width)
        turned = angles_of((across, down), self._inverse)
        state = self.state(pixels, grid, self._shape.width, turned)
        state.outputs[LAST] = torch.empty_like(state.hidden)
        return state

    def embed(self, state: EncoderState, rows: slice) -> Tensor:
        numbers = state.pixels.numbers(rows).transpose(1, 2).flatten(1)
        hidden = self._patches(2 * (numbers - 0.5))
        down, across = (each[rows].to(hidden.device) for each in places(*state.grid[1:]))
        return hidden + (self._positions[0][across] + self._positions[1][down]).to(hidden.dtype)

    def finished(self, state: EncoderState, layer: int, rows: slice) -> None:
        if layer == self._shape.num_layers - 1:
            state.outputs[LAST][rows] = state.hidden[rows]

    def end(self, state: EncoderState) -> Encoding:
        pool, (_, height, width) = self._shape.pool, state.grid
        sizes = (height // pool, pool, width // pool, pool, self._shape.width)
        means = state.outputs[LAST].float().view(sizes).mean((1, 3)).flatten(0, 1)
        means = means * self._shape.width**0.5
        if self._standard:
            bias, scale = self._standard
            means = (means - bias) * scale
        return Encoding(self._projection(self._norm(means.to(state.hidden.dtype))))


def _rope_order(dim: int) -> Tensor:
    """The dimensions of a head in an order in which RoPE, which pairs the halves of a head, pairs
    those of each half."""
    quarters = torch.arange(dim).view(4, -1)
    return quarters[[0, 2, 1, 3]].flatten()
