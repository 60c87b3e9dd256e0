"""The images of Gemma 3: squares of one size, whatever the image's shape."""

from typing import TYPE_CHECKING

from PIL.Image import Resampling

from adapters.images.processor import (
    HALVES,
    Piece,
    Settings,
    TileMaker,
    normalized,
    resampling,
    section,
    whole,
)

if TYPE_CHECKING:
    from PIL.Image import Image


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

    def process(self, image: "Image", max_tokens: int) -> list[Piece]:
        """See `ImageProcessor`; every image has the same number of tokens."""
        return ["\n\n<start_of_image>", self._tile(image), "<end_of_image>\n\n"]
