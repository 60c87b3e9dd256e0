"""Image encoders (vision towers): an image is encoded slice by slice, beside the steps' tokens."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.media import EncoderReport
from engine.worker.ports.attention import RopeAngles
from engine.worker.ports.operators import Operators
from engine.worker.ports.weights import WeightSource


class EncoderPixels(NamedTuple):
    """The pixels of an image, as in `engine.media.Pixels`, on the encoder's device."""

    levels: Tensor  # uint8, [patches, channels, patch size²] or [1, channels, height, width]
    values: Tensor  # [channels, 256], in the dtype that the encoder computes with

    def numbers(self, rows: slice) -> Tensor:
        """What the bytes of some patches stand for, `[rows, channels, patch size²]`."""
        levels = self.levels[rows]
        channels = torch.arange(len(self.values), dtype=torch.int32, device=levels.device)
        places = levels.int() + 256 * channels[:, None]
        return self.values.flatten().index_select(0, places.flatten()).view(levels.shape)


@dataclass(slots=True)
class EncoderState:
    """An image between two slices of the encoder."""

    pixels: EncoderPixels  # in the order of patches
    grid: tuple[int, int, int]
    hidden: Tensor  # [patches, width]
    qkv: Tensor  # the layer being computed, [patches, 3, heads, dim]
    next_qkv: Tensor  # the layer behind it, as far as it is known
    angles: RopeAngles | None = None  # angles of rows and columns, [patches, dim / 2]
    order: Tensor | None = None  # the token of each block of patches, if not their order
    window_ends: list[int] = field(default_factory=list)  # the end of each window, in patches
    outputs: dict[int, Tensor] = field(default_factory=dict)  # by layer, [tokens, hidden]


class Encoding(NamedTuple):
    """An encoded image: a row for each token that stands for it.

    `embeddings` replace the tokens' embeddings; each of `added` is added to the hidden states
    behind one of the decoder's first layers (DeepStack).
    """

    embeddings: Tensor  # [tokens, hidden]
    added: tuple[Tensor, ...] = ()


class ImageEncoder(Protocol):
    """The encoder of a model. Its results depend on one image only."""

    @property
    def smallest(self) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        """The shape of the levels of the smallest image's pixels, and its grid."""

    def begin(self, pixels: EncoderPixels, grid: tuple[int, int, int]) -> EncoderState:
        """The state before the first slice."""

    def run_slice(self, state: EncoderState, number: int) -> None:
        """Compute one slice; changes the state."""

    def end(self, state: EncoderState) -> Encoding:
        """The encoding, from the state behind the last slice."""


class BuildsEncoder(Protocol):
    """A family whose checkpoints have an image encoder."""

    @property
    def encoder(self) -> EncoderReport | None:
        """The encoder that config.json describes; None without one."""

    @property
    def encoder_roots(self) -> tuple[str, ...]:
        """What the names of all its tensors begin with; checkpoints differ in it."""

    def build_encoder(self, weights: WeightSource, operators: Operators) -> ImageEncoder: ...
