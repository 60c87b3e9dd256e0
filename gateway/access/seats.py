"""How much costly work runs at once, for all clients and for each."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from engine.errors import Overloaded


class Seats:
    """A bound on seats that are taken at once: `num_seats` of them, and one by each client."""

    def __init__(self, num_seats: int, wait_seconds: float, full: str) -> None:
        """`full` is the error's text where none is free within `wait_seconds`."""
        self._seats = asyncio.Semaphore(num_seats)
        self._client_seats: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._wait_seconds = wait_seconds
        self._full = full

    @asynccontextmanager
    async def taken(self, client: str) -> AsyncIterator[None]:
        """Take a seat while the block runs. Raises `Overloaded`."""
        client_seat = self._client_seats.setdefault(client, asyncio.Semaphore(1))
        held: list[asyncio.Semaphore] = []
        try:
            try:
                async with asyncio.timeout(self._wait_seconds):
                    for seat in (client_seat, self._seats):
                        await seat.acquire()
                        held.append(seat)
            except TimeoutError as error:
                raise Overloaded(self._full, retry_after=self._wait_seconds) from error
            yield
        finally:
            for seat in held:
                seat.release()
