"""Upgrades: starts the successor of this server, and hands over to it once it is ready.

Until the successor has taken over, this server serves as before: if the new process has a wrong
flag, cannot load, crashes or takes too long, it is killed and nothing else has happened.
"""

import asyncio
import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import EngineError, StartupError
from gateway.serve.acceptor import Acceptor
from gateway.serve.upgrade import systemd
from gateway.serve.upgrade.channel import Channel, Predecessor, private_listener
from gateway.serve.upgrade.inherited import VARIABLE
from gateway.settings.settings import options
from gateway.store.store import Store

logger = logging.getLogger(__name__)
TAKE_SECONDS = 10.0  # a successor that is ready accepts connections within this time
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
IN_MEMORY = (
    "its store has files, batches or responses, and is in memory: they would be lost. Serve with "
    "--store FILE"
)


def command_line(arguments: Sequence[str] | None) -> list[str]:
    """The command that starts this server again, with other arguments if they are given.

    A script with an interpreter line is run by its own name, so that it may be another version.
    """
    own = len(sys.argv) - 1
    begin = sys.orig_argv[: len(sys.orig_argv) - own]
    begin[0] = sys.executable
    if len(begin) == 2 and _is_script(Path(begin[1])):
        begin = [os.path.abspath(begin[1])]
    return [*begin, *(sys.argv[1:] if arguments is None else ("serve", *arguments))]


def without_secrets(command: Sequence[str]) -> str:
    """The command line as it may be logged."""
    flags = {option.flag for option in options() if option.declared.is_secret}
    shown: list[str] = []
    for before, word in zip(("", *command), command, strict=False):
        flag, has_value, _ = word.partition("=")
        hidden = f"{flag}=…" if has_value and flag in flags else word
        shown.append("…" if before in flags else hidden)
    return " ".join(shown)


def _is_script(path: Path) -> bool:
    if not os.access(path, os.X_OK):
        return False
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def _spawn(
    command: Sequence[str], listener: socket.socket, channel: socket.socket
) -> subprocess.Popen[bytes]:
    """A process that inherits both sockets. It outlives this one, as asyncio's processes do not."""
    descriptors = (listener.fileno(), channel.fileno())
    environment = {**os.environ, VARIABLE: ",".join(map(str, descriptors))}
    return subprocess.Popen(command, pass_fds=descriptors, env=environment, process_group=0)


@dataclass(slots=True, eq=False)
class Successor:
    """The process of the next server, and the channel to it."""

    process: subprocess.Popen[bytes]
    channel: Channel
    files: Sequence[str] = ()  # its recording and its trace, of no use if it does not take over

    @classmethod
    async def start(cls, command: Sequence[str], listener: socket.socket) -> "Successor":
        """Raises `StartupError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = _spawn(command, listener, theirs)
            except OSError as error:
                ours.close()
                raise StartupError(f"cannot start {command[0]}: {error.strerror}") from error
        return cls(process, await Channel.over(ours))

    async def expect(self, kind: str, seconds: float) -> None:
        """Wait for a message. Raises `StartupError` with the reason if it does not come."""
        try:
            async with asyncio.timeout(seconds):
                message = await self.channel.receive()
                if message is not None and "files" in message:
                    self.files = message["files"]
                    message = await self.channel.receive()
        except TimeoutError:
            raise StartupError(f"it was not {kind} within {seconds:g} s") from None
        if message is None:
            raise StartupError(f"{await self._ending()}; its log says why")
        if kind not in message:
            raise StartupError(str(message["failed"]))

    async def _ending(self) -> str:
        code = await asyncio.to_thread(self.process.wait)
        return f"it ended with exit code {code}" if code >= 0 else f"it was killed by {-code}"

    def kill(self) -> None:
        """End it and remove its files; its workers end with it."""
        self.channel.close()
        self.process.kill()
        self.process.wait()
        for file in self.files:
            Path(file).unlink(missing_ok=True)


@dataclass(slots=True, eq=False)
class Upgrades:
    """The upgrades of one server: at most one takes over from it."""

    store: Store
    seconds: float  # until the successor is ready
    check: Callable[[], object]  # raises `StartupError` if two servers do not fit
    predecessor: Predecessor | None = None
    loaded: Callable[[], Sequence[str]] = tuple  # the models that are loaded
    handed_over: asyncio.Event = field(default_factory=asyncio.Event)
    successor: Successor | None = None  # once it has taken over
    secret: str = field(default_factory=lambda: secrets.token_hex(16))  # marks forwarded requests
    private: socket.socket | None = None  # on which these are accepted, once it has taken over
    _is_upgrading: bool = False

    async def upgrade(
        self, arguments: Sequence[str] | None, listener: socket.socket, acceptor: Acceptor
    ) -> int:
        """Start a successor and hand over to it. Returns its process id. Raises `StartupError` if
        it cannot take over; then this server goes on."""
        self._check()
        self._is_upgrading = True
        successor = None
        command = command_line(arguments)
        logger.info("upgrade: starting %s", without_secrets(command))
        try:
            await self.store.database.share()
            successor = await Successor.start(command, listener)
            await self._hand_over(successor, acceptor)
        except BaseException as error:
            if successor is not None:
                successor.kill()
            if isinstance(error, EngineError):
                logger.error("upgrade: %s; this server goes on", error)
            raise
        finally:
            self._is_upgrading = False
        return successor.process.pid

    def _check(self) -> None:
        if self._is_upgrading:
            raise StartupError("another upgrade is under way")
        if self.successor is not None:
            raise StartupError(f"the server {self.successor.process.pid} has taken over")
        if self.predecessor is not None and not self.predecessor.has_ended:
            raise StartupError(
                f"the server before, {self.predecessor.pid}, still finishes its requests; after "
                "SIGTERM it ends within --drain-seconds"
            )
        self.check()

    async def _hand_over(self, successor: Successor, acceptor: Acceptor) -> None:
        if await self.store.is_lost_at_end():
            raise StartupError(IN_MEMORY)
        path = self.store.database.path
        store = None if path is None else str(path)
        models = list(self.loaded())
        known = {"store": store, "secret": self.secret, "pid": os.getpid()}
        successor.channel.send(hello=True, removes_files=True, models=models, **known)
        await successor.expect("ready", self.seconds)
        acceptor.pause()
        private = private_listener(os.getpid())  # the successor may use it at once
        try:
            successor.channel.send(take=True)
            await successor.expect("taken", TAKE_SECONDS)
        except BaseException:
            acceptor.resume()
            private.close()
            raise
        self.private = private
        pid = successor.process.pid
        systemd.notify(f"MAINPID={pid}")
        adopt_descendants()
        self.successor = successor
        self.handed_over.set()
        logger.info("upgrade: the server %d has taken over; finishing the requests here", pid)

    def forward(self, number: signal.Signals) -> None:
        """Pass a signal on, unless systemd knows the successor."""
        if self.successor is not None and not systemd.is_notified():
            with suppress(ProcessLookupError):
                self.successor.process.send_signal(number)

    def released(self) -> None:
        """Nothing of a batch is computed here any more."""
        assert self.successor is not None, "called after the handover"
        self.successor.channel.send(released=True)


def adopt_descendants() -> None:
    """Become the parent of servers whose parent has ended, since this process may have to wait for
    them (`gateway.serve.upgrade.waiter`)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
