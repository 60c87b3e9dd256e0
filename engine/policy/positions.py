"""Positions in a policy's order: `next_scheduled_times` of policies that know nothing better."""

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.request import Request


def positions(order: "Iterable[Request]", requests: "Sequence[Request]") -> list[float]:
    """The position of each request in the order, from 0; infinity if it is not in it."""
    found = {request: float(position) for position, request in enumerate(order)}
    return [found.get(request, inf) for request in requests]
