"""One worker's socket on the event loop: frames out without waiting, messages in as they come."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from engine.transport.wire import (
    FrameReader,
    FromWorker,
    Goodbye,
    WireError,
    frame,
    read_from_worker,
)

RECEIVE_BYTES = 1 << 16


class WorkerConnection:
    """Open from its making to `close`. Borrows the socket, which must not block.

    `take` gets each message and may raise `WireError`; `lose` gets the reason why no more will
    come, once: the worker's end, or bytes that are no message.
    """

    def __init__(
        self,
        connection: socket.socket,
        take: Callable[[FromWorker], None],
        lose: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._take = take
        self._lose = lose
        self._frames = FrameReader()
        self._backlog = bytearray()
        self._is_open = True
        self._loop.add_reader(connection.fileno(), self.read)

    def write(self, data: bytes | bytearray) -> None:
        """Hand a frame over; what the socket does not take now leaves when it does."""
        if self._backlog:
            self._backlog += data
            return
        sent = self._send(data)
        if sent < len(data):
            self._backlog = bytearray(memoryview(data)[sent:])
            self._loop.add_writer(self._connection.fileno(), self._write_backlog)

    def read(self) -> None:
        """Take what has come."""
        if not self._is_open:
            return
        try:
            piece = self._connection.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # it left with steps unread, or cannot be reached any more
            piece = b""
        if not piece:
            self._lose("left the connection")
            return
        try:
            for payload in self._frames.feed(piece):
                if self._is_open:
                    self._take(read_from_worker(payload))
        except WireError as error:
            self._lose(f"sent rubbish: {error}")

    def say_goodbye(self) -> None:
        """Ask the worker to leave, unless it still has frames to read."""
        if self._is_open and not self._backlog:
            with contextlib.suppress(OSError):
                self._connection.send(frame(Goodbye()))

    def close(self) -> None:
        """Neither read nor write any more. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())

    def _write_backlog(self) -> None:
        del self._backlog[: self._send(self._backlog)]
        if not self._backlog:
            self._loop.remove_writer(self._connection.fileno())

    def _send(self, data: bytes | bytearray) -> int:
        """How many bytes need no further care."""
        try:
            return self._connection.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # The worker is gone. The reader finds that out too, after the last answers.
            return len(data)
