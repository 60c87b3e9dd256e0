"""The images of Gemma 3: squares of one size, whatever the image's shape."""

from typing import TYPE_CHECKING

import numpy as np
from PIL.Image import Resampling

from adapters.images.processor import (
    Normalization,
    Piece,
    Settings,
    Tile,
    resampling,
    resized,
    section,
    whole,
)

if TYPE_CHECKING:
    from PIL.Image import Image

HALVES = (0.5, 0.5, 0.5)


class Gemma3Processor:
    """One square per image. Pan and scan, which adds crops, is not done, as by default."""

    placeholder = "<start_of_image>"
    soft_token = "<image_soft_token>"
    reserved = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")

    def __init__(self, settings: Settings) -> None:
        config, size = settings.image, section(settings.image, "size")
        self._sides = whole(size, "height", 224), whole(size, "width", 224)
        self._patch = whole(section(settings.model, "vision_config"), "patch_size", 14)
        num_tokens = whole(settings.model, "mm_tokens_per_image", 256)
        self._num_tokens = whole(settings.processor, "image_seq_length", num_tokens)
        self._filter = resampling(config, Resampling.BILINEAR)
        self._normalization = Normalization.of(config, HALVES, HALVES)

    def process(self, image: "Image", max_tokens: int) -> list[Piece]:
        """See `ImageProcessor`; every image has the same number of tokens."""
        height, width = self._sides
        pixels = np.asarray(resized(image, height, width, self._filter))
        grid = (1, height // self._patch, width // self._patch)
        tile = Tile(self._normalization.planes(pixels)[None], grid, self._num_tokens)
        return ["\n\n<start_of_image>", tile, "<end_of_image>\n\n"]
