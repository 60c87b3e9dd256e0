"""How much costly work runs at once: for all clients and for each (`Seats`), or one thing at a time
for each client (`ClientTurns`)."""

import asyncio
from collections import deque
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


class ClientTurns:
    """Each client does one thing at a time, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # clients that have a turn

    def __len__(self) -> int:
        """Clients that have a turn."""
        return len(self._waiting)

    async def take(self, client: str) -> None:
        """Wait for a turn of this client, which must be given back."""
        if client not in self._waiting:
            self._waiting[client] = deque()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[client].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(client)
            raise

    def give_back(self, client: str) -> None:
        """The client's turn has ended: the next of its tasks may continue."""
        queue = self._waiting[client]
        while queue:
            turn = queue.popleft()
            if not turn.done():  # its task was not cancelled
                turn.set_result(None)
                return
        del self._waiting[client]
