"""Blocks of llama.cpp's K formats, composed from their documented layout: `gguf` only reads them.

Each group is rounded to the nearest, without llama.cpp's search for better scales.
"""

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from engine.worker.weights.formats.llama_cpp import IQ4

BLOCK = 256
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantize_k(values: Floats, kind: Kind) -> Bytes:
    """Rows of a multiple of 256 floats as rows of blocks of one of `WRITERS`."""
    packed = WRITERS[kind](values.reshape(-1, BLOCK))
    return packed.reshape(len(values), -1)


def _halves(values: Floats) -> tuple[Bytes, Floats]:
    """Float16 as bytes `[blocks, 2]`, and the numbers that these stand for, `[blocks, 1]`."""
    halves = values.astype(np.float16)
    return halves.view(np.uint8).reshape(-1, 2), halves.astype(np.float32)[:, None]


def _q4_k(blocks: Floats) -> Bytes:
    """float16 scale and minimum, 12 bytes of 6-bit factors, 128 bytes of nibbles."""
    groups = blocks.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), 0)
    steps_of = (groups.max(axis=2) - low) / 15
    scale_bytes, scale = _halves(steps_of.max(axis=1) / 63)
    minimum_bytes, minimum = _halves((-low).max(axis=1) / 63)
    factors = np.clip(np.rint(steps_of / scale), 1, 63).astype(np.uint8)
    offsets = np.clip(np.rint(-low / minimum), 0, 63).astype(np.uint8)
    steps = np.rint((groups + (offsets * minimum)[..., None]) / (factors * scale)[..., None])
    nibbles = np.clip(steps, 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = [
        (factors[:, :4] & 63) | (factors[:, 4:] >> 4 << 6),
        (offsets[:, :4] & 63) | (offsets[:, 4:] >> 4 << 6),
        (factors[:, 4:] & 15) | (offsets[:, 4:] & 15) << 4,
    ]
    body = (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([scale_bytes, minimum_bytes, *packed, body], axis=1)


def _q6_k(blocks: Floats) -> Bytes:
    """128 bytes of low 4 bits, 64 of high 2 bits, 16 int8 factors, float16 scale."""
    groups = blocks.reshape(-1, 16, 16)
    steps_of = np.abs(groups).max(axis=2) / 31
    scale_bytes, scale = _halves(steps_of.max(axis=1) / 127)
    factors = np.clip(np.rint(steps_of / scale), 1, 127).astype(np.int8)
    steps = np.rint(groups / (factors * scale)[..., None])
    whole = (np.clip(steps, -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = whole & 15, whole >> 4
    nibbles = low[:, :, :2] | low[:, :, 2:] << 4
    pairs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [nibbles.reshape(-1, 128), pairs.reshape(-1, 64), factors.view(np.uint8), scale_bytes]
    return np.concatenate(parts, axis=1)


def _iq4_xs(blocks: Floats) -> Bytes:
    """float16 scale, 2 bytes of high 2 bits of factors and 4 of low 4 bits, 128 bytes of codes."""
    groups, table = blocks.reshape(-1, 8, 32), np.array(IQ4, np.float32)
    largest = np.abs(groups).max(axis=2) / table.max()
    scale_bytes, scale = _halves(largest.max(axis=1) / 31)
    factors = np.clip(np.rint(largest / scale), 1, 31).astype(np.uint8)
    numbers = groups / (factors * scale)[..., None]
    codes = np.abs(numbers[..., None] - table).argmin(axis=3).astype(np.uint8)
    stored = (factors + 32).reshape(-1, 4, 2)
    low = (stored[..., 0] & 15) | (stored[..., 1] & 15) << 4
    high = (stored >> 4).reshape(-1, 2, 4) << np.arange(0, 8, 2, dtype=np.uint8)
    body = (codes[..., :16] | codes[..., 16:] << 4).reshape(-1, 128)
    return np.concatenate([scale_bytes, high.sum(axis=2, dtype=np.uint8), low, body], axis=1)


WRITERS = {Kind.Q4_K: _q4_k, Kind.Q6_K: _q6_k, Kind.IQ4_XS: _iq4_xs}
