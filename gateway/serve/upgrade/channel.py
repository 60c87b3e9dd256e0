"""Channel: messages between a server and its successor, JSON objects of one line each.

former server                    successor
  hello (store, secret, models) ───▶        it loads
         ◀─────────── files, then ready or failed
  take: it accepts no more ────────▶        it accepts
         ◀─────────── taken
  released: its batch lines ended ─▶        it runs batches
  end of the channel ──────────────▶        it reads the journal of held streams
"""

import asyncio
import socket
from typing import Any, Self

import orjson

BACKLOG = 2048  # beyond it a connection would be refused
Message = dict[str, Any]


class Channel:
    """One end of the channel."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Self:
        """The channel over one end of a pair of connected sockets, which it owns from now on."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, **message: object) -> None:
        """Send a message; nothing happens if the other process has ended."""
        if not self._writer.is_closing():
            self._writer.write(orjson.dumps(message) + b"\n")

    async def receive(self) -> Message | None:
        """The next message; None once the other process has ended."""
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):
            return None
        return orjson.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """End the channel after what was sent."""
        self._writer.close()


def private_socket(pid: int) -> str:
    """The name of the socket on which a server that has been replaced answers its successor, which
    needs no file."""
    return f"\0podway/finishing/{pid}"


def private_listener(pid: int) -> socket.socket:
    """That socket: connections to it wait until they are accepted."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(private_socket(pid))
    listener.listen(BACKLOG)
    return listener
