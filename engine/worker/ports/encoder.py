"""Image encoders (vision towers): an image is encoded layer by layer, beside the steps' tokens."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.media import EncoderReport
from engine.worker.ports.operators import Operators
from engine.worker.ports.weights import WeightSource


@dataclass(slots=True)
class EncoderState:
    """An image between two layers of the encoder."""

    hidden: Tensor  # [patches, width]
    cos: Tensor | None = None  # of RoPE over rows and columns, [patches, head_dim / 2]
    sin: Tensor | None = None
    outputs: tuple[Tensor, ...] = ()  # of layers whose results are added behind decoder layers


class Encoding(NamedTuple):
    """An encoded image: a row for each token that stands for it.

    `embeddings` replace the tokens' embeddings; each of `added` is added to the hidden states
    behind one of the decoder's first layers (DeepStack).
    """

    embeddings: Tensor  # [tokens, hidden]
    added: tuple[Tensor, ...] = ()


class ImageEncoder(Protocol):
    """The encoder of a model. Its results depend on one image only."""

    def begin(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderState:
        """The state before the first layer."""
        ...

    def layer(self, state: EncoderState, number: int) -> None:
        """Compute one layer; changes the state."""
        ...

    def end(self, state: EncoderState) -> Encoding:
        """The encoding, from the state behind the last layer."""
        ...


class BuildsEncoder(Protocol):
    """A family whose checkpoints have an image encoder."""

    @property
    def encoder(self) -> EncoderReport | None:
        """The encoder that config.json describes; None without one."""
        ...

    @property
    def encoder_root(self) -> str:
        """What the names of all its tensors begin with."""
        ...

    def build_encoder(self, weights: WeightSource, operators: Operators) -> ImageEncoder: ...
