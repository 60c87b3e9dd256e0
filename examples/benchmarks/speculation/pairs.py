"""The median of ratios of pairs of runs, and how well it is known."""

from collections.abc import Sequence
from math import comb

OUTSIDE = 0.05  # the largest probability that the median is outside the interval


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, from the order statistics; it assumes nothing of
    the distribution. With fewer than 6 values it is their whole range, which is less certain."""
    ordered, count = sorted(values), len(values)
    outside, skipped = 2 * 0.5**count, 0  # probability that all values are on one side
    while skipped + 1 < (count + 1) // 2:
        outside += 2 * comb(count, skipped + 1) * 0.5**count
        if outside > OUTSIDE:
            break
        skipped += 1
    return ordered[skipped], ordered[-1 - skipped]
