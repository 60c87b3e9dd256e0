"""SigLIP, the image encoder of SmolVLM2 and Gemma 3: square images, patches with learned positions,
and blocks of patches that become tokens."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adapters.models.base.fields import Fields
from adapters.models.encoders.vision_transformer import (
    EncoderShape,
    VisionLayer,
    VisionReader,
    VisionTransformer,
)
from engine.errors import StartupError
from engine.media import EncoderReport
from engine.worker.ports import (
    EncoderPixels,
    EncoderState,
    Encoding,
    Linear,
    Norm,
    Operators,
    WeightSource,
)

LAST = -1  # in `EncoderState.outputs`: the normalized patches


@dataclass(frozen=True, slots=True)
class SiglipShape(EncoderShape):
    """The sizes in `vision_config`; `block` patches along each side make a token of `out_width`."""

    activation: str
    eps: float
    channels: int
    patch: int
    side: int  # patches along each side of an image
    block: int
    is_whole: bool  # as in `EncoderReport`

    @classmethod
    def read(
        cls, fields: Fields, block: int, out_width: int, *, is_whole: bool = False
    ) -> "SiglipShape":
        """Raises `StartupError` for a field that is not supported."""
        width, heads = fields.integer("hidden_size", 1152), fields.integer("num_attention_heads")
        size, patch = fields.integer("image_size", 224), fields.integer("patch_size", 32)
        if width % heads or size % (patch * block):
            raise StartupError(
                f"{fields.where}: num_attention_heads={heads} does not divide hidden_size={width}, "
                f"or {block} patches of {patch_text(patch)} do not divide image_size={size}"
            )
        return cls(
            num_layers=fields.layers("num_hidden_layers"),
            width=width,
            inner=fields.integer("intermediate_size", 3072),
            num_heads=heads,
            activation=fields.activation("hidden_act", "gelu_pytorch_tanh"),
            eps=fields.number("layer_norm_eps", 1e-6),
            channels=fields.integer("num_channels", 3),
            patch=patch,
            side=size // patch,
            block=block,
            out_width=out_width,
            is_whole=is_whole,
        )

    @property
    def report(self) -> EncoderReport:
        """What the control plane knows of it."""
        return self.reported(num_matrices=2, is_whole=self.is_whole)


def patch_text(patch: int) -> str:
    """The size of a patch, for messages."""
    return f"{patch} × {patch} pixels"


class MakesTokens(Protocol):
    """Makes tokens of blocks of normalized patches."""

    def places(self, side: int) -> Tensor:
        """The row of the position table for each of `side` × `side` patches."""

    def __call__(self, blocks: Tensor) -> Tensor:
        """`[tokens, out width]` from `[tokens, patches of a block, width]`."""


@dataclass(frozen=True, slots=True)
class JoinedPatches:
    """SmolVLM's tokens: one linear reads all patches of a block."""

    projection: Linear

    def places(self, side: int) -> Tensor:
        """Like the model's own code, it divides in float32, so that where rounding moves a patch to
        a neighbour's row, it does so here too."""
        share = 1.0 / side
        edges = torch.arange(share, 1.0, share)
        places = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
        buckets = torch.bucketize(places.clamp(max=1.0 - 1e-6), edges, right=True)
        return (buckets[:, None] * side + buckets).flatten()

    def __call__(self, blocks: Tensor) -> Tensor:
        return self.projection(blocks.flatten(1))


@dataclass(frozen=True, slots=True)
class PooledPatches:
    """Gemma 3's tokens: the mean of a block, behind a norm and a linear."""

    norm: Norm
    projection: Linear

    def places(self, side: int) -> Tensor:
        return torch.arange(side**2)

    def __call__(self, blocks: Tensor) -> Tensor:
        return self.projection(self.norm(blocks.mean(1)))


class Siglip(VisionTransformer):
    """Built from tensors that begin with `root`."""

    def __init__(
        self,
        weights: WeightSource,
        operators: Operators,
        shape: SiglipShape,
        root: str,
        tokens: MakesTokens,
    ) -> None:
        self._shape = shape
        reader = VisionReader(weights, operators, root)
        layers = [self._layer(reader, f"encoder.layers.{n}.") for n in range(shape.num_layers)]
        super().__init__(operators, layers, shape.num_heads)
        size = (shape.width, shape.channels, shape.patch, shape.patch)
        self._patches = reader.patches("embeddings.patch_embedding", size)
        name = "embeddings.position_embedding.weight"
        self._positions = reader.tensor(name, shape.side**2, shape.width)
        self._norm = reader.norm("post_layernorm", shape.width, shape.eps)
        self._tokens = tokens
        self._places = operators.constant(tokens.places(shape.side))

    @property
    def smallest(self) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        side, pixels = self._shape.side, self._shape.side * self._shape.patch
        return (1, self._shape.channels, pixels, pixels), (1, side, side)

    def begin(self, pixels: EncoderPixels, grid: tuple[int, int, int]) -> EncoderState:
        """The levels `[1, channels, height, width]` are put in the order of patches."""
        shape = self._shape
        height, width = grid[1], grid[2]
        if grid != (1, shape.side, shape.side):
            raise ValueError(f"an image of {grid} patches")
        levels = pixels.levels[0].view(shape.channels, height, shape.patch, width, shape.patch)
        levels = levels.permute(1, 3, 0, 2, 4).reshape(height * width, shape.channels, -1)
        state = self.state(pixels._replace(levels=levels), grid, shape.width, None)
        state.outputs[LAST] = torch.empty_like(state.hidden)
        return state

    def embed(self, state: EncoderState, rows: slice) -> Tensor:
        hidden = self._patches(state.pixels.numbers(rows).flatten(1))
        return hidden + self._positions[self._places[rows]].to(hidden.dtype)

    def finished(self, state: EncoderState, layer: int, rows: slice) -> None:
        if layer == self._shape.num_layers - 1:
            state.outputs[LAST][rows] = self._norm(state.hidden[rows])

    def end(self, state: EncoderState) -> Encoding:
        side, block = self._shape.side, self._shape.block
        blocks = state.outputs[LAST].view(side // block, block, side // block, block, -1)
        blocks = blocks.transpose(1, 2).reshape((side // block) ** 2, block**2, -1)
        return Encoding(self._tokens(blocks))

    def _layer(self, reader: VisionReader, at: str) -> VisionLayer:
        width, inner, eps = self._shape.width, self._shape.inner, self._shape.eps
        return VisionLayer(
            reader.norm(f"{at}layer_norm1", width, eps),
            reader.linear([f"{at}self_attn.{name}_proj" for name in "qkv"], width, width),
            reader.linear(f"{at}self_attn.out_proj", width, width),
            reader.norm(f"{at}layer_norm2", width, eps),
            reader.linear(f"{at}mlp.fc1", inner, width),
            reader.linear(f"{at}mlp.fc2", width, inner),
            reader.operators.activation(self._shape.activation, is_gated=False),
        )
