"""What a prompt holds besides token ids: images for a model's encoder, and what workers are told
of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
F = TypeVar("F")


class Span(NamedTuple):
    """`length` tokens of a prompt, from position `start` on, that stand for other content, whose
    digest this is: the tokens are the same whatever they stand for."""

    start: int
    length: int
    digest: bytes


class Pixels(NamedTuple):
    """What an encoder reads of an image: a byte for each channel of each pixel, and the number
    that each of the 256 bytes stands for. Numbers would take four times the memory."""

    levels: "NDArray[np.uint8]"  # [patches, channels, patch size²] or [1, channels, height, width]
    values: "NDArray[np.float32]"  # [channels, 256]


@dataclass(frozen=True, slots=True)
class Media:
    """One image of a prompt, decoded and preprocessed for the model's encoder."""

    start: int  # position in the prompt of the first token that stands for the image
    num_tokens: int  # tokens that stand for it: the rows that the encoder gives
    digest: bytes  # SHA-256 of the canonical pixels, the processor's settings and the checkpoint
    pixels: Pixels
    grid: tuple[int, int, int]  # frames, rows and columns of patches

    @property
    def num_patches(self) -> int:
        """Patches of pixels, in which the encoder reads it."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + self.num_tokens

    @property
    def span(self) -> Span:
        """The tokens that stand for it, with its digest."""
        return Span(self.start, self.num_tokens, self.digest)

    def pieces(self, image: int) -> "Iterator[ImagePixels]":
        """Its pixels as messages to the workers, which know it by the number `image`."""
        levels, values = self.pixels
        rows = levels.reshape(-1)
        for first in range(0, len(rows), PIECE):
            data = rows[first : first + PIECE].tobytes()
            numbers = b"" if first else values.astype("<f4", copy=False).tobytes()
            yield ImagePixels(image, first, data, levels.shape, self.grid, numbers)


def replaced(
    items: "Iterable[T]", media: tuple[Media, ...], filler: F, start: int = 0
) -> "list[T | F]":
    """What belongs to the tokens of a prompt from position `start` on, with `filler` in the places
    of those that stand for images."""
    result: list[T | F] = [*items]
    for image in media:
        places = range(max(image.start - start, 0), min(image.end - start, len(result)))
        result[places.start : places.stop] = [filler] * len(places)
    return result


PIECE = 1 << 18  # bytes in one message, which takes less than 1 ms


class ImagePixels(NamedTuple):
    """The bytes of an image's pixels, of this `shape`, from `offset` on; the first message has the
    `values` that they stand for, as little-endian float32."""

    image: int
    offset: int
    data: bytes
    shape: tuple[int, ...]
    grid: tuple[int, int, int]
    values: bytes = b""


@dataclass(frozen=True, slots=True)
class EncoderReport:
    """What the control plane knows of a model's image encoder.

    An image is encoded in slices, each of `tile` patches in one layer; embedding the patches counts
    as one more layer. In a slice each patch takes `row_flops`, and `pair_flops` for every patch of
    the image. With `merge` a token stands for `merge` × `merge` patches and has positions along
    three axes (M-RoPE); 0: its positions are those of text. With `is_whole` the tokens of an image
    attend to each other, so that one step computes all of them that are not in the cache.
    """

    num_layers: int
    row_bytes: int  # the encoding of one token
    row_flops: int
    pair_flops: int
    tile: int
    merge: int = 0
    is_whole: bool = False

    def num_tiles(self, num_patches: int) -> int:
        """Slices of a layer."""
        return -(-num_patches // self.tile)

    def num_slices(self, num_patches: int) -> int:
        """Slices of an image."""
        return (1 + self.num_layers) * self.num_tiles(num_patches)

    def flops(self, num_patches: int) -> float:
        """Operations of one slice."""
        return min(self.tile, num_patches) * (self.row_flops + self.pair_flops * num_patches)


class ImageRows(NamedTuple):
    """Tokens of an entry, from number `offset` on, that stand for rows of an encoded image."""

    image: int  # its number, from `EncoderWork`
    offset: int
    first: int  # row
    num_rows: int


class EntryMedia(NamedTuple):
    """What the images of a request mean for an entry.

    Embeddings of the tokens in `rows` are replaced by rows of the encoder's output. The position
    that RoPE turns a token by is its own plus `shift`, unless there are `positions`: three for each
    token, all of the first axis before those of the second, as little-endian int32.
    """

    rows: tuple[ImageRows, ...] = ()
    shift: int = 0
    positions: bytes = b""


class EncoderWork(NamedTuple):
    """Slices `[start, stop)` of an image, whose pixels the workers have, in the encoder."""

    image: int
    start: int
    stop: int
