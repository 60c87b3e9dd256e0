"""What the image processors of all families have in common.

Pixels equal those of transformers' processors over Pillow to the bit. Those over torchvision resize
in another way: Qwen-VL's differ by two of 256 levels at most (`tests/adapters/images`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image, Resampling

Config = Mapping[str, object]
Levels = NDArray[np.uint8]


class Settings(NamedTuple):
    """A checkpoint's files about images; missing ones are empty."""

    image: Config  # the image processor's settings
    processor: Config  # the settings of the processor of images and texts
    model: Config  # config.json


class Tile(NamedTuple):
    """An image, or a part of it, that the encoder reads at once."""

    levels: Levels  # as in `engine.media.Pixels`
    grid: tuple[int, int, int]
    num_tokens: int


Piece = str | Tile
HALVES = (0.5, 0.5, 0.5)  # means and deviations of families with SigLIP


class ImageProcessor(Protocol):
    """Prepares images for one checkpoint, with the same results as its processor in transformers.

    The chat template writes `placeholder` where an image is. A tile is as many tokens `soft_token`.
    """

    @property
    def placeholder(self) -> str: ...

    @property
    def soft_token(self) -> str: ...

    @property
    def values(self) -> NDArray[np.float32]:
        """What the levels stand for, as in `engine.media.Pixels`."""

    @property
    def reserved(self) -> Sequence[str]:
        """The tokens around images, which the text of a message must not become."""

    def process(self, image: Image, max_tokens: int) -> list[Piece]:
        """What replaces the placeholder of an RGB image: texts, and tiles of at most `max_tokens`
        tokens together, unless its smallest form has more. Raises `UnreadableImage`."""


def normalized(
    config: Config, mean: Sequence[float], deviation: Sequence[float]
) -> NDArray[np.float32]:
    """The values `(level · scale - mean) / deviation` of all levels, `[channels, 256]`, by the
    settings of a checkpoint; `mean` and `deviation` are the family's defaults."""
    levels = np.arange(256, dtype=np.uint8)
    factor = number(config, "rescale_factor", 1 / 255)
    floats = (levels.astype(np.float64) * factor).astype(np.float32)
    if config.get("do_rescale") is False:
        floats = levels.astype(np.float32)
    values = np.stack([floats] * 3)
    if config.get("do_normalize") is not False:
        means = np.array(config.get("image_mean") or mean, dtype=np.float32)
        deviations = np.array(config.get("image_std") or deviation, dtype=np.float32)
        values = (values - means[:, None]) / deviations[:, None]
    return values


@dataclass(frozen=True, slots=True)
class TileMaker:
    """Makes a tile of one size of an image, whatever the image's shape."""

    height: int
    width: int
    patch: int
    num_tokens: int
    filter: Resampling

    def __call__(self, image: Image) -> Tile:
        """The whole image in this size."""
        levels = np.asarray(resized(image, self.height, self.width, self.filter))
        grid = (1, self.height // self.patch, self.width // self.patch)
        return Tile(levels.transpose(2, 0, 1)[None], grid, self.num_tokens)


def resized(image: Image, height: int, width: int, resample: Resampling) -> Image:
    """The image in another size, as Pillow computes it."""
    return image.resize((width, height), resample=resample)


def resampling(config: Config, default: Resampling) -> Resampling:
    """The filter that a checkpoint names."""
    value = config.get("resample")
    return Resampling(value) if isinstance(value, int) else default


def number(config: Config, name: str, default: float) -> float:
    """A number of a config."""
    value = config.get(name)
    return value if isinstance(value, int | float) else default


def whole(config: Config, name: str, default: int) -> int:
    """A whole number of a config."""
    return int(number(config, name, default))


def section(config: Config, name: str) -> Config:
    """An object in a config; empty if it has none."""
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}
