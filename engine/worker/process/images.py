"""The images of a worker: their pixels, how far they are encoded, and their encodings.

Slices that a failed step left out are made up for by the next one. An encoder that raises ends its
image, not the step: the step's result says so, and the requests with the image fail. (On several
stages the first one has no result, so there the step fails.)
"""

import logging
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from engine.media import EncoderReport, ImagePixels
from engine.step import Step
from engine.worker.ports import EncoderPixels, EncoderState, Encoding, ImageEncoder

logger = logging.getLogger("engine.worker")


@dataclass(slots=True)
class _Image:
    """An image whose pixels arrive, are encoded, and then forgotten."""

    pixels: bytearray
    values: bytes
    num_arrived: int
    shape: tuple[int, ...]
    grid: tuple[int, int, int]
    state: EncoderState | None = None
    num_done: int = 0  # slices
    encoding: Encoding | None = None
    has_failed: bool = False


class WorkerImages:
    """Encodes images as steps say; without an encoder, as on later stages, it ignores them."""

    def __init__(
        self,
        encoder: ImageEncoder | None,
        report: EncoderReport | None,
        like: Tensor,
        *,
        reports_failures: bool,
    ) -> None:
        """`like` has the dtype and device that the encoder computes with."""
        self._encoder = encoder
        self._report = report
        self._like = like
        self._reports_failures = reports_failures
        self._images: dict[int, _Image] = {}

    def warm_up(self) -> None:
        """Compute slices of an image, whose kernels are compiled and in memory then: the first
        image of a request would keep all streams waiting for that."""
        if self._encoder is None:
            return
        assert self._report is not None, "it takes images"
        shape, grid = self._encoder.smallest
        levels = torch.zeros(shape, dtype=torch.uint8, device=self._like.device)
        pixels = EncoderPixels(levels, self._like.new_zeros((shape[1], 256)))
        state = self._encoder.begin(pixels, grid)
        for layer in (0, 1, self._report.num_layers):
            self._encoder.run_slice(state, layer * self._report.num_tiles(len(state.hidden)))
        self._encoder.end(state)

    def put(self, piece: ImagePixels) -> None:
        """A piece of an image's pixels has arrived; may be called in another thread than `run`."""
        if self._encoder is None:
            return
        if not piece.offset:
            pixels = bytearray(prod(piece.shape))
            self._images[piece.image] = _Image(pixels, piece.values, 0, piece.shape, piece.grid)
        image = self._images.get(piece.image)
        if image is None:  # its first pieces went to a worker that died
            return
        image.pixels[piece.offset : piece.offset + len(piece.data)] = piece.data
        image.num_arrived += len(piece.data)

    def run(self, step: Step) -> tuple[int, ...]:
        """Forget and encode what the step says; returns the images that failed."""
        for number in step.dropped:
            self._images.pop(number, None)
        if self._encoder is None:
            return ()
        for number, _, stop in step.encodes:
            self._advance(number, stop)
        return tuple(work.image for work in step.encodes if self._images[work.image].has_failed)

    def encoding(self, number: int) -> Encoding | None:
        """The encoding of an image; None if its encoder failed, so that its requests will.

        Raises `ValueError` for an image that is not known.
        """
        self._advance(number, None)
        return self._images[number].encoding

    def _advance(self, number: int, stop: int | None) -> None:
        """Compute the slices up to `stop`, or all, that are not computed yet."""
        image = self._images.get(number)
        if image is None:
            raise ValueError(f"image {number} is not known")
        if image.encoding is not None or image.has_failed:
            return
        try:
            self._compute(image, stop)
        except Exception:
            if not self._reports_failures:
                raise
            logger.exception("image %d could not be encoded", number)
            image.state, image.pixels, image.has_failed = None, bytearray(), True

    def _compute(self, image: _Image, stop: int | None) -> None:
        assert self._encoder is not None, "it takes images"
        assert self._report is not None, "it takes images"
        if image.num_arrived != len(image.pixels):
            raise ValueError("the image has too few pixels")
        if image.state is None:
            image.state = self._encoder.begin(self._pixels(image), image.grid)
        total = self._report.num_slices(len(image.state.hidden))
        for number in range(image.num_done, total if stop is None else stop):
            self._encoder.run_slice(image.state, number)
            image.num_done = number + 1
        if image.num_done == total:
            image.encoding = self._encoder.end(image.state)
            image.state, image.pixels, image.num_arrived = None, bytearray(), 0

    def _pixels(self, image: _Image) -> EncoderPixels:
        levels = torch.frombuffer(image.pixels, dtype=torch.uint8).view(image.shape)
        values = torch.frombuffer(bytearray(image.values), dtype=torch.float32).view(-1, 256)
        return EncoderPixels(levels.to(self._like.device), values.to(self._like))
