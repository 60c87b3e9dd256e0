"""UvicornServer: the lifecycle of uvicorn without its signal handlers and sockets."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

DATE_SECONDS = 1.0  # the date header is not renewed for so long


class UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers, and without a look at `should_exit` ten times per
    second; `listens` is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()
        self._exits = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    async def main_loop(self) -> None:
        """Renew the date header until `exit` is called."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exits.wait(), DATE_SECONDS)

    def exit(self) -> None:
        """End `serve` once the open responses are complete."""
        self.should_exit = True
        self._exits.set()
