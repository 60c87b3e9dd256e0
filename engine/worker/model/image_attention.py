"""Attention in which the tokens of an image attend to each other, by a backend that cannot do it.

Few steps have tokens of images: another backend, which reads the same cache, computes these.
"""

from collections.abc import Callable

from torch import Tensor

from engine.worker.ports import AttentionBackend, CapturableAttention, RaggedLayout


def beside_images(usual: AttentionBackend, of_images: AttentionBackend) -> AttentionBackend:
    """Attention by `of_images` in steps with tokens of images, and else by the `usual` backend."""
    if isinstance(usual, CapturableAttention):
        return CapturableImageAttention(usual, of_images)
    return ImageAttention(usual, of_images)


class ImageAttention:
    """An `AttentionBackend` of two."""

    def __init__(self, usual: AttentionBackend, of_images: AttentionBackend) -> None:
        self._usual = usual
        self._of_images = of_images
        self.run: Callable[..., Tensor] = usual.run  # the backend that was planned last

    def plan(self, layout: RaggedLayout) -> None:
        planned = self._of_images if layout.encoded else self._usual
        planned.plan(layout)
        self.run = planned.run


class CapturableImageAttention(ImageAttention):
    """The usual backend can be captured in CUDA graphs, which hold no tokens of images."""

    def __init__(self, usual: CapturableAttention, of_images: AttentionBackend) -> None:
        super().__init__(usual, of_images)
        self._capturable = usual

    def plan_captured(self, layout: RaggedLayout) -> tuple[int, ...]:
        self.run = self._capturable.run
        return self._capturable.plan_captured(layout)
