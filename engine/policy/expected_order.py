"""Turns: who is expected to run how soon, for policies that know no more than their order."""

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.request import Request


def by_place(order: "Iterable[Request]", requests: "Sequence[Request]") -> list[float]:
    """The place of each request in the order; whoever is not in it never runs."""
    places = {request: float(place) for place, request in enumerate(order)}
    return [places.get(request, inf) for request in requests]
