"""What a prompt holds besides token ids: the images that a model's encoder reads."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Media:
    """One image of a prompt, decoded and preprocessed for the model's encoder."""

    start: int  # position in the prompt of the first token that stands for the image
    num_tokens: int  # tokens that stand for it: the rows that the encoder gives
    digest: bytes  # SHA-256 of the canonical pixels, the processor's settings and the checkpoint
    pixels: NDArray[
        np.float32
    ]  # [patches, channels · patch size²] or [tiles, channels, height, width]
    grid: tuple[int, int, int]  # frames, rows and columns of patches

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + self.num_tokens
