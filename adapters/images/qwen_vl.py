"""The images of Qwen2-VL to Qwen3.5: patches of the image in about its own size."""

import math

import numpy as np
from PIL.Image import Image, Resampling

from adapters.images.processor import (
    Config,
    Levels,
    Piece,
    Settings,
    Tile,
    normalized,
    number,
    resampling,
    resized,
    section,
    whole,
)
from gateway.ports import UnreadableImage

MAX_RATIO = 200  # the longer side divided by the shorter one
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280  # unless the checkpoint says otherwise


class QwenVLProcessor:
    """Resizes an image to whole merged patches and lists its patches, merged ones together."""

    placeholder = soft_token = "<|image_pad|>"
    reserved = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

    def __init__(self, settings: Settings) -> None:
        config = settings.image
        size = section(config, "size")
        self._patch = whole(config, "patch_size", 14)
        self._merge = whole(config, "merge_size", 2)
        smallest = number(size, "shortest_edge", number(size, "min_pixels", MIN_PIXELS))
        largest = number(size, "longest_edge", number(size, "max_pixels", MAX_PIXELS))
        self._min_pixels = int(number(config, "min_pixels", smallest))
        self._max_pixels = int(number(config, "max_pixels", largest))
        self._filter = resampling(config, Resampling.BICUBIC)
        self.values = normalized(config, CLIP_MEAN, CLIP_DEVIATION)

    def process(self, image: Image, max_tokens: int) -> list[Piece]:
        """See `ImageProcessor`."""
        factor = self._patch * self._merge
        max_pixels = min(self._max_pixels, max_tokens * factor * factor)
        min_pixels = min(self._min_pixels, max_pixels)
        height, width = smart_size(image.height, image.width, factor, min_pixels, max_pixels)
        levels = np.asarray(resized(image, height, width, self._filter))
        rows, columns = height // self._patch, width // self._patch
        num_tokens = rows * columns // self._merge**2
        return [Tile(self._patches(levels, rows, columns), (1, rows, columns), num_tokens)]

    def _patches(self, levels: Levels, rows: int, columns: int) -> Levels:
        """The patches `[rows · columns, channels, patch²]`."""
        merge, patch = self._merge, self._patch
        shape = (rows // merge, merge, patch, columns // merge, merge, patch, 3)
        blocks = levels.reshape(shape).transpose(0, 3, 1, 4, 6, 2, 5)
        return blocks.reshape(rows * columns, 3, patch**2)


def smart_size(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The nearest size with sides that are multiples of `factor`, about the same ratio, and a
    number of pixels within these bounds. Raises `UnreadableImage` for a ratio that has none."""
    if max(height, width) > MAX_RATIO * min(height, width):
        raise UnreadableImage(f"is more than {MAX_RATIO} times as long as it is wide")
    sides = round(height / factor) * factor, round(width / factor) * factor
    if sides[0] * sides[1] > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        sides = _floor(height / scale, factor), _floor(width / scale, factor)
    elif sides[0] * sides[1] < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        sides = _ceil(height * scale, factor), _ceil(width * scale, factor)
    return sides


def _floor(length: float, factor: int) -> int:
    return max(factor, math.floor(length / factor) * factor)


def _ceil(length: float, factor: int) -> int:
    return math.ceil(length / factor) * factor


def settings_of(model: Config) -> dict[str, object]:
    """The image settings of a checkpoint that has none, such as one with random weights: those
    that its family is published with."""
    vision = section(model, "vision_config")
    patch, merge = whole(vision, "patch_size", 14), whole(vision, "spatial_merge_size", 2)
    settings: dict[str, object] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": whole(vision, "temporal_patch_size", 2),
    }
    if str(model.get("model_type", "")).startswith("qwen2"):
        return {**settings, "size": {"shortest_edge": MIN_PIXELS, "longest_edge": 12845056}}
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return {**settings, **halves, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
