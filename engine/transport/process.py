"""Worker processes of this machine: spawned, reached by a socket, ended without remains.

A child is a fresh interpreter that runs `engine.worker.process.entry`, with our module path and
one end of a socket pair. Shutting our end is the order to leave; whoever does not follow is
terminated, then killed, and always reaped. The child also dies with us (see
`engine.worker.process.entry`).
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from engine.errors import StartupError
from engine.step import Placement
from engine.transport.launcher import placements

STDERR = 2


class WorkerProcess:
    """Owns a child process and our end of its socket, from `spawn` to `end`."""

    def __init__(
        self, placement: Placement, process: subprocess.Popen[bytes], connection: socket.socket
    ) -> None:
        self.placement = placement
        self._process = process
        self.connection = connection  # non-blocking

    @classmethod
    def spawn(cls, placement: Placement, worker: str, env: Mapping[str, str]) -> Self:
        """Start a process for the class `worker` ("module:Class") with `env` on top of ours.

        It inherits the placement's `listener`. Raises `StartupError` when the machine does not
        let us.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        # The parent's path in its order, so that both processes import the same code.
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        arguments = ["--socket", str(theirs.fileno()), "--parent", str(os.getpid())]
        inherited = [theirs.fileno()]
        if placement.listener is not None:
            inherited.append(placement.listener)
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "engine.worker.process.entry", *arguments, worker],
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    stdout=STDERR,
                    env={**os.environ, "PYTHONPATH": paths, **env},
                    process_group=0,  # Ctrl-C at the terminal is for the parent alone
                )
            except OSError as error:
                ours.close()
                raise StartupError(f"cannot start a worker process: {error}") from error
        return cls(placement, process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

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


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """A `Launcher` of child processes that run the class `worker`, with `env` on top of ours."""

    worker: str
    env: Mapping[str, str]

    async def launch(self, num_stages: int, num_ranks: int) -> list[WorkerProcess]:
        """See `Launcher`. The workers meet on a port of the loopback that nobody else can take."""
        places = placements(num_stages, num_ranks)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            if len(places) > 1:
                meeting = f"127.0.0.1:{listener.getsockname()[1]}"
                places = [
                    replace(
                        place,
                        rendezvous=meeting,
                        listener=listener.fileno() if place.index == 0 else None,
                        num_local_workers=len(places),
                        local_index=place.index,
                    )
                    for place in places
                ]
            started: list[WorkerProcess] = []
            try:
                started.extend(
                    WorkerProcess.spawn(place, self.worker, self.env) for place in places
                )
            except StartupError:
                for process in started:
                    await process.end(grace=0.0)
                raise
        return started

    async def close(self) -> None:
        """Nothing is shared by the processes."""


def how_it_ended(returncode: int) -> str:
    """A process's return code, as the rest of a sentence."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    number = -returncode
    hint = " (a machine out of memory does that)" if number == signal.SIGKILL else ""
    return f"was killed by signal {number}, {signal.strsignal(number)}{hint}"
