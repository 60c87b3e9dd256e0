"""Images for tests that do not look at them."""

import numpy as np

from engine.media import Pixels


def blank(*shape: int) -> Pixels:
    """Black pixels of this shape: patches, channels, and pixels of a patch."""
    values = np.zeros((shape[1] if shape else 1, 256), dtype=np.float32)
    return Pixels(np.zeros(shape or 0, dtype=np.uint8), values)
