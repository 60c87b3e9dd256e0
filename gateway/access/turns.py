"""ClientTurns: each client does one thing at a time, in order of arrival."""

import asyncio
from collections import deque


class ClientTurns:
    """The clients that have a turn, and those of their tasks that wait for the next one."""

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
