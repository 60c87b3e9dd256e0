"""Random weights written in llama.cpp's block formats, without a quantizer: any bits are a weight.

Scales are drawn so that the weights have a mean of zero and a standard deviation of `DEVIATION`.
"""

from collections.abc import Callable, Mapping

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
DEVIATION = 0.02
MEAN_FACTOR = 48  # of 32 to 63


def random_rows(rng: np.random.Generator, kind: Kind, rows: int, columns: int) -> Bytes:
    """The blocks of a matrix, `[rows, bytes of a row]`."""
    inputs, size = GGML_QUANT_SIZES[kind]
    count = rows * columns // inputs
    blocks = np.frombuffer(bytearray(rng.bytes(count * size)), np.uint8).reshape(count, size)
    WRITERS[kind](rng, blocks)
    return blocks.reshape(rows, -1)


def _put_halves(blocks: Bytes, at: int, values: NDArray[np.floating]) -> None:
    blocks[:, at : at + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def _signed(rng: np.random.Generator, count: int, scale: float) -> NDArray[np.floating]:
    """Scales of either sign: steps of -8 to 7 have a mean of their own."""
    return scale * rng.choice((-1.0, 1.0), count)


def _one_scale(levels: int) -> Callable[[np.random.Generator, Bytes], None]:
    """A float16 scale of uniform steps."""

    def write(rng: np.random.Generator, blocks: Bytes) -> None:
        scale = DEVIATION / (levels / 12**0.5)
        _put_halves(blocks, 0, _signed(rng, len(blocks), scale))

    return write


def _q6_k(rng: np.random.Generator, blocks: Bytes) -> None:
    factors = rng.integers(32, 64, (len(blocks), 16), np.int8)
    blocks[:, 192:208] = factors.view(np.uint8)
    _put_halves(blocks, 208, _signed(rng, len(blocks), DEVIATION / (64 / 12**0.5) / MEAN_FACTOR))


def _q4_k(rng: np.random.Generator, blocks: Bytes) -> None:
    """The minimum of each of 8 groups is half of its range."""
    scale = DEVIATION / (16 / 12**0.5) / MEAN_FACTOR
    _put_halves(blocks, 0, np.full(len(blocks), scale))
    _put_halves(blocks, 2, np.full(len(blocks), scale * 7.5))
    factors = rng.integers(32, 64, (len(blocks), 8), np.uint8)
    low = (factors[:, :4] & 63) | (factors[:, 4:] >> 4 << 6)
    blocks[:, 4:12] = np.concatenate((low, low), axis=1)
    blocks[:, 12:16] = (factors[:, 4:] & 15) * 17


def _q3_k(rng: np.random.Generator, blocks: Bytes) -> None:
    """Factors of 16 to 31: 48 to 63, less 32."""
    blocks[:, 104:108] = 0xFF
    _put_halves(blocks, 108, _signed(rng, len(blocks), DEVIATION / (8 / 12**0.5) / 24))


def _iq4_xs(rng: np.random.Generator, blocks: Bytes) -> None:
    """The same factors, of numbers with a mean square of 67²."""
    blocks[:, 2:4] = 0xFF
    _put_halves(blocks, 0, _signed(rng, len(blocks), DEVIATION / 67 / 24))


def _mxfp4(rng: np.random.Generator, blocks: Bytes) -> None:
    """Scales are powers of two: 2^-8 and 2^-7 in this share give the deviation."""
    blocks[:, 0] = rng.choice(np.array((119, 120), np.uint8), len(blocks), p=(0.32, 0.68))


def _float32(rng: np.random.Generator, blocks: Bytes) -> None:
    values = rng.standard_normal(len(blocks), np.float32) * np.float32(DEVIATION)
    blocks[:] = values.view(np.uint8).reshape(-1, 4)


def _bfloat16(rng: np.random.Generator, blocks: Bytes) -> None:
    values = rng.standard_normal(len(blocks), np.float32) * np.float32(DEVIATION)
    blocks[:] = values.view(np.uint8).reshape(-1, 4)[:, 2:]


WRITERS: Mapping[Kind, Callable[[np.random.Generator, Bytes], None]] = {
    Kind.Q4_0: _one_scale(16),
    Kind.Q8_0: _one_scale(256),
    Kind.Q3_K: _q3_k,
    Kind.Q4_K: _q4_k,
    Kind.Q6_K: _q6_k,
    Kind.IQ4_XS: _iq4_xs,
    Kind.MXFP4: _mxfp4,
    Kind.BF16: _bfloat16,
    Kind.F32: _float32,
}
