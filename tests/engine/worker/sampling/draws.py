"""Draws for tests of samplers."""

from collections.abc import Sequence

from engine.step import SamplingParams
from engine.worker.ports import Draw


def draws_of(samplings: Sequence[SamplingParams], points: Sequence[float]) -> list[Draw]:
    """A draw from each row."""
    pairs = zip(samplings, points, strict=True)
    return [Draw(row, sampling, point) for row, (sampling, point) in enumerate(pairs)]
