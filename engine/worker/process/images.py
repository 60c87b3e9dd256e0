"""The images of a worker: their pixels, how far they are encoded, and their encodings."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.media import EncoderReport, ImagePixels
from engine.step import Step
from engine.worker.ports import EncoderState, Encoding, ImageEncoder


@dataclass(slots=True)
class _Image:
    """An image whose pixels arrive, are encoded, and then forgotten."""

    pixels: bytearray
    num_arrived: int
    shape: tuple[int, ...]
    grid: tuple[int, int, int]
    state: EncoderState | None = None
    encoding: Encoding | None = None


class WorkerImages:
    """Encodes images as steps say; without an encoder, as on later stages, it ignores them."""

    def __init__(
        self, encoder: ImageEncoder | None, report: EncoderReport | None, like: Tensor
    ) -> None:
        """`like` has the dtype and device that the encoder computes with."""
        self._encoder = encoder
        self._report = report
        self._like = like
        self._images: dict[int, _Image] = {}

    def put(self, piece: ImagePixels) -> None:
        """A piece of an image's pixels has arrived; may be called in another thread than `run`."""
        if self._encoder is None:
            return
        if not piece.offset:
            size = 4 * int(np.prod(piece.shape))
            self._images[piece.image] = _Image(bytearray(size), 0, piece.shape, piece.grid)
        image = self._images.get(piece.image)
        if image is None:  # its first pieces went to a worker that died
            return
        image.pixels[piece.offset : piece.offset + len(piece.data)] = piece.data
        image.num_arrived += len(piece.data)

    def run(self, step: Step) -> float:
        """Forget and encode what the step says; returns the seconds that slices took."""
        for number in step.dropped:
            self._images.pop(number, None)
        if self._encoder is None or self._report is None or not step.encodes:
            return 0.0
        began = time.monotonic()
        for number, start, stop in step.encodes:
            self._encode(self._encoder, self._report, number, range(start, stop))
        return time.monotonic() - began

    def encoding(self, image: int) -> Encoding:
        """Raises `ValueError` for an image that is not encoded."""
        known = self._images.get(image)
        if known is None or known.encoding is None:
            raise ValueError(f"image {image} is not encoded")
        return known.encoding

    def _encode(
        self, encoder: ImageEncoder, report: EncoderReport, number: int, slices: range
    ) -> None:
        image = self._images.get(number)
        if image is None or image.num_arrived != len(image.pixels):
            raise ValueError(f"image {number} has no pixels, or too few")
        if not slices.start:
            pixels = torch.frombuffer(image.pixels, dtype=torch.float32).view(image.shape)
            image.state = encoder.begin(pixels.to(self._like), image.grid)
        if image.state is None:
            raise ValueError(f"slice {slices.start} of image {number} is not the next one")
        for each in slices:
            encoder.run_slice(image.state, each)
        if slices.stop == report.num_slices(len(image.state.hidden)):
            image.encoding = encoder.end(image.state)
            image.state, image.pixels, image.num_arrived = None, bytearray(), 0
