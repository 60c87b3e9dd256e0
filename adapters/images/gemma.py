"""The images of Gemma 3: squares of one size, whatever the image's shape. Those of Gemma 4: patches
of the image in its ratio, of about as many tokens for each."""

import math

import numpy as np
from PIL.Image import Image, Resampling

from adapters.images.processor import (
    HALVES,
    Piece,
    Settings,
    Tile,
    TileMaker,
    normalized,
    resampling,
    resized,
    section,
    whole,
)
from gateway.ports import UnreadableImage


class Gemma3Processor:
    """One square per image. Pan and scan, which adds crops, is not done, as by default."""

    placeholder = "<start_of_image>"
    soft_token = "<image_soft_token>"
    reserved = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")

    def __init__(self, settings: Settings) -> None:
        config, size = settings.image, section(settings.image, "size")
        num_tokens = whole(settings.model, "mm_tokens_per_image", 256)
        self._tile = TileMaker(
            height=whole(size, "height", 224),
            width=whole(size, "width", 224),
            patch=whole(section(settings.model, "vision_config"), "patch_size", 14),
            num_tokens=whole(settings.processor, "image_seq_length", num_tokens),
            filter=resampling(config, Resampling.BILINEAR),
        )
        self.values = normalized(config, HALVES, HALVES)

    def process(self, image: Image, max_tokens: int) -> list[Piece]:
        """See `ImageProcessor`; every image has the same number of tokens."""
        return ["\n\n<start_of_image>", self._tile(image), "<end_of_image>\n\n"]


# As in Google's page "Gemma 4 Prompt Formatting", and in the converter in transformers that writes
# the tokenizer of published checkpoints.
BEGIN, END = "<|image>", "<image|>"


class Gemma4Processor:
    """Resizes an image to as many patches as its tokens allow, squares of which become tokens."""

    placeholder = soft_token = "<|image|>"
    reserved = (BEGIN, "<|image|>", END)

    def __init__(self, settings: Settings) -> None:
        config = settings.image
        self._patch = whole(config, "patch_size", 16)
        self._pool = whole(config, "pooling_kernel_size", 3)
        self._max_tokens = whole(config, "max_soft_tokens", 280)
        self._filter = resampling(config, Resampling.BICUBIC)
        self.values = normalized(config, (0.0,) * 3, (1.0,) * 3)

    def process(self, image: Image, max_tokens: int) -> list[Piece]:
        """See `ImageProcessor`."""
        side, patch = self._pool * self._patch, self._patch
        height, width = fitting(
            image.height, image.width, side, max(1, min(self._max_tokens, max_tokens))
        )
        levels = np.asarray(resized(image, height, width, self._filter))
        rows, columns = height // patch, width // patch
        blocks = levels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        patches = blocks.reshape(rows * columns, 3, patch**2)
        tile = Tile(patches, (1, rows, columns), height * width // side**2)
        return [BEGIN, tile, END]


def fitting(height: int, width: int, side: int, max_tokens: int) -> tuple[int, int]:
    """The largest size in multiples of `side`, of about this ratio, that has at most so many
    squares of it. Raises `UnreadableImage` for a ratio that has none."""
    factor = math.sqrt(max_tokens * side**2 / (height * width))
    rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    if not rows and not columns:
        raise UnreadableImage("has no size that has few enough tokens")
    if not rows:
        rows, columns = 1, min(width // height, max_tokens)
    elif not columns:
        rows, columns = min(height // width, max_tokens), 1
    return rows * side, columns * side
