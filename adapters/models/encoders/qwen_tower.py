"""What the image encoders of all Qwen models have in common: a vision transformer with RoPE over
rows and columns, in which blocks of 2 × 2 patches, which follow one another, become one token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from adapters.models.base.fields import Fields
from adapters.models.encoders.vision_transformer import (
    TILE,
    EncoderShape,
    VisionLayer,
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
)

EPS = 1e-6
THETA = 10000.0
LAST = -1  # in `EncoderState.outputs`: what replaces embeddings


@dataclass(frozen=True, slots=True)
class TowerShape(EncoderShape):
    """The sizes in `vision_config`."""

    channels: int
    patch: int
    frames: int  # frames per patch: an image is repeated as if it were a film
    merge: int

    @classmethod
    def read(cls, fields: Fields, hidden_size: int, *, patch: int = 16) -> "TowerShape":
        """`patch` is the family's default. Raises `StartupError` for a field that is not
        supported."""
        width, heads = fields.integer("hidden_size"), fields.integer("num_heads")
        shape = cls(
            num_layers=fields.layers("depth"),
            width=width,
            inner=fields.integer("intermediate_size"),
            num_heads=heads,
            channels=fields.integer("in_channels", fields.integer("in_chans", 3)),
            patch=fields.integer("patch_size", patch),
            frames=fields.integer("temporal_patch_size", 2),
            merge=fields.integer("spatial_merge_size", 2),
            out_width=fields.integer("out_hidden_size"),
        )
        if width % (4 * heads):
            raise StartupError(
                f"{fields.where}: num_heads={heads} times 4 does not divide hidden_size={width}"
            )
        if TILE % shape.block:
            raise StartupError(
                f"{fields.where}: spatial_merge_size={shape.merge} does not divide {TILE} patches"
            )
        if shape.out_width != hidden_size:
            raise StartupError(
                f"{fields.where}: out_hidden_size={shape.out_width} is not the decoder's "
                f"hidden_size={hidden_size}"
            )
        return shape

    @property
    def block(self) -> int:
        """Patches that one token stands for."""
        return self.merge**2

    @property
    def kernel(self) -> tuple[int, ...]:
        """The shape of the convolution that embeds patches."""
        return (self.width, self.channels, self.frames, self.patch, self.patch)

    def report(self, num_added: int, num_matrices: int) -> EncoderReport:
        """What the control plane knows of it; see `EncoderShape.reported`."""
        return self.reported(num_matrices, num_added=num_added, merge=self.merge)


@dataclass(frozen=True, slots=True)
class Merger:
    """Merges blocks of patches into tokens. `is_merged_first`: the norm is over whole blocks."""

    norm: Norm
    up: Linear
    down: Linear
    width: int  # the input and output width of a block
    is_merged_first: bool = False

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[tokens, out width]` from `[patches, width]`."""
        if self.is_merged_first:
            blocks = self.norm(hidden.reshape(-1, self.width))
        else:
            blocks = self.norm(hidden).reshape(-1, self.width)
        return self.down(F.gelu(self.up(blocks)))


@dataclass(frozen=True, slots=True)
class TowerParts:
    """The layers, and the mergers of those whose results become tokens: `LAST` is the whole
    encoder."""

    layers: Sequence[VisionLayer]
    patches: Linear
    mergers: Mapping[int, Merger]


class QwenTower(VisionTransformer):
    """Subclasses may change the order in which the tokens of an image are computed."""

    def __init__(
        self,
        operators: Operators,
        shape: TowerShape,
        parts: TowerParts,
    ) -> None:
        super().__init__(operators, parts.layers, shape.num_heads)
        self._shape = shape
        self._patches = parts.patches
        self._mergers = parts.mergers
        self._inverse = operators.constant(inverse_frequencies(shape.head_dim // 2, THETA))

    @property
    def smallest(self) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        shape = self._shape
        size = (shape.block, shape.channels, shape.patch**2)
        return size, (1, shape.merge, shape.merge)

    def begin(self, pixels: EncoderPixels, grid: tuple[int, int, int]) -> EncoderState:
        """With the angles of each patch's row and column."""
        frames, height, width = grid
        merge = self._shape.merge
        if frames != 1 or height % merge or width % merge:
            raise ValueError(f"an image of {frames} frames of {height} × {width} patches")
        turned = angles_of(places(height, width, merge), self._inverse)
        state = self.state(pixels, grid, self._shape.width, turned)
        size = (height * width // self._shape.block, self._shape.out_width)
        for layer in self._mergers:
            state.outputs[layer] = pixels.values.new_empty(size)
        return state

    def embed(self, state: EncoderState, rows: slice) -> Tensor:
        frames = state.pixels.numbers(rows)[:, :, None].expand(-1, -1, self._shape.frames, -1)
        return self._patches(frames.flatten(1))

    def finished(self, state: EncoderState, layer: int, rows: slice) -> None:
        is_last = layer == self._shape.num_layers - 1
        numbers = [layer, LAST] if is_last else [layer]
        for number in numbers:
            if number in self._mergers:
                tokens = self.tokens(state, rows)
                state.outputs[number][tokens] = self._mergers[number](state.hidden[rows])

    def tokens(self, state: EncoderState, rows: slice) -> "slice | Tensor":
        """The tokens that stand for these patches, one after the other."""
        return slice(rows.start // self._shape.block, rows.stop // self._shape.block)

    def end(self, state: EncoderState) -> Encoding:
        added = tuple(state.outputs[layer] for layer in self._mergers if layer != LAST)
        return Encoding(state.outputs[LAST], added)
