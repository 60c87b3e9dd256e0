"""`Ticked`: what many readers ask for and is costly to make is made at most once per tick."""

import asyncio
from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

from engine.ports import Clock

V = TypeVar("V")
TICK_SECONDS = 0.1


class Ticked(Generic[V]):
    """The results of `make`, each for all readers that asked during the tick before it.

    A result is made after its readers asked, at once if the last tick has ended. So it is never
    older than the question, and a reader that asks again and again gets one result per tick.
    """

    def __init__(self, make: Callable[[], V], clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._result: V  # from the first `get` on
        self._made_at = -inf

    async def get(self) -> V:
        """The next result."""
        asked_at = self._clock()
        delay = self._made_at + TICK_SECONDS - asked_at
        if delay > 0:
            await asyncio.sleep(delay)
        if self._made_at <= asked_at:  # else another reader has made it meanwhile
            self._result = self._make()
            self._made_at = self._clock()
        return self._result
