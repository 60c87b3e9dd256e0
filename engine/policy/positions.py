"""Positions in a policy's order: `next_scheduled_times` of policies that know nothing better."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.policy.port import SortKey


def positions(keys: "Sequence[SortKey]") -> list[float]:
    """The position of each key among all of them when sorted, from 0."""
    found = [0.0] * len(keys)
    for position, index in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
        found[index] = float(position)
    return found
