"""The image encoder of Qwen3-VL, Qwen 3.5 and 3.6: a vision transformer over patches of 16 × 16
pixels, with learned positions, resampled to the image's grid, and RoPE over rows and columns.
Blocks of 2 × 2 patches, which follow one another, are merged into one token. With DeepStack some
layers' results are merged too, and added behind the decoder's first layers."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from adapters.models.base.fields import Fields
from adapters.models.encoders.vision_transformer import (
    TILE,
    VisionLayer,
    VisionReader,
    VisionTransformer,
)
from engine.errors import StartupError
from engine.media import EncoderReport
from engine.worker.model.rope import inverse_frequencies
from engine.worker.ports import (
    EncoderState,
    Encoding,
    Linear,
    Norm,
    Operators,
    RopeAngles,
    TensorSlice,
    WeightSource,
)

EPS = 1e-6
THETA = 10000.0
LAST = -1  # in `EncoderState.outputs`: what replaces embeddings
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The sizes in `vision_config`."""

    num_layers: int
    width: int
    inner: int
    num_heads: int
    activation: str
    channels: int
    patch: int
    frames: int  # of a patch: an image is repeated as if it were a film
    merge: int
    out_width: int
    positions: int  # along each side of the learned grid
    added: tuple[int, ...] = ()  # layers whose results are added behind the decoder's first ones

    @classmethod
    def read(cls, fields: Fields, hidden_size: int) -> "VisionShape":
        """Raises `StartupError` for a field that is not supported."""
        width, heads = fields.integer("hidden_size"), fields.integer("num_heads")
        num_positions = fields.integer("num_position_embeddings", 2304)
        shape = cls(
            num_layers=fields.layers("depth"),
            width=width,
            inner=fields.integer("intermediate_size"),
            num_heads=heads,
            activation=fields.activation("hidden_act", "gelu_pytorch_tanh"),
            channels=fields.integer("in_channels", 3),
            patch=fields.integer("patch_size", 16),
            frames=fields.integer("temporal_patch_size", 2),
            merge=fields.integer("spatial_merge_size", 2),
            out_width=fields.integer("out_hidden_size"),
            positions=int(num_positions**0.5),
            added=_indexes(fields),
        )
        if width % (4 * heads):
            raise StartupError(
                f"{fields.where}: num_heads={heads} times 4 does not divide hidden_size={width}"
            )
        if TILE % shape.block:
            raise StartupError(
                f"{fields.where}: spatial_merge_size={shape.merge} does not divide {TILE} patches"
            )
        if shape.positions**2 != num_positions:
            raise StartupError(
                f"{fields.where}: num_position_embeddings={num_positions} is not a square"
            )
        if shape.out_width != hidden_size:
            raise StartupError(
                f"{fields.where}: out_hidden_size={shape.out_width} is not the decoder's "
                f"hidden_size={hidden_size}"
            )
        return shape

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def block(self) -> int:
        """Patches that one token stands for."""
        return self.merge**2

    @property
    def report(self) -> EncoderReport:
        """What the control plane knows of it."""
        return EncoderReport(
            num_layers=self.num_layers,
            row_bytes=FLOAT32_BYTES * self.out_width * (1 + len(self.added)),
            row_flops=2 * self.width * (4 * self.width + 2 * self.inner),
            pair_flops=4 * self.width,
            tile=TILE,
            merge=self.merge,
        )


def _indexes(fields: Fields) -> tuple[int, ...]:
    """`deepstack_visual_indexes`, ascending layers."""
    found = fields.get("deepstack_visual_indexes")
    if found is None:
        return ()
    if not isinstance(found, list) or found != sorted(set(found)):
        raise StartupError(
            f"{fields.where}: deepstack_visual_indexes={found!r}, expected ascending layers"
        )
    return fields.counts("deepstack_visual_indexes", len(found))


@dataclass(frozen=True, slots=True)
class Merger:
    """Merges blocks of patches into tokens. `is_merged_first`: the norm is over whole blocks."""

    norm: Norm
    up: Linear
    down: Linear
    width: int  # of a block
    is_merged_first: bool

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[tokens, out width]` from `[patches, width]`."""
        if self.is_merged_first:
            blocks = self.norm(hidden.reshape(-1, self.width))
        else:
            blocks = self.norm(hidden).reshape(-1, self.width)
        return self.down(F.gelu(self.up(blocks)))


class QwenVision(VisionTransformer):
    """Built from the tensors that begin with `root`."""

    def __init__(
        self, weights: WeightSource, operators: Operators, shape: VisionShape, root: str
    ) -> None:
        self._shape = shape
        reader = VisionReader(weights, operators, root)
        layers = [self._layer(reader, f"blocks.{n}.") for n in range(shape.num_layers)]
        activation = operators.activation(shape.activation, is_gated=False)
        super().__init__(operators, layers, shape.num_heads, activation)
        size = (shape.width, shape.channels, shape.frames, shape.patch, shape.patch)
        kernel = weights.tensor(TensorSlice(f"{root}patch_embed.proj.weight", size))
        bias = reader.bias("patch_embed.proj", shape.width)
        self._patches = operators.linear([kernel.reshape(shape.width, -1)], bias)
        grid = (shape.positions**2, shape.width)
        self._positions = weights.tensor(TensorSlice(f"{root}pos_embed.weight", grid))
        self._mergers = {
            layer: self._merger(reader, f"deepstack_merger_list.{at}.", is_merged_first=True)
            for at, layer in enumerate(shape.added)
        }
        self._last = self._merger(reader, "merger.", is_merged_first=False)
        self._inverse = operators.constant(inverse_frequencies(shape.head_dim // 2, THETA))

    def begin(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderState:
        """With the angles of each patch's row and column."""
        frames, height, width = grid
        merge = self._shape.merge
        if frames != 1 or height % merge or width % merge:
            raise ValueError(f"an image of {frames} frames of {height} × {width} patches")
        both = torch.stack(_places(height, width, merge), dim=1).to(pixels.device)
        angles = (both[:, :, None].float() * self._inverse).flatten(1)
        turned = RopeAngles(angles.cos(), angles.sin())
        state = self.state(pixels, grid, self._shape.width, turned)
        size = (height * width // self._shape.block, self._shape.out_width)
        for layer in (*self._mergers, LAST):
            state.outputs[layer] = pixels.new_empty(size)
        return state

    def embed(self, state: EncoderState, rows: slice) -> Tensor:
        size = state.grid[1], state.grid[2]
        down, across = (each[rows] for each in _places(*size, self._shape.merge))
        places, shares = _resampled(down, across, size, self._shape.positions)
        learned = self._positions[places.to(state.hidden.device)].float()
        learned = (learned * shares.to(state.hidden.device)[:, :, None]).sum(1)
        hidden = self._patches(state.pixels[rows])
        return hidden + learned.to(hidden.dtype)

    def finished(self, state: EncoderState, layer: int, rows: slice) -> None:
        tokens = slice(rows.start // self._shape.block, rows.stop // self._shape.block)
        if layer in self._mergers:
            state.outputs[layer][tokens] = self._mergers[layer](state.hidden[rows])
        if layer == self._shape.num_layers - 1:
            state.outputs[LAST][tokens] = self._last(state.hidden[rows])

    def end(self, state: EncoderState) -> Encoding:
        added = tuple(state.outputs[layer] for layer in self._mergers)
        return Encoding(state.outputs[LAST], added)

    def _layer(self, reader: VisionReader, at: str) -> VisionLayer:
        width, inner = self._shape.width, self._shape.inner
        return VisionLayer(
            reader.norm(f"{at}norm1", width, EPS),
            reader.linear(f"{at}attn.qkv", 3 * width, width),
            reader.linear(f"{at}attn.proj", width, width),
            reader.norm(f"{at}norm2", width, EPS),
            reader.linear(f"{at}mlp.linear_fc1", inner, width),
            reader.linear(f"{at}mlp.linear_fc2", width, inner),
        )

    def _merger(self, reader: VisionReader, at: str, *, is_merged_first: bool) -> Merger:
        shape, width = self._shape, self._shape.width * self._shape.block
        return Merger(
            reader.norm(f"{at}norm", width if is_merged_first else shape.width, EPS),
            reader.linear(f"{at}linear_fc1", width, width),
            reader.linear(f"{at}linear_fc2", shape.out_width, width),
            width,
            is_merged_first,
        )


def _places(height: int, width: int, merge: int) -> tuple[Tensor, Tensor]:
    """The row and the column of each patch, those of a block one after the other."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    sizes = (height // merge, merge, width // merge, merge)
    return (
        rows.reshape(sizes).transpose(1, 2).flatten(),
        columns.reshape(sizes).transpose(1, 2).flatten(),
    )


def _resampled(
    rows: Tensor, columns: Tensor, size: tuple[int, int], side: int
) -> tuple[Tensor, Tensor]:
    """The four places of a square grid with `side` places along each side that are mixed for each
    patch, and their shares: bilinear interpolation in which the corners are the grid's own."""

    def along(places: Tensor, count: int) -> tuple[Tensor, Tensor]:
        at = places.float() * (side - 1) / max(count - 1, 1)
        floor = at.floor()
        taps = floor.long()[:, None] + torch.arange(2)
        distances = (at[:, None] - floor[:, None] - torch.arange(2)).abs()
        return taps.clamp(0, side - 1), (1 - distances).clamp(min=0)

    (down, down_shares), (across, across_shares) = along(rows, size[0]), along(columns, size[1])
    places = (down[:, :, None] * side + across[:, None, :]).flatten(1)
    return places, (down_shares[:, :, None] * across_shares[:, None, :]).flatten(1)
