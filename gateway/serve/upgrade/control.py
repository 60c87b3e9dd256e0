"""The private socket on which `podway upgrade` asks a server for an upgrade.

It is a Unix socket in the abstract namespace, which needs no file: its name has the server's
process id and port. Only the user of the server and root may use it.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import orjson

from engine.errors import EngineError, StartupError

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
