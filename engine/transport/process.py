"""One worker process: spawned, loaded through its socket, ended without remains.

The child is a fresh interpreter that runs `engine.worker.entry`, with our module path and one end
of a socket pair. Shutting our end is the order to leave; whoever does not follow is terminated,
then killed, and always reaped. The child also dies with us (see `engine.worker.entry`).
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Self

from engine.errors import RefusedToStart
from engine.step import WorkerReport, WorkerSettings
from engine.transport.wire import (
    FrameReader,
    Load,
    Loaded,
    Progress,
    Refused,
    WireError,
    frame,
    read_from_worker,
)

RECEIVE_BYTES = 1 << 16
STDERR = 2
LAST_WORDS_SECONDS = 2.0  # to a process that has hung up, before it is pushed

OnProgress = Callable[[str, int, int], None]  # what, done, total


class WorkerProcess:
    """Owns a child process and our end of its socket, from `spawn` to `end`."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self._process = process
        self.connection = connection  # non-blocking

    @classmethod
    def spawn(cls, worker: str, env: Mapping[str, str]) -> Self:
        """Start a process for the class `worker` ("module:Class") with `env` on top of ours.

        Raises `RefusedToStart` when the machine does not let us.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        # The parent's path in its order, so that both processes import the same code.
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        arguments = ["--socket", str(theirs.fileno()), "--parent", str(os.getpid())]
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "engine.worker.entry", *arguments, worker],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=STDERR,
                    env={**os.environ, "PYTHONPATH": paths, **env},
                    process_group=0,  # Ctrl-C at the terminal is for the parent alone
                )
            except OSError as error:
                ours.close()
                raise RefusedToStart(f"cannot start a worker process: {error}") from error
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def load(self, settings: WorkerSettings, on_progress: OnProgress) -> WorkerReport:
        """Have the worker load. Raises `RefusedToStart`, also when the process dies over it."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.connection, frame(Load(settings)))
            return await self._await_report(on_progress)
        except WireError as error:
            raise RefusedToStart(f"the worker and we talk past each other: {error}") from error
        except (EOFError, ConnectionError):
            how = await self.end(LAST_WORDS_SECONDS)
            raise RefusedToStart(f"the worker {how} while loading") from None

    async def _await_report(self, on_progress: OnProgress) -> WorkerReport:
        loop = asyncio.get_running_loop()
        frames = FrameReader()
        while piece := await loop.sock_recv(self.connection, RECEIVE_BYTES):
            for payload in frames.feed(piece):
                match read_from_worker(payload):
                    case Progress(what, done, total):
                        on_progress(what, done, total)
                    case Loaded(report):
                        return report
                    case Refused(line):
                        raise RefusedToStart(line)
                    case other:
                        raise WireError(f"{type(other).__name__} came before the report")
        raise EOFError

    def kill(self) -> None:
        """End it now; `end` still has to reap it."""
        self._process.kill()

    async def end(self, grace: float) -> str:
        """Hang up, wait, terminate, wait, kill; at most `grace` seconds to each wait.

        Returns how the process ended, as the rest of a sentence. Idempotent.
        """
        with contextlib.suppress(OSError):  # the other end, or this one, is closed already
            self.connection.shutdown(socket.SHUT_RDWR)  # also wakes whoever still reads from it
        exited = asyncio.ensure_future(asyncio.to_thread(self._process.wait))
        try:
            for push in (self._process.terminate, self._process.kill):
                done, _ = await asyncio.wait({exited}, timeout=grace)
                if done:
                    break
                push()
            return how_it_ended(await exited)
        finally:
            self._process.kill()  # for the case that we are cancelled; no signal once reaped
            self.connection.close()


def how_it_ended(returncode: int) -> str:
    """A process's return code, as the rest of a sentence."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    number = -returncode
    hint = " (a machine out of memory does that)" if number == signal.SIGKILL else ""
    return f"was killed by signal {number}, {signal.strsignal(number)}{hint}"
