"""One worker's socket on the event loop: sends frames without blocking, receives messages."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import NamedTuple

from engine.transport.wire import (
    FrameReader,
    FromWorker,
    Goodbye,
    WireError,
    frame,
    read_from_worker,
)

RECEIVE_BYTES = 1 << 16


class ConnectionLost(NamedTuple):
    """Why a connection was lost; `is_closed` if the worker closed it, as it does when it ends."""

    message: str
    is_closed: bool


class WorkerConnection:
    """Reads and writes a non-blocking socket, which the caller owns, until `close`.

    `on_message` is called with each message and may raise `WireError`. `on_lost` is called once
    with the reason when the worker closes the connection or sends invalid data.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_message: Callable[[FromWorker], None],
        on_lost: Callable[[ConnectionLost], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = FrameReader()
        self._room = memoryview(bytearray(RECEIVE_BYTES))
        self._backlog = bytearray()
        self._sent = asyncio.Event()  # whether there is no backlog, or nobody reads it any more
        self._sent.set()
        self._is_open = True
        self._loop.add_reader(connection.fileno(), self.read)

    def write(self, data: bytes | bytearray) -> None:
        """Send a frame; what the socket does not accept now is sent when it is writable again."""
        if self._backlog:
            self._backlog += data
            return
        sent = self._send(data)
        if sent < len(data):
            self._backlog = bytearray(memoryview(data)[sent:])
            self._sent.clear()
            self._loop.add_writer(self._connection.fileno(), self._write_backlog)

    async def sent(self) -> None:
        """Wait until the socket has accepted all frames, or is not written any more."""
        await self._sent.wait()

    def read(self) -> None:
        """Receive what has arrived and pass on each complete message."""
        if not self._is_open:
            return
        try:
            num_bytes = self._connection.recv_into(self._room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # the worker exited with unread steps, or is unreachable
            num_bytes = 0
        if not num_bytes:
            self._on_lost(ConnectionLost("closed the connection", is_closed=True))
            return
        try:
            for payload in self._frames.feed(self._room[:num_bytes]):
                if self._is_open:
                    self._on_message(read_from_worker(payload))
        except WireError as error:
            self._on_lost(ConnectionLost(f"sent invalid data: {error}", is_closed=False))

    def send_goodbye(self) -> None:
        """Ask the worker to exit, unless earlier frames are still unsent."""
        if self._is_open and not self._backlog:
            with contextlib.suppress(OSError):
                self._connection.send(frame(Goodbye()))

    def close(self) -> None:
        """Stop reading and writing. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._sent.set()
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())

    def _write_backlog(self) -> None:
        del self._backlog[: self._send(self._backlog)]
        if not self._backlog:
            self._sent.set()
            self._loop.remove_writer(self._connection.fileno())

    def _send(self, data: bytes | bytearray) -> int:
        """Send without blocking; returns how many bytes need not be sent again."""
        try:
            return self._connection.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # The worker is gone. `read` finds that out too, after the last results.
            return len(data)
