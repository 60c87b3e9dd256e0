"""Channel: messages between a server and its successor, JSON objects of one line each; and the
server that this one succeeds.

former server                    successor
  hello (store, secret, models) ───▶        it loads
         ◀─────────── files, then ready or failed
  take: it accepts no more ────────▶        it accepts
         ◀─────────── taken
  released: its batch lines ended ─▶        it runs batches
  end of the channel ──────────────▶        it reads the journal of held streams

The private socket on which `podway upgrade` asks a server for an upgrade.

It is a Unix socket in the abstract namespace, which needs no file: its name has the server's
process id and port. Only the user of the server and root may use it.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Self

import orjson

from engine.errors import EngineError, StartupError
from gateway.serve.upgrade.inherited import Inherited

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


class Predecessor:
    """The former server, which finishes its requests beside this one."""

    def __init__(self, inherited: Inherited, channel: Channel, store: str | None, pid: int) -> None:
        self.listener = inherited.listener
        self.store = None if store is None else Path(store)
        self.pid = pid
        self.secret = ""
        self.models: tuple[str, ...] = ()  # those that it had loaded
        self.released = asyncio.Event()  # it computes nothing of a batch any more
        self.ended = asyncio.Event()
        self.restored = asyncio.Event()  # its held streams can be read here
        self._channel = channel

    @classmethod
    async def join(cls, inherited: Inherited, files: Iterable[Path]) -> "Predecessor | None":
        """The former server, which removes these files if this one does not take over; None if it
        has ended meanwhile."""
        channel = await Channel.over(inherited.channel.dup())
        hello = await channel.receive()
        if hello is None:
            return None
        predecessor = cls(inherited, channel, hello["store"], hello["pid"])
        predecessor.secret = hello["secret"]
        predecessor.models = tuple(hello.get("models", ()))
        if "removes_files" in hello:  # earlier versions do not
            channel.send(files=[str(file) for file in files])
        return predecessor

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()

    async def take_over(self) -> None:
        """Say that this server is ready, and wait until the former one accepts no more."""
        self._channel.send(ready=True, pid=os.getpid())
        if await self._channel.receive() is None:
            self._end()

    def took_over(self) -> None:
        """Say that this server accepts connections."""
        self._channel.send(taken=True)

    async def follow(self) -> None:
        """Return when the former server has ended."""
        while not self.has_ended:
            message = await self._channel.receive()
            if message is None:
                self._end()
            elif "released" in message:
                self.released.set()

    async def restored_by(self, restore: Callable[[], Awaitable[object]]) -> None:
        """Once the former server has ended, restore its held streams. Requests for them wait."""
        await self.ended.wait()
        try:
            await restore()
        finally:
            self.restored.set()

    def _end(self) -> None:
        self.released.set()
        self.ended.set()
        self._channel.close()


PREFIX = "podway/upgrade/"
MAX_BYTES = 1 << 20
Upgrade = Callable[[Sequence[str] | None], Awaitable[int]]
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class RunningServer(NamedTuple):
    """A server on this machine."""

    pid: int
    port: int


def running_servers() -> list[RunningServer]:
    """The servers that can be upgraded by the user of this process."""
    servers = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = line.split()[-1]
        if not name.startswith("@" + PREFIX):
            continue
        pid, _, port = name.removeprefix("@" + PREFIX).partition(":")
        process = Path("/proc") / pid
        if process.exists() and os.geteuid() in (0, process.stat().st_uid):
            servers.add(RunningServer(int(pid), int(port)))
    return sorted(servers)


async def serve_control(port: int, upgrade: Upgrade) -> None:
    """Answer requests for upgrades until cancelled. `upgrade` returns the process id of the
    server that has taken over."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            if _uid_of(writer.get_extra_info("socket")) not in (0, os.geteuid()):
                return
            request = orjson.loads(await reader.readline())
            try:
                reply: dict[str, object] = {"pid": await upgrade(request["arguments"])}
            except EngineError as error:
                reply = {"error": str(error)}
            writer.write(orjson.dumps(reply) + b"\n")

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{PREFIX}{os.getpid()}:{port}")
    async with await asyncio.start_unix_server(answer, sock=listener, limit=MAX_BYTES) as server:
        await server.serve_forever()


def request_upgrade(server: RunningServer, arguments: Sequence[str] | None) -> int:
    """Ask a server to start its successor, and wait until that has taken over. Returns its process
    id; raises `StartupError` with the reason if the old one goes on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            peer.connect(f"\0{PREFIX}{server.pid}:{server.port}")
            peer.sendall(orjson.dumps({"arguments": arguments}) + b"\n")
            with peer.makefile("rb") as answers:
                line = answers.readline()
        except OSError as error:
            raise StartupError(f"cannot reach the server {server.pid}: {error.strerror}") from error
    if not line:
        raise StartupError(f"the server {server.pid} ended, or this user may not upgrade it")
    reply = orjson.loads(line)
    if "error" in reply:
        raise StartupError(f"not upgraded, the server goes on: {reply['error']}")
    return int(reply["pid"])


def _uid_of(peer: socket.socket) -> int:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
