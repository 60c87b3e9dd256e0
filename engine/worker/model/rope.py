"""The frequencies of RoPE and their scalings, and the angles of a step's positions.

Sources: RoPE (Su et al., arXiv:2104.09864), YaRN (Peng et al., arXiv:2309.00071), LongRoPE (Ding et
al., arXiv:2402.13753). Frequencies are float32 `[rotated / 2]`, fastest first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.worker.ports import RopeAngles

Scaling = Callable[[Tensor], Tensor]  # a function of frequencies


@dataclass(frozen=True, slots=True)
class Rope:
    """One kind of RoPE. Cosines and sines are multiplied by `magnitude` (YaRN, LongRoPE).

    With `axes` a token has three positions (M-RoPE), of which each frequency is turned by one.
    """

    inverse: Tensor  # frequencies, [rotated / 2]
    magnitude: float = 1.0
    axes: Tensor | None = None  # int64 [rotated / 2]

    def using(self, constant: Callable[[Tensor], Tensor]) -> "Rope":
        """The same with its frequencies where `Operators.constant` puts them."""
        axes = None if self.axes is None else constant(self.axes)
        return Rope(constant(self.inverse), self.magnitude, axes)

    def angles(self, positions: Tensor) -> RopeAngles:
        """The angles at `positions` `[tokens]`, or `[3, tokens]` with images among them."""
        if positions.dim() == 2:
            assert self.axes is not None, "only M-RoPE has three positions"
            positions = positions.index_select(0, self.axes).t().contiguous()
        angles = rope_angles(positions, self.inverse)
        if self.magnitude == 1.0:
            return angles
        return RopeAngles(angles.cos * self.magnitude, angles.sin * self.magnitude)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of the low frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __call__(self, inverse: Tensor) -> Tensor:
        wavelength = 2 * math.pi / inverse
        rotations = self.original_max_positions / wavelength
        share = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = share.clamp(0.0, 1.0)
        return (1 - share) * inverse / self.factor + share * inverse


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions divided by `factor`."""

    factor: float

    def __call__(self, inverse: Tensor) -> Tensor:
        return inverse / self.factor


@dataclass(frozen=True, slots=True)
class GivenScaling:
    """Each frequency divided by its own factor, `[rotated / 2]`."""

    factors: tuple[float, ...]

    def __call__(self, inverse: Tensor) -> Tensor:
        return inverse / torch.tensor(self.factors)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Frequencies of few rotations are divided by `factor`, those of many are kept (section 3.2).

    `theta` is RoPE's base; between `beta_slow` and `beta_fast` rotations over the original
    positions the two are mixed. `is_truncated`: the ends of that range are rounded outwards.
    """

    factor: float
    theta: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True

    def __call__(self, inverse: Tensor) -> Tensor:
        dim = 2 * len(inverse)
        low, high = self._index(self.beta_fast, dim), self._index(self.beta_slow, dim)
        if self.is_truncated:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high += 0.001 if low == high else 0.0
        share = ((torch.arange(len(inverse), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return inverse / self.factor * share + inverse * (1 - share)

    def _index(self, rotations: float, dim: int) -> float:
        """The frequency that makes so many rotations over the original positions."""
        length = self.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(self.theta))


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """`0.1 * weight * ln(factor) + 1` (section 3.4), 1 for factors up to 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def longrope_magnitude(factor: float, original_max_positions: int) -> float:
    """`sqrt(1 + ln(factor) / ln(original positions))`, 1 for factors up to 1."""
    if factor <= 1 or original_max_positions <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_max_positions))


def inverse_frequencies(dim: int, theta: float, scaling: Scaling | None = None) -> Tensor:
    """Frequencies `[dim / 2]` of the base `theta`."""
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return inverse if scaling is None else scaling(inverse)


def proportional_frequencies(dim: int, share: float, theta: float) -> Tensor:
    """Frequencies `[dim / 2]` of which only the first `share` are not zero (Gemma 4)."""
    inverse = inverse_frequencies(dim, theta)
    inverse[int(share * dim // 2) :] = 0.0
    return inverse


def interleaved_axes(sections: Sequence[int], num_frequencies: int) -> Tensor:
    """The axis of each frequency where sections are interleaved (Qwen3-VL): 0 1 2 0 1 2 …, as long
    as the axis has some left; then 0."""
    axes = torch.arange(num_frequencies) % 3
    bounds = 3 * torch.tensor([num_frequencies, *sections[1:]])
    return torch.where(torch.arange(num_frequencies) < bounds[axes], axes, 0)


def sectioned_axes(sections: Sequence[int]) -> Tensor:
    """The axis of each frequency where each axis has a section (Qwen2.5-VL)."""
    return torch.repeat_interleave(torch.arange(3), torch.tensor(sections))


def rope_angles(positions: Tensor, inverse: Tensor) -> RopeAngles:
    """RoPE angles at `positions` `[tokens]` from frequencies `inverse` `[rotated / 2]`; or at
    `[tokens, rotated / 2]`, a position for each frequency."""
    each = positions if positions.dim() == 2 else positions[:, None]
    angles = each.to(torch.float32) * inverse
    return RopeAngles(angles.cos(), angles.sin())
