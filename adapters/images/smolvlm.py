"""The images of SmolVLM and Idefics 3: rows of square tiles, then the whole image in one tile."""

import math

from PIL.Image import Image, Resampling

from adapters.images.processor import (
    HALVES,
    Piece,
    Settings,
    TileMaker,
    normalized,
    resampling,
    resized,
    section,
    whole,
)

MAX_SIDE = 4096
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
PLACES = range(1, 7)  # the rows and columns of tiles that have tokens


class SmolVLMProcessor:
    """Cuts an image into tiles. With too few tokens for its tiles, only the whole image is read."""

    placeholder = soft_token = "<image>"
    reserved = (
        "<image>",
        AROUND,
        WHOLE,
        *(f"<row_{row}_col_{column}>" for row in PLACES for column in PLACES),
    )

    def __init__(self, settings: Settings) -> None:
        config = settings.image
        self._longest = whole(section(config, "size"), "longest_edge", 4 * 364)
        self._side = whole(section(config, "max_image_size"), "longest_edge", 364)
        self._splits = config.get("do_image_splitting") is not False
        patch = whole(section(settings.model, "vision_config"), "patch_size", 14)
        shuffled = whole(settings.model, "scale_factor", 2) ** 2
        self._tile = TileMaker(
            height=self._side,
            width=self._side,
            patch=patch,
            num_tokens=whole(
                settings.processor, "image_seq_len", (self._side // patch) ** 2 // shuffled
            ),
            filter=resampling(config, Resampling.LANCZOS),
        )
        self.values = normalized(config, HALVES, HALVES)

    def process(self, image: Image, max_tokens: int) -> list[Piece]:
        """See `ImageProcessor`."""
        image = resized(image, *_within(image, self._longest), self._tile.filter)
        height, width = self._whole_tiles(image)
        rows, columns = height // self._side, width // self._side
        fits = (rows * columns + 1) * self._tile.num_tokens <= max_tokens
        if not self._splits or (rows, columns) == (1, 1) or not fits:
            return [AROUND + WHOLE, self._tile(image), AROUND]
        image = resized(image, height, width, self._tile.filter)
        pieces: list[Piece] = []
        for row in range(rows):
            for column in range(columns):
                left, upper = column * self._side, row * self._side
                box = (left, upper, left + self._side, upper + self._side)
                place = f"<row_{row + 1}_col_{column + 1}>"
                pieces += [AROUND + place, self._tile(image.crop(box))]
            pieces.append("\n")
        return [*pieces, "\n" + AROUND + WHOLE, self._tile(image), AROUND]

    def _whole_tiles(self, image: Image) -> tuple[int, int]:
        """The smallest size of whole tiles that contains the image."""
        ratio, side = image.width / image.height, self._side
        if image.width >= image.height:
            width = math.ceil(image.width / side) * side
            return math.ceil(int(width / ratio) / side) * side, width
        height = math.ceil(image.height / side) * side
        return height, math.ceil(int(height * ratio) / side) * side


def _within(image: Image, longest: int) -> tuple[int, int]:
    """Height and width of the image with such a longer side; the shorter one becomes even."""
    ratio = image.width / image.height
    if image.width >= image.height:
        width, height = longest, _even(int(longest / ratio))
    else:
        height, width = longest, _even(int(longest * ratio))
    height, width = max(height, 1), max(width, 1)
    if max(height, width) > MAX_SIDE:
        ratio = width / height
        if width >= height:
            return max(1, int(MAX_SIDE / ratio)), MAX_SIDE
        return MAX_SIDE, max(1, int(MAX_SIDE * ratio))
    return height, width


def _even(length: int) -> int:
    return length + length % 2
